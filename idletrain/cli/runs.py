"""List runs: `idletrain runs`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from idletrain.cli.arguments import RUNS
from idletrain.cli.cloud import Region, bill_of, named_prefix, run_status
from idletrain.errors import IdletrainError, JobError, reading
from idletrain.providers.table import cloud_named

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
    """

    name: str
    state: str
    rounds: int = 0
    total_rounds: int = 0
    score: str = ""
    updated: float = 0.0
    usd: float | None = None


@app.command("runs", rich_help_panel="Watch")
def list_runs(
    cloud: Annotated[str | None, typer.Option(help="List a cloud's runs: aws, sandbox, ...")] = None,
    region: Region = None,
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON array.")] = False,
) -> None:
    """List the runs below runs/ here, or those of a cloud, the newest first."""
    if cloud:
        with cloud_named(cloud).account(region) as account:
            lines = [_cloud_line(account, name) for name in named_prefix(account, "").folders()]
    else:
        lines = [_local_line(events.parent) for events in RUNS.glob("*/events.jsonl")]
    lines.sort(key=lambda line: -line.updated)
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines]))
        return
    for text in in_columns(lines, time.time()):
        typer.echo(text)


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


def _cloud_line(account: Any, name: str) -> RunLine:
    try:
        summary, _, events = run_status(account, name)
        bill = bill_of(events)
    except IdletrainError as error:
        return RunLine(name, f"unreadable: {error}")
    return _line(name, summary, bill["spent_usd"])


def _line(name: str, summary: Any, usd: float | None = None) -> RunLine:
    scores = (("accuracy", summary.accuracy), ("loss", summary.loss))
    score = next((f"{what} {value:.4f}" for what, value in scores if value is not None), "")
    return RunLine(name, summary.status, summary.rounds, summary.total_rounds, score, summary.updated, usd)


def the_one_that_trains(cloud: str | None) -> str:
    """Return the directory of the only run that trains here.

    Raises:
        JobError: there is none, or there are several, or a cloud is meant.
    """
    if cloud:
        raise JobError(f"name a run; `idletrain runs --cloud {cloud}` lists them")
    lines = [_local_line(events.parent) for events in RUNS.glob("*/events.jsonl")]
    match [line.name for line in lines if line.state == "running"]:
        case [name]:
            return str(RUNS / name)
        case []:
            raise JobError("no run trains here; name one, or list them by `idletrain runs`")
        case names:
            raise JobError(f"several runs train here: {', '.join(sorted(names))}; name one")


def local_summary(run_dir: Path) -> Any:
    """Return the summary of a run on this machine; `interrupted` if no head holds its directory."""
    from idletrain.observe.summary import summarise
    from idletrain.rounds.durable.history import read_history
    from idletrain.storage import has_head

    read_history(run_dir)
    events = run_dir / "events.jsonl"
    with reading(events, "`idletrain evaluate` does without it"):
        summary = summarise(events)
    if summary.status == "running" and not has_head(run_dir):
        summary.status = "interrupted"
    return summary
