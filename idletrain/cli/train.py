"""Train a job's network, plan it, evaluate it, export it: `idletrain launch`, `plan`, `evaluate` and `export`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from idletrain.cli.arguments import (
    FoundCloud,
    FoundRun,
    JobFile,
    LaunchRegion,
    Region,
    bytes_option,
    interval_option,
    read_job_file,
)
from idletrain.cli.fabric import confirm_settings
from idletrain.cli.output import losable_output
from idletrain.cli.places import directory_of, find_run
from idletrain.cli.printing import show, tell
from idletrain.cli.spot import SpotOptions, launch_spot
from idletrain.cli.trust import Trust, allow_code, import_from_here
from idletrain.errors import DIVERGED, IdletrainError, JobError, reading
from idletrain.held_interrupts import INTERRUPTED_EXIT, notice_if_slow, quit_by_interrupt
from idletrain.providers.protocol import CloudProvider, LaunchRequest, WorkerProvider
from idletrain.providers.table import cloud_named, provider_named

if TYPE_CHECKING:
    from idletrain.job import Job
    from idletrain.run import Composition, RunOptions

LastNetwork = Annotated[bool, typer.Option("--last", help="The last network, also if the run kept the best.")]
app = typer.Typer()


@app.command(rich_help_panel="Train")
def launch(
    job: JobFile,
    scheduler: Annotated[str | None, typer.Option(help="Use this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Workers, or a cloud's nodes; the job's nodes.count otherwise.")
    ] = None,
    churn: Annotated[
        float | None,
        typer.Option(
            parser=interval_option, metavar="15s", help="Take a worker, or a rehearsed node, this often (15s)."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue this job's run.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per round, and one at the end.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="The run's name; the job's otherwise.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Train on a cloud's spot machines; AWS without --cloud.")
    ] = False,
    cloud: Annotated[
        str | None, typer.Option(help="Where machines come from: aws, sandbox, or an installed provider's name.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start machines that cost money without asking.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and return.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace of preemptions, replayed by the rehearsal cloud.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1, help="How much faster than recorded the trace is replayed.")] = 1.0,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the dashboard's page drain and kill workers.")
    ] = False,
    on_round: Annotated[
        str | None, typer.Option(help="A shell command to run after each round, with JSON on its input.")
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(envvar="IDLETRAIN_WEBHOOK", help="POST a JSON summary to this URL at the run's end.")
    ] = None,
    log_to: Annotated[list[str] | None, typer.Option(help="mlflow or wandb, if installed; repeat for both.")] = None,
) -> None:
    """Train a job's network."""
    import_from_here()
    settings = read_job_file(job, nodes, name)  # before what takes seconds to import
    from idletrain.observe.sinks import WatchSettings

    watch = WatchSettings(on_round=on_round, webhook=webhook, log_to=log_to or ())
    request = LaunchRequest(
        scheduler=scheduler, churn_seconds=churn, trace=trace, speed=speed, detach=detach, resume=resume
    )
    source = cloud or ("aws" if spot else "scheduler" if scheduler else "local")
    with quit_by_interrupt():  # it may import torch
        provider = provider_named(source, request)
    if isinstance(provider, CloudProvider):
        launch_spot(settings, provider, SpotOptions(job, source, resume, yes, detach, as_json, watch, allow_control))
        return
    assert isinstance(provider, WorkerProvider)
    with quit_by_interrupt():
        from idletrain.observe.provenance import command_line
        from idletrain.run import RunOptions

    again = f"idletrain launch {job} --resume" + (f" --name {name}" if name else "")
    again += (f" --cloud {cloud}" if cloud else "") + (f" --scheduler {scheduler}" if scheduler else "")
    command = command_line(sys.argv)
    options = RunOptions(provider=provider, resume=resume, watch=watch, allow_control=allow_control, command=command)
    _train(settings, options, again, as_json)


def _train(settings: Job, options: RunOptions, again: str, as_json: bool) -> None:
    """Train a job from this process and print how it ended.

    Args:
        settings: The job.
        options: How it runs.
        again: The command that goes on with the run.
        as_json: Print JSON.
    """
    with quit_by_interrupt():
        from rich.console import Console

        from idletrain.cluster.access import with_link
        from idletrain.cluster.fork_server import is_fork
        from idletrain.nn.threads import use_threads_of_environment
        from idletrain.observe import display

    if is_fork():
        use_threads_of_environment()
    composition = _composed(settings, options, as_json)
    shown = display.choose_display(as_json, Console(), options.summary)
    with losable_output(), shown, _ended_at_once(again):
        outcome = asyncio.run(composition.launch(sinks=(with_link(settings.run_dir, shown),)))
    if not as_json:
        why_low = _why_low(settings, is_local=options.provider.scheduler is None)
        for line in display.final_lines(
            shown.summary, _ending_text(outcome.status, again, shown.summary.note), why_low
        ):
            show(line)
    if outcome.status == "stopped":
        raise typer.Exit(INTERRUPTED_EXIT)
    if outcome.status == "diverged":
        raise typer.Exit(1)


