"""`idletrain launch`, `plan`, `evaluate` and `export`: what makes a network of a job, and what one does with it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli.arguments import JobFile, RunName, bytes_option, read_job, run_dir_of, seconds_option
from idletrain.cli.cloud import CloudName
from idletrain.cli.fabric import choose_settings
from idletrain.cli.spot import SpotOptions, launch_spot
from idletrain.errors import JobError
from idletrain.job import Job

INTERRUPTED_EXIT = 130
app = typer.Typer()


@app.command()
def launch(
    job: JobFile,
    scheduler: Annotated[str | None, typer.Option(help="Use this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Workers; the job's nodes.count otherwise.")] = None,
    churn: Annotated[float | None, typer.Option(parser=seconds_option, help="Take a worker this often (15s).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this job's run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a round, and a last one.")] = False,
    name: Annotated[str | None, typer.Option(help="The run's name; the job's otherwise.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Train on spot machines of a cloud.")] = False,
    cloud: Annotated[CloudName, typer.Option(help="Which cloud, with --spot.")] = CloudName.aws,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before machines are paid for.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Start it, and leave it to itself.")] = False,
    trace: Annotated[Path | None, typer.Option(help="A recorded trace by which the sandbox takes nodes.")] = None,
    speed: Annotated[float, typer.Option(min=1, help="How much faster than recorded.")] = 1.0,
    allow_control: Annotated[
        bool, typer.Option("--allow-control", help="Let the dashboard's page drain and kill workers.")
    ] = False,
    on_round: Annotated[str | None, typer.Option(help="A shell command after a round; JSON on its input.")] = None,
    webhook: Annotated[
        str | None, typer.Option(envvar="IDLETRAIN_WEBHOOK", help="POST a JSON summary there at the run's end.")
    ] = None,
    log_to: Annotated[list[str] | None, typer.Option(help="mlflow or wandb, if installed; repeat for both.")] = None,
) -> None:
    """Train a job's network."""
    settings = read_job(job, nodes, name)  # before what takes seconds to import
    from idletrain.observe.sinks import WatchSettings

    watch = WatchSettings(on_round=on_round, webhook=webhook, log_to=log_to or ())
    if spot:
        asked = SpotOptions(cloud, resume, yes, detach, as_json, churn, trace, speed, watch, allow_control)
        launch_spot(settings, asked)
        return

    from rich.console import Console

    from idletrain.observe import display
    from idletrain.observe.forecast_record import ForecastTracker
    from idletrain.observe.provenance import command_line
    from idletrain.run import RunOptions, check_run, settle

    options = RunOptions(
        scheduler=scheduler,
        resume=resume,
        churn_seconds=churn,
        watch=watch,
        allow_control=allow_control,
        command=command_line(sys.argv),
    )
    check_run(settings, options)
    if settings.model.args.get("sampler") == "auto":
        _report_progress(as_json, "trying samplers for a minute")
    said = settle(settings)
    _report_progress(as_json, "reading the model and the data")
    prepared = _prepare(said)
    settings, choice = choose_settings(said, scheduler, lambda text: _report_progress(as_json, text))
    if settings != said:
        prepared = _prepare(settings)
    if choice:
        options = replace(options, forecast=ForecastTracker(choice.expected.as_record(), choice.why))
    console = Console()
    shown = display.choose_display(as_json, console, options.summary)
    with shown:
        ending = asyncio.run(_launch(settings, prepared, options, shown))
    if not as_json:
        again = f"idletrain launch {job} --resume" + (f" --name {name}" if name else "")
        again += f" --scheduler {scheduler}" if scheduler else ""
        for line in display.final_lines(shown.summary, _ending_text(ending.status, again)):
            typer.echo(line)
    if ending.status == "stopped":
        raise typer.Exit(INTERRUPTED_EXIT)
    if ending.status == "diverged":
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

    said = read_job(job, nodes)
    if memory:
        said = said.model_copy(update={"nodes": said.nodes.model_copy(update={"memory": memory})})
    prepared = _prepare(said)  # whatever is wrong with the job comes before what takes seconds
    settings, choice = choose_settings(said, scheduler, typer.echo, always=True)
    prepared = prepared if settings == said else _prepare(settings)
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
        for kind in ("P", "nDCG", "PSP") if ranking else ():
            typer.echo("  ".join(f"{kind}@{k} {ranking[f'{kind}@{k}']:.4f}" for k in (1, 3, 5)))
        if sparse:
            found = f"{sparse['recall']:.1%} of the exact five best, P@1 {sparse['sparse P@1']:.4f}"
            typer.echo(f"sparse inference through the tables: {found}")


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


def _prepare(job: Job) -> Any:
    from idletrain.nn.prepare import from_settings

    return from_settings(job.model, job.data, job.training, job.memory)


async def _launch(job: Job, prepared: Any, options: Any, sink: Any) -> Any:
    from idletrain.run import launch as run

    return await run(job, prepared, replace(options, sinks=(sink,)))


def _report_progress(quiet: bool, text: str) -> None:
    if not quiet:
        typer.echo(f"idletrain: {text}", err=True)


def _ending_text(status: str, again: str) -> str:
    return {
        "completed": "done: all rounds",
        "reached": "done: the target accuracy is reached",
        "stopped": f"stopped; go on with: {again}",
        "diverged": "stopped: the training diverges (NaN in three attempts); lower training.optimizer.lr",
    }[status]
