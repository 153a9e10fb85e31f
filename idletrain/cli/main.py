"""The command line: reads arguments, builds what a command needs, prints, and turns errors into exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import sys
import tempfile
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli import cloud as cli_cloud
from idletrain.cli import fabric, schedule
from idletrain.cli.cloud import Cloud
from idletrain.cli.spot import SpotOptions, launch_spot
from idletrain.errors import IdletrainError, JobError, RunError
from idletrain.job import Job, load_job, parse_bytes, parse_job, parse_seconds

BUG_EXIT = 3
INTERRUPTED_EXIT = 130
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_cloud.app)
app.add_typer(fabric.app)
app.add_typer(schedule.app, name="schedule")

JobFile = Annotated[Path, typer.Argument(help="The job file.", show_default=False)]
RunName = Annotated[str, typer.Argument(help="The run's directory, or its name below runs/.", show_default=False)]


def _seconds(text: str) -> float:
    try:
        return float(parse_seconds(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _bytes(text: str) -> int:
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _share(text: str) -> float:
    from idletrain.worker.idle import parse_share

    try:
        return parse_share(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def launch(
    job: JobFile,
    scheduler: Annotated[str | None, typer.Option(help="Use this Dask cluster instead of local workers.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Workers; the job's nodes.count otherwise.")] = None,
    churn: Annotated[float | None, typer.Option(parser=_seconds, help="Take a worker this often (15s).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this job's run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a round, and a last one.")] = False,
    name: Annotated[str | None, typer.Option(help="The run's name; the job's otherwise.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Train on spot machines of a cloud.")] = False,
    cloud: Annotated[Cloud, typer.Option(help="Which cloud, with --spot.")] = Cloud.aws,
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
    settings = _job(job, nodes, name)  # before what takes seconds to import
    from idletrain.observe.sinks import Watch

    watch = Watch(on_round=on_round, webhook=webhook, log_to=log_to or ())
    if spot:
        asked = SpotOptions(cloud, resume, yes, detach, as_json, churn, trace, speed, watch, allow_control)
        launch_spot(settings, asked)
        return

    from rich.console import Console

    from idletrain.observe import display
    from idletrain.observe.forecast_record import Expectation
    from idletrain.observe.provenance import command_line
    from idletrain.run import Options, check_run, settle

    options = Options(
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
    settings, choice = fabric.decided(said, scheduler, lambda text: _report_progress(as_json, text))
    if settings != said:
        prepared = _prepare(settings)
    if choice:
        options = replace(options, expectation=Expectation(choice.expected.as_record(), choice.why))
    console = Console()
    shown = display.choose(as_json, console, options.summary)
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
    memory: Annotated[int | None, typer.Option(parser=_bytes, help="RAM of each worker (2GiB).")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Plan for this Dask cluster instead of local workers.")] = None,
) -> None:
    """Show how a job's network would be split, before anything runs."""
    from rich.console import Console

    from idletrain.cli.plan_table import preview

    said = _job(job, nodes)
    if memory:
        said = said.model_copy(update={"nodes": said.nodes.model_copy(update={"memory": memory})})
    prepared = _prepare(said)  # whatever is wrong with the job comes before what takes seconds
    settings, choice = fabric.decided(said, scheduler, typer.echo, always=True)
    prepared = prepared if settings == said else _prepare(settings)
    Console().print(preview(settings, prepared, foreseen=choice is not None))


@app.command()
def status(
    run: RunName,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    cloud: Annotated[Cloud | None, typer.Option(help="Of a run in a cloud, from any machine.")] = None,
    region: cli_cloud.Region = None,
) -> None:
    """Show how a run stands, while it goes on or after."""
    import json

    from idletrain.observe import display

    if cloud:
        with cli_cloud.account_of(cloud, region) as account:
            summary, why = cli_cloud.standing(account, run)
    else:
        summary, why = _standing(_run_dir(run)), ""
    if as_json:
        typer.echo(json.dumps(summary.as_record()))
        return
    for line in display.final_lines(summary, f"{summary.run}: {summary.status}" + (f": {why}" if why else "")):
        typer.echo(line)


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs: directories, names below runs/, s3:// prefixes, or names in a cloud.", show_default=False
        ),
    ],
    to: Annotated[
        Path | None, typer.Option(help="The HTML file; report.html in the run's directory otherwise.")
    ] = None,
    cloud: Annotated[Cloud | None, typer.Option(help="Of runs in a cloud, from any machine.")] = None,
    region: cli_cloud.Region = None,
) -> None:
    """Write how a run went, or how several compare, to one HTML file; print the short form."""
    import time

    from idletrain.observe import report as reports

    found: list[tuple[str, list[Any]]] = []
    if cloud:
        with cli_cloud.account_of(cloud, region) as account:
            found = [(run, cli_cloud.read_events(cli_cloud.prefix_of(account, run))) for run in runs]
    else:
        found = [(run, _events(run)) for run in runs]
    past = [reports.Past.of(run.rstrip("/").rsplit("/", 1)[-1], events, time.time()) for run, events in found]
    for one in past:
        for line in reports.short(one):
            typer.echo(line)
    local = len(runs) == 1 and not cloud and not runs[0].startswith("s3://")
    file = to or (_run_dir(runs[0]) if local else Path()) / "report.html"
    try:
        file.write_text(reports.page(past))
    except OSError as error:
        raise RunError(f"{file} cannot be written ({error.strerror}); name another with --to") from None
    typer.echo(f"  {file}")