def _composed(settings: Job, options: RunOptions, as_json: bool) -> Composition:
    """Check a job and choose what it leaves open; the networks of choices that were not taken are freed."""
    with quit_by_interrupt():
        from idletrain.autotune.choose import remembering
        from idletrain.nn.prepare import prepare_job
        from idletrain.observe.forecast_record import ForecastTracker
        from idletrain.run import compose

    provider, prepare = options.provider, remembering(prepare_job)

    def report(text: str) -> None:
        if not as_json:
            tell(text)

    def decide(job: Job) -> tuple[Job, ForecastTracker | None]:
        if not provider.measurable:
            return job, None
        decided, choice = confirm_settings(job, provider.scheduler, report, prepare)
        return decided, ForecastTracker(choice.expected.as_record(), choice.why) if choice else None

    return compose(settings, options, prepare=prepare, decide=decide, report=report)


@contextlib.contextmanager
def _ended_at_once(again: str) -> Iterator[None]:
    """Tell what a second Ctrl-C did."""
    try:
        yield
    except KeyboardInterrupt:
        tell(f"ended at once; go on from the last committed round with: {again}")
        raise


def _why_low(job: Job, *, is_local: bool) -> str:
    """Return where the workers' time went that trained nothing, as a phrase; empty if nearly all of it trained."""
    from idletrain.observe.records import read_records
    from idletrain.observe.summary import summary_of
    from idletrain.observe.time_use import time_shares, why_low

    file = job.run_dir / "events.jsonl"
    try:
        with reading(file, "the run does without it"):
            events = list(read_records(file))
            shares = time_shares(events, summary_of(events).alive_seconds)
    except IdletrainError:  # something else has changed it: the run has ended well nevertheless
        return ""
    return why_low(shares, job.nodes.count, len(os.sched_getaffinity(0)) if is_local else None)


@app.command(rich_help_panel="Train")
def plan(
    job: JobFile,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Workers, or a cloud's nodes; the job's nodes.count otherwise.")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(parser=bytes_option, metavar="2GiB", help="RAM of each worker (2GiB).")
    ] = None,
    scheduler: Annotated[str | None, typer.Option(help="Plan for this Dask cluster instead of local workers.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Plan for spot machines: their cost, and what trains most for a dollar.")
    ] = False,
    cloud: Annotated[str, typer.Option(help="The cloud of --spot: aws, sandbox, ...")] = "aws",
    region: LaunchRegion = None,
) -> None:
    """Show how a job's network would be split, before anything runs."""
    import_from_here()
    with quit_by_interrupt():
        from rich.console import Console

        from idletrain.autotune.choose import can_choose_method, remembering
        from idletrain.cli.plan_table import plan_table
        from idletrain.epochs import with_rounds
        from idletrain.nn.prepare import prepare_job
        from idletrain.nn.rolling import check_rolling
        from idletrain.observe import charts

    written = read_job_file(job, nodes)
    if memory:
        written = written.model_copy(update={"nodes": written.nodes.model_copy(update={"memory": memory})})
    if spot:
        from idletrain.cli.plan_spot import show_spot_plan

        show_spot_plan(written, cloud_named(cloud), region)
        return
    prepare = remembering(prepare_job)
    prepare(written)  # a fault of the job shows before seconds of measuring
    settings, choice = confirm_settings(written, scheduler, typer.echo, prepare, always=True)
    settings, prepared = with_rounds(settings, prepare(settings))
    if settings.preemption.policy == "rolling":
        check_rolling(prepared.program)
    Console().print(plan_table(settings, prepared, forecast=choice is not None))
    if "method" in written.training.model_fields_set and can_choose_method(written):
        typer.echo("without training.method, a launch chooses it, by a trial if it is long enough")
    if choice:
        rounds = settings.training.rounds
        typer.echo(f"all {rounds} rounds take about {charts.duration(choice.round_seconds * rounds)} on this fleet")


