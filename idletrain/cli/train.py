"""Train a job's network, plan it, evaluate it, export it: `idletrain launch`, `plan`, `evaluate` and `export`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from idletrain.cli.arguments import JobFile, RunName, bytes_option, read_job, run_dir_of, seconds_option
from idletrain.cli.fabric import choose_settings
from idletrain.cli.spot import SpotOptions, launch_spot
from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.providers.protocol import CloudProvider, LaunchRequest, WorkerProvider
from idletrain.providers.table import provider_named

INTERRUPTED_EXIT = 130
app = typer.Typer()


@app.command()
def launch(
    job: JobFile,
    scheduler: Annotated[str | None, typer.Option(help="Use this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Workers; the job's nodes.count otherwise.")] = None,
    churn: Annotated[float | None, typer.Option(parser=seconds_option, help="Take a worker this often (15s).")] = None,
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
        Path | None, typer.Option(help="A recorded trace of preemptions, replayed by the sandbox.")
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
    settings = read_job(job, nodes, name)  # before what takes seconds to import
    from idletrain.observe.sinks import WatchSettings

    watch = WatchSettings(on_round=on_round, webhook=webhook, log_to=log_to or ())
    request = LaunchRequest(scheduler=scheduler, churn_seconds=churn, trace=trace, speed=speed, detach=detach)
    provider = provider_named(cloud or ("aws" if spot else "scheduler" if scheduler else "local"), request)
    if isinstance(provider, CloudProvider):
        launch_spot(settings, provider, SpotOptions(resume, yes, detach, as_json, watch, allow_control))
        return
    assert isinstance(provider, WorkerProvider)

    from rich.console import Console

    from idletrain.observe import display
    from idletrain.observe.forecast_record import ForecastTracker
    from idletrain.observe.provenance import command_line
    from idletrain.run import RunOptions, compose

    def report(text: str) -> None:
        if not as_json:
            typer.echo(f"idletrain: {text}", err=True)

    def decide(job: Job) -> tuple[Job, ForecastTracker | None]:
        if not provider.measurable:
            return job, None
        decided, choice = choose_settings(job, provider.scheduler, report)
        return decided, ForecastTracker(choice.expected.as_record(), choice.why) if choice else None

    options = RunOptions(
        provider=provider,
        resume=resume,
        watch=watch,
        allow_control=allow_control,
        command=command_line(sys.argv),
    )
    composition = compose(settings, options, decide=decide, report=report)
    shown = display.choose_display(as_json, Console(), options.summary)
    with shown:
        outcome = asyncio.run(composition.launch(sinks=(shown,)))
    if not as_json:
        again = f"idletrain launch {job} --resume" + (f" --name {name}" if name else "")
        again += (f" --cloud {cloud}" if cloud else "") + (f" --scheduler {scheduler}" if scheduler else "")
        for line in display.final_lines(shown.summary, _ending_text(outcome.status, again)):
            typer.echo(line)
    if outcome.status == "stopped":
        raise typer.Exit(INTERRUPTED_EXIT)
    if outcome.status == "diverged":
        raise typer.Exit(1)


@app.command()
def plan(
    job: JobFile,
    nodes: Annotated[int | None, typer.Option(min=1, help="Workers; the job's nodes.count otherwise.")] = None,
    memory: Annotated[int | None, typer.Option(parser=bytes_option, help="RAM of each worker (2GiB).")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Plan for this Dask cluster instead of local workers.")] = None,
) -> None:
    """Show how a job's network would be split, before anything runs."""
    from rich.console import Console

    from idletrain.cli.plan_table import plan_table
    from idletrain.run import prepare_job

    written = read_job(job, nodes)
    if memory:
        written = written.model_copy(update={"nodes": written.nodes.model_copy(update={"memory": memory})})
    prepared = prepare_job(written)  # a fault of the job shows before seconds of measuring
    settings, choice = choose_settings(written, scheduler, typer.echo, always=True)
    prepared = prepared if settings == written else prepare_job(settings)
    Console().print(plan_table(settings, prepared, forecast=choice is not None))


@app.command()
def evaluate(
    run: RunName, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """Evaluate a run's network after its last committed round."""
    import json

    from idletrain.export import load_run
    from idletrain.observe.display import score_text

    loaded = load_run(run_dir_of(run))
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


@app.command()
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(help="A .safetensors or .pt file.", show_default=False)],
) -> None:
    """Write a run's network as a state_dict that torch or safetensors loads."""
    from idletrain.export import load_run, save

    if to.suffix not in (".safetensors", ".pt"):
        raise JobError(f"--to: {to} should end in .safetensors or .pt")
    loaded = load_run(run_dir_of(run))
    save(loaded.module(), to)
    typer.echo(f"{to}: the network after round {loaded.rounds}")


def _ending_text(status: str, again: str) -> str:
    return {
        "completed": "done: all rounds",
        "reached": "done: the target accuracy is reached",
        "stopped": f"stopped; go on with: {again}",
        "diverged": "stopped: the training diverges (NaN in three attempts); lower training.optimizer.lr",
    }[status]