@app.command()
def evaluate(
    run: RunName, as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False
) -> None:
    """Evaluate a run's network after its last committed round."""
    import json

    from idletrain.export import load_run
    from idletrain.observe.display import score_text

    loaded = load_run(_run_dir(run))
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
    loaded = load_run(_run_dir(run))
    save(loaded.module(), to)
    typer.echo(f"{to}: the network after round {loaded.rounds}")


@app.command()
def worker(
    scheduler: Annotated[str, typer.Argument(help="The scheduler's address.", show_default=False)],
    memory: Annotated[
        int | None, typer.Option(parser=_bytes, help="RAM to use (2GiB); all that is free otherwise.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name for people.")] = None,
    tls_ca_file: Annotated[Path | None, typer.Option(help="The cluster's CA.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This worker's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    when_idle: Annotated[
        float | None, typer.Option(parser=_share, help="Only while others use less than this of the machine (20%).")
    ] = None,
) -> None:
    """Lend this machine to a run until it ends or a SIGTERM says that the machine is needed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if when_idle is not None:
        from idletrain.worker import idle

        given: dict[str, object] = {"--memory": memory, "--name": name}
        given |= {"--tls-ca-file": tls_ca_file, "--tls-cert": tls_cert, "--tls-key": tls_key}
        options = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
        raise typer.Exit(idle.lend(["worker", scheduler, *options], when_idle))

    from idletrain.worker import process

    security = process.security_from(tls_ca_file, tls_cert, tls_key)
    asyncio.run(process.serve(scheduler, memory, name, security))


def main() -> None:
    """Run the command line; the one place where errors become exit codes."""
    sys.path.insert(0, "")  # a job's own factories lie where it is run from
    try:
        sys.exit(app(standalone_mode=False))
    except IdletrainError as error:
        faults = error.faults if isinstance(error, JobError) else (str(error),)
        for fault in faults:
            typer.echo(f"idletrain: {fault}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED_EXIT)
    except Exception as error:  # noqa: BLE001 (the one place for bugs)
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # usage errors of the parser
            typer.echo(f"idletrain: {error.format_message().rstrip('.')}; see idletrain --help", err=True)
            sys.exit(error.exit_code)
        typer.echo(f"idletrain: a bug, not your fault: {error!r}; please send {_bug_report()}", err=True)
        sys.exit(BUG_EXIT)


def _job(path: Path, nodes: int | None, name: str | None = None) -> Job:
    """A job file with what the command line says otherwise."""
    tree = load_job(path).model_dump(exclude_unset=True)
    tree |= {"name": name} if name else {}
    tree |= {"nodes": {**tree.get("nodes", {}), "count": nodes}} if nodes else {}
    return parse_job(tree)


def _prepare(job: Job) -> Any:
    from idletrain.nn.prepare import from_settings

    return from_settings(job.model, job.data, job.training, job.memory)


def _standing(run_dir: Path) -> Any:
    """The summary of a run on this machine, as it stands."""
    from idletrain.observe.summary import summarise
    from idletrain.rounds.durable.recovery import read_history
    from idletrain.storage import has_head

    read_history(run_dir)
    summary = summarise(run_dir / "events.jsonl")
    if summary.status == "running" and not has_head(run_dir):
        summary.status = "interrupted"
    return summary


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


def _events(run: str) -> list[Any]:
    """A run's events, from its directory or from below its prefix."""
    from idletrain.observe.records import read
    from idletrain.storage import S3Prefix

    if run.startswith("s3://"):
        from idletrain.cloud.aws.account import explained

        with explained():
            return cli_cloud.read_events(S3Prefix.at(run))
    file = _run_dir(run) / "events.jsonl"
    with contextlib.suppress(OSError):
        if events := list(read(file)):
            return events
    if file.parent.is_dir():
        raise RunError(f"run {run} has no records in {file} yet; look again once it trains")
    there = sorted(path.parent.name for path in file.parent.parent.glob("*/events.jsonl"))
    known = f"there are: {', '.join(there)}" if there else "there is none at all"
    raise RunError(
        f"there is no run {file.parent.name} in {file.parent.parent}; {known}; of one in a cloud, add --cloud"
    )


def _run_dir(run: str) -> Path:
    return Path(run) if "/" in run or Path(run, "ledger").exists() else Path("runs") / run


def _bug_report() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="idletrain-bug-", suffix=".txt", delete=False) as file:
        file.write(f"{platform.platform()} Python {sys.version}\n{sys.argv}\n\n{traceback.format_exc()}")
    return Path(file.name)
