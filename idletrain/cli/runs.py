"""List runs: `idletrain runs`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli.arguments import RUNS, Region
from idletrain.cli.cloud_records import UNFINISHED_STATES, bill_of, billed_events, named_prefix, run_status
from idletrain.cli.places import Place, noted
from idletrain.cli.printing import tell
from idletrain.errors import IdletrainError, reading
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.table import provider_named

app = typer.Typer()


@dataclass(frozen=True)
class RunLine:
    """A run in a list.

    Attributes:
        name: Its name.
        state: How it is, or why that cannot be read.
        rounds: Committed rounds.
        total_rounds: The rounds that it is to have.
        score: Its latest score, in words.
        updated: Unix time of its last event; 0 if unknown.
        usd: What it has cost in a cloud; None for a run on this machine.
        place: The cloud that it is in; empty for this machine.
    """

    name: str
    state: str
    rounds: int = 0
    total_rounds: int = 0
    score: str = ""
    updated: float = 0.0
    usd: float | None = None
    place: str = ""


@app.command("runs", rich_help_panel="Watch")
def list_runs(
    cloud: Annotated[str | None, typer.Option(help="List this cloud's runs alone: aws, sandbox, ...")] = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON array.")] = False,
) -> None:
    """List the runs below runs/ here, of rehearsals that go on, and of the clouds that you have used; newest first."""
    found = sorted(_lines(cloud, region), key=lambda line: -line[1].updated)
    if as_json:
        typer.echo(json.dumps([asdict(line) for _, line in found]))
        return
    for text in in_columns([line for _, line in found], time.time()):
        typer.echo(text)


def _lines(cloud: str | None, region: str | None) -> list[tuple[Place, RunLine]]:
    """Return all runs, each with where it is; report a cloud that cannot be read."""
    lines: list[tuple[Place, RunLine]] = []
    if not cloud and not region:
        runs = [run for run in (RUNS.iterdir() if RUNS.is_dir() else ()) if os.path.isfile(run / "events.jsonl")]  # noqa: PTH113 (false where it may not be read)
        lines += [(Place(str(run)), _local_line(run)) for run in runs]
    if cloud:
        provider_named(cloud, LaunchRequest())  # raises, if there is none of that name
    used = [place for place in noted() if cloud in (None, place.cloud) and region in (None, place.region)]
    if cloud and not used:
        used = [Place("", cloud, region)]
    for folder in dict.fromkeys(replace(place, run=place.run.removesuffix(place.name)) for place in used):
        try:
            with folder.account() as account:
                for name in named_prefix(account, folder.run).folders():
                    lines.append((replace(folder, run=folder.run + name), _cloud_line(account, folder, name)))
        except IdletrainError as error:
            tell(f"{folder.text}: {error}")
    return lines


def in_columns(lines: Sequence[RunLine], now: float) -> Iterator[str]:
    """Yield lines of text, one a run, below each other; a sentence if there are none."""
    from idletrain.observe.charts import duration

    if not lines:
        yield "no runs are here; `idletrain launch JOB` starts one"
        return
    rows = [
        (
            line.name,
            line.state,
            f"{line.rounds}/{line.total_rounds}" if line.total_rounds else "",
            line.score,
            "" if line.usd is None else f"${line.usd:.2f}",
            f"{duration(max(0.0, now - line.updated))} ago" if line.updated else "",
            line.place,
        )
        for line in lines
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True) if width).rstrip()


def _local_line(run_dir: Path) -> RunLine:
    try:
        return _line(run_dir.name, local_summary(run_dir))
    except IdletrainError as error:
        return RunLine(run_dir.name, f"unreadable: {error}")


def _cloud_line(account: Any, folder: Place, name: str) -> RunLine:
    try:
        summary, _, events = run_status(account, folder.run + name)
        has_machines = any(event["kind"] == "instance_launched" for event in events)  # a trial has those of its sweep
        prefix = named_prefix(account, folder.run + name)
        usd = bill_of(billed_events(account, prefix, events), time.time())["spent_usd"] if has_machines else None
    except IdletrainError as error:
        return RunLine(name, f"unreadable: {error}", place=folder.text)
    return replace(_line(name, summary, usd), place=folder.text)


def _line(name: str, summary: Any, usd: float | None = None) -> RunLine:
    scores = (("accuracy", summary.accuracy), ("loss", summary.loss))
    score = next((f"{what} {value:.4f}" for what, value in scores if value is not None), "")
    return RunLine(name, summary.status, summary.rounds, summary.total_rounds, score, summary.updated, usd)


def the_one_that_trains(cloud: str | None, region: str | None) -> Place | None:
    """Return the only run that trains; None if there is none, or there are several."""
    running = [place for place, line in _lines(cloud, region) if line.state in UNFINISHED_STATES]
    return running[0] if len(running) == 1 else None


def local_summary(run_dir: Path) -> Any:
    """Return the summary of a run on this machine; `interrupted` if no head holds its directory."""
    from idletrain.observe.summary import summarise
    from idletrain.rounds.durable.history import read_history
    from idletrain.storage import has_head

    read_history(run_dir)
    events = run_dir / "events.jsonl"
    with reading(events, "`idletrain evaluate` does without it"):
        summary = summarise(events)
    summary.run_dir = str(run_dir)  # a rehearsal's was on a machine that is gone
    if summary.status in UNFINISHED_STATES and not has_head(run_dir):
        summary.status = "interrupted"
    return summary