@app.command(rich_help_panel="Train")
def evaluate(
    run: FoundRun,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    last: LastNetwork = False,
    trust: Trust = False,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Evaluate the network that a run gives; this executes the run's code.

    That is the best one if the job says what tells it (stop.patience or stop.metric), else the last one.
    """
    import json

    with quit_by_interrupt():
        from idletrain.export import load_run, require_run
        from idletrain.observe.display import score_text

    place = find_run(run, cloud, region)
    with directory_of(place) as run_dir:
        require_run(run_dir)
        allow_code(run_dir, trusted=trust or place.rehearsal is not None)  # a rehearsal is this user's own
        with notice_if_slow("loading the model and the data"):
            loaded = load_run(run_dir, last=last)
        _warn(loaded.note)
        with notice_if_slow("evaluating"):
            score = asdict(loaded.score())
            ranking, sparse = loaded.ranking(), loaded.retrieval()
    if as_json:
        typer.echo(json.dumps({"rounds": loaded.rounds, **score, **ranking, **sparse}))
    else:
        typer.echo(f"round {loaded.rounds}: {score_text(**score)}")
        for metric in ("P", "nDCG", "PSP") if ranking else ():
            typer.echo("  ".join(f"{metric}@{k} {ranking[f'{metric}@{k}']:.4f}" for k in (1, 3, 5)))
        if sparse:
            scores = f"{sparse['recall']:.1%} of the exact five best, P@1 {sparse['sparse P@1']:.4f}"
            typer.echo(f"sparse inference through the tables: {scores}")


@app.command(rich_help_panel="Train")
def replay(
    run: FoundRun,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    trust: Trust = False,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Train a run of preemption.policy: rolling again, on this machine, by its log; this executes the run's code.

    Its bits must be the same, whatever happened to its workers. Exits with 1 if they are not.
    """
    import json

    from rich.progress import Progress

    from idletrain.export import require_run
    from idletrain.replay import train_again

    with directory_of(find_run(run, cloud, region)) as run_dir, Progress(disable=as_json, transient=True) as progress:
        require_run(run_dir)
        allow_code(run_dir, trusted=trust)
        task = progress.add_task("updates", total=None)
        result = train_again(run_dir, lambda done, of: progress.update(task, completed=done, total=of))
    if as_json:
        typer.echo(json.dumps({"same": result.same, **asdict(result)}))
    elif result.same:
        ended = "the run's" if result.recorded_sha256 else "the run's so far; it has not ended"
        typer.echo(f"{result.updates} updates have the same bits, and params_sha256 {result.params_sha256} is {ended}")
    else:
        what = f"update {result.differs} of {result.updates}" if result.differs is not None else "the last network"
        typer.echo(f"{what} has other bits than the run's: other code, data, or a machine of another kind", err=True)
    if not result.same:
        raise typer.Exit(1)


@app.command(rich_help_panel="Train")
def export(
    run: FoundRun,
    to: Annotated[
        Path, typer.Option(help="A .safetensors or .pt file; of a transformers model a directory.", show_default=False)
    ],
    last: LastNetwork = False,
    trust: Trust = False,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Write a run's network as a state_dict that torch or safetensors loads.

    It is the best one if the job says what tells it (stop.patience or stop.metric), else the last one: to .safetensors
    that of the newest snapshot, and no code of the run is executed; to .pt that after the last committed round, and the
    run's code is executed. A name without an ending is a directory: into it goes what `from_pretrained` of a
    transformers model reads, like .pt.
    """
    with quit_by_interrupt():
        from idletrain.export import later_rounds, load_run, require_run, save, save_pretrained, saved_state

    if to.suffix not in (".safetensors", ".pt", ""):
        raise JobError(f"--to: {to} should end in .safetensors or .pt, or name a directory")
    if to.suffix and not to.parent.is_dir():
        raise JobError(f"--to: {to.parent} is no directory; make it, or name a file elsewhere")
    with directory_of(find_run(run, cloud, region)) as run_dir:
        require_run(run_dir)
        if to.suffix != ".safetensors":
            allow_code(run_dir, trusted=trust, instead=", or export to .safetensors, which executes none")
            with notice_if_slow("loading the model and the data"):
                loaded = load_run(run_dir, last=last)
            _warn(loaded.note)
            with notice_if_slow("assembling the network"):
                module, rounds = loaded.module(), loaded.rounds
            if to.suffix:
                save(module.state_dict(), to)
            else:
                save_pretrained(module, to)
        else:
            state, rounds = saved_state(run_dir, last=last)
            save(state, to)
            _warn(later_rounds(run_dir, rounds, last=last))
    typer.echo(f"{to}: the network after round {rounds}")


def _warn(note: str) -> None:
    if note:
        typer.echo(f"warning: {note}", err=True)


def _ending_text(status: str, again: str, note: str) -> str:
    return {
        "completed": "done: all rounds",
        "reached": "done: the target accuracy is reached",
        "stopped-early": f"stopped early: {note}",
        "stopped": f"stopped; go on with: {again}",
        "diverged": f"diverged: {DIVERGED}",
    }[status]
