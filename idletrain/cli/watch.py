"""Show runs from their records: `idletrain status` and `report`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idletrain.cli.arguments import run_dir_of
from idletrain.cli.cloud import Region, named_prefix, read_events, run_status
from idletrain.cli.runs import local_summary, the_one_that_trains
from idletrain.errors import JobError, RunError, reading
from idletrain.providers.table import cloud_named

if TYPE_CHECKING:
    from idletrain.observe.report import PastRun

RunNames = Annotated[
    list[str],
    typer.Argument(
        help="Runs: directories, names below runs/, s3:// prefixes, or names in a cloud.", show_default=False
    ),
]
RunsCloud = Annotated[str | None, typer.Option(help="The cloud that the runs are in: aws, sandbox, ...")]
app = typer.Typer()


@app.command(rich_help_panel="Watch")
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run's directory, or its name below runs/; the one that trains here otherwise.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    cloud: Annotated[str | None, typer.Option(help="The cloud that the run is in: aws, sandbox, ...")] = None,
    region: Region = None,
) -> None:
    """Show the state of a run, while it trains or after."""
    import json

    run = run or the_one_that_trains(cloud)

    from idletrain.cluster.access import link
    from idletrain.observe import display

    if cloud:
        with cloud_named(cloud).account(region) as account:
            summary, why, _ = run_status(account, run)
    else:
        summary, why = local_summary(run_dir_of(run)), ""
    if as_json:
        typer.echo(json.dumps(summary.as_record()))
        return
    for line in display.final_lines(summary, f"{summary.run}: {summary.status}" + (f": {why}" if why else "")):
        typer.echo(line)
    if not cloud and summary.status == "running" and summary.dashboard:
        typer.echo(f"  watch it at {link(run_dir_of(run), summary.dashboard)}")


@app.command(rich_help_panel="Watch")
def report(
    runs: RunNames,
    to: Annotated[
        Path | None, typer.Option(help="The HTML file; report.html in the run's directory otherwise.")
    ] = None,
    cloud: RunsCloud = None,
    region: Region = None,
) -> None:
    """Write how a run went, or how several compare, to one HTML file; print the short form."""
    from idletrain.observe import report as reports

    with _readable(runs):
        past_runs = _past_runs(runs, cloud, region)
        lines = [line for past_run in past_runs for line in reports.short(past_run)]
        page = reports.report_page(past_runs)
    for line in lines:
        typer.echo(line)
    local = len(runs) == 1 and not cloud and not runs[0].startswith("s3://")
    file = to or (run_dir_of(runs[0]) if local else Path()) / "report.html"
    try:
        if not to:  # a link in a directory that came from a stranger may lead anywhere
            file.unlink(missing_ok=True)
        with file.open("w" if to else "x") as out:
            out.write(page)
    except OSError as error:
        raise RunError(f"{file} cannot be written ({error.strerror}); name another with --to") from None
    typer.echo(f"  {file}")


@app.command(rich_help_panel="Watch")
def compare(
    runs: RunNames,
    cloud: RunsCloud = None,
    region: Region = None,
) -> None:
    """Print the results of runs side by side, and the settings that differ; `report` draws their curves."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from idletrain.observe import report as reports

    if len(runs) < 2:
        raise JobError("name two runs or more; `idletrain runs` lists them")
    with _readable(runs):
        past_runs = _past_runs(runs, cloud, region)
        rows = reports.comparison(past_runs)
    table = Table("", *(run.name for run in past_runs), box=box.SIMPLE, pad_edge=False)
    for name, values in rows:
        table.add_row(name, *values)
    Console().print(table)


def _past_runs(runs: Sequence[str], cloud: str | None, region: str | None) -> list[PastRun]:
    """Return runs as their records show them; those of a cloud by their names there."""
    import time

    from idletrain.observe.report import PastRun

    if cloud:
        with cloud_named(cloud).account(region) as account:
            events_of_runs = [(run, read_events(named_prefix(account, run))) for run in runs]
    else:
        events_of_runs = [(run, _events(run, region)) for run in runs]
    named = [(run.rstrip("/").rsplit("/", 1)[-1], events) for run, events in events_of_runs]
    return [PastRun.of(name, events, time.time()) for name, events in named]


def _readable(runs: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    return reading(f"the records of {' and '.join(runs)}", "take out the lines that something else changed")


def _events(run: str, region: str | None) -> list[Any]:
    """Return a run's events, from its directory or from below its s3:// prefix."""
    from idletrain.observe.records import read_records
    from idletrain.storage import S3Prefix

    if run.startswith("s3://"):
        with cloud_named("aws").account(region) as account:  # S3 is its store
            return read_events(S3Prefix.at(run, account.s3))
    file = run_dir_of(run) / "events.jsonl"
    if file.exists():
        with reading(file, "fix that and try again"):
            events = list(read_records(file))
        if events:
            return events
    if file.parent.is_dir():
        raise RunError(f"run {run} has no records in {file} yet; look again once it trains")
    names = sorted(path.parent.name for path in file.parent.parent.glob("*/events.jsonl"))
    known = f"there are: {', '.join(names)}" if names else "there is none at all"
    raise RunError(
        f"there is no run {file.parent.name} in {file.parent.parent}; {known}; of one in a cloud, add --cloud"
    )
