"""Show runs from their records: `idletrain status` and `report`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idletrain.cli.arguments import RUNS, FoundCloud, Region, run_dir_of
from idletrain.cli.cloud_records import named_prefix, run_status, stored_results, sweep_at
from idletrain.cli.places import events_of, find_run, is_over, noted, seen_until
from idletrain.cli.printing import show
from idletrain.cli.runs import list_runs, local_summary, the_one_that_trains
from idletrain.errors import JobError, RunError, reading

if TYPE_CHECKING:
    from idletrain.cloud.record import SweepOrder
    from idletrain.observe.report import PastRun
    from idletrain.observe.summary import Summary

RunNames = Annotated[
    list[str],
    typer.Argument(help="Runs: names, directories or s3:// prefixes; or a sweep's name.", show_default=False),
]
app = typer.Typer()


@app.command(rich_help_panel="Watch")
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run's name or directory; the only one that trains, or the list, otherwise.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Show the state of a run, while it trains or after."""
    import json

    place = find_run(run, cloud, region) if run else the_one_that_trains(cloud, region)
    if place is None:
        list_runs(cloud, region, as_json)
        return

    from idletrain.cluster.access import link
    from idletrain.observe import display

    page = ""
    if place.cloud:
        with place.account() as account:
            summary, why, _ = run_status(account, place.run)
            if sweep := sweep_at(prefix := named_prefix(account, place.run)):
                _show_sweep(prefix, sweep, summary, why, as_json=as_json)
                return
            if summary.status == "running" and summary.dashboard:
                start = {"kind": "run_started", "run": summary.run, "dashboard": summary.dashboard}
                page = place.provider().seen_from_here(start, account)["dashboard"]
    else:
        summary = local_summary(Path(place.run))
        why = summary.note if summary.status == "failed" else ""
        if summary.status == "running" and summary.dashboard:
            page = link(Path(place.run), summary.dashboard)
    if as_json:
        typer.echo(json.dumps(summary.as_record()))
        return
    for line in display.final_lines(summary, f"{summary.run}: {summary.status}" + (f": {why}" if why else "")):
        show(line)
    if page:
        typer.echo(f"  watch it at {page}")


def _show_sweep(prefix: Any, sweep: SweepOrder, summary: Summary, why: str, *, as_json: bool) -> None:
    """Print the state of a sweep that has its own machines, and what its trials have come to so far."""
    import json

    from idletrain.cli.sweep_table import print_results, result_entries
    from idletrain.sweeps.grid import from_plain

    with reading(f"{prefix.url}record.json", "look at it with the idletrain that wrote it"):
        trials = from_plain(sweep.trials)
    results = stored_results(prefix, [trial.job.name for trial in trials])
    if as_json:
        state = {"run": summary.run, "status": summary.status, "reason": why}
        typer.echo(json.dumps({**state, "trials": result_entries(trials, results)}))
        return
    show(f"{summary.run}: {summary.status}" + (f": {why}" if why else ""))
    print_results(trials, results, sweep.watched, sweep.better, as_json=False)


@app.command(rich_help_panel="Watch")
def report(
    runs: RunNames,
    to: Annotated[
        Path | None,
        typer.Option(help="The HTML file; report.html in the run's directory, or here for several runs, otherwise."),
    ] = None,
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Write how a run went, or how several compare, to one HTML file; print the short form."""
    from idletrain.observe import report as reports

    runs = [name for run in runs for name in _trials_of(run)]
    with _readable(runs):
        past_runs = _past_runs(runs, cloud, region)
        lines = [line for past_run in past_runs for line in reports.short(past_run)]
        page = reports.report_page(past_runs)
    for line in lines:
        typer.echo(line)
    only = find_run(runs[0], cloud, region) if len(runs) == 1 else None
    file = to or Path(only.run if only and only.cloud is None else "", "report.html")
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
    cloud: FoundCloud = None,
    region: Region = None,
) -> None:
    """Print the results of runs side by side, the settings that differ and the losses; `report` draws all curves."""
    from idletrain.cli.sweep_table import print_columns
    from idletrain.observe import report as reports

    runs = [name for run in runs for name in _trials_of(run)]
    if len(runs) < 2:
        raise JobError("name two runs or more; `idletrain runs` lists them")
    with _readable(runs):
        past_runs = _past_runs(runs, cloud, region)
        rows = reports.comparison(past_runs)
    headings = ["", *(run.name for run in past_runs)]
    print_columns(headings, [[name, *values] for name, values in rows], left=headings, in_parts=True)
    for line in reports.loss_plot(past_runs):
        typer.echo(f" {line}")


def _trials_of(run: str) -> list[str]:
    """Return the runs that a sweep's trials have records of, or the run itself if there is no sweep of that name."""
    from idletrain.sweeps.trial_results import ResultsFile

    if "/" in run or run_dir_of(run).exists():
        return [run]
    file = ResultsFile(RUNS / f"{run}.sweep.json")
    results = file.read(file.names())
    elsewhere = {place.name for place in noted()} if results else set()
    found = []
    for name, result in results.items():
        usual = RUNS / name  # where a rehearsed one is kept
        folders = [folder for folder in (Path(result.run_dir or usual), usual) if (folder / "events.jsonl").exists()]
        if name in elsewhere or usual in folders[:1]:
            found.append(name)
        elif folders:
            found.append(str(folders[0]))
    return found or [run]


def _past_runs(runs: Sequence[str], cloud: str | None, region: str | None) -> list[PastRun]:
    """Return runs as their records show them; those of a cloud by their names there."""
    from idletrain.observe.report import PastRun

    places = [find_run(run, cloud, region) for run in runs]
    found = [(place, events_of(place)) for place in places]
    past = [
        PastRun.of(place.name, events, seen_until(place, events), is_over=is_over(place)) for place, events in found
    ]
    for place, run in zip(places, past, strict=True):
        if not place.cloud:
            run.summary.run_dir = place.run  # a rehearsal's was on a machine that is gone
    return past


def _readable(runs: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    return reading(f"the records of {' and '.join(runs)}", "take out the lines that something else changed")
