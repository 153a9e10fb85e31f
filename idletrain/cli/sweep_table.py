"""Print the trials of a sweep as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from idletrain.sweeps.grid import SweepTrial
    from idletrain.sweeps.trial_results import SweepResult

LEAST_COLUMNS = 76


def print_results(
    found: Sequence[SweepTrial],
    results: Mapping[str, SweepResult],
    watched: str,
    better: Literal["higher", "lower"],
    *,
    as_json: bool,
) -> None:
    """Print what trials have come to, as a table with the best first, or as JSON in their own order."""
    if as_json:
        typer.echo(json.dumps(result_entries(found, results)))
        return
    from rich.console import Console

    console = Console()
    console.width = max(console.width, LEAST_COLUMNS)  # what is wider than a terminal goes on in its next line
    console.print(sweep_table(found, results, watched, better))
    for name, result in results.items():
        for warning in result.record.get("warnings", ()):
            typer.echo(f"warning: {name}: {warning}", err=True)


def result_entries(found: Sequence[SweepTrial], results: Mapping[str, SweepResult]) -> list[dict[str, Any]]:
    """Return what trials have come to, in their own order, for JSON."""
    return [{**asdict(results[trial.job.name]), "name": trial.job.name, "set": trial.values} for trial in found]


def sweep_table(
    found: Sequence[SweepTrial], results: Mapping[str, SweepResult], watched: str, better: Literal["higher", "lower"]
) -> RenderableType:
    """Return a table of the trials, the best first."""
    from rich import box
    from rich.table import Table

    from idletrain.observe import charts
    from idletrain.sweeps.grid import as_written

    def rank(trial: SweepTrial) -> tuple[bool, float]:
        value = results[trial.job.name].value
        known = value is not None and math.isfinite(value)
        return not known, (-value if better == "higher" else value) if known and value is not None else 0.0

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    paths = list(found[0].values)
    priced = any(result.usd for result in results.values())
    classes = watched != "accuracy" and any(result.record.get("accuracy") is not None for result in results.values())
    scores = (watched, *(("accuracy",) if classes else ()))
    settings = (path.rpartition(".")[2] for path in paths)
    for column in (*settings, "state", "rounds", *scores, "time", *(("cost",) if priced else ())):
        table.add_column(column, justify="left" if column == "state" else "right", no_wrap=True)
    table.add_column("run", overflow="fold")  # whole: other commands take it
    for trial in sorted(found, key=rank):
        result = results[trial.job.name]
        table.add_row(
            *(as_written(trial.values[path]) for path in paths),
            result.state,
            str(result.values[-1][0] if result.values else "-"),
            charts.fixed(result.value),
            *((charts.fixed(result.record.get("accuracy")),) if classes else ()),
            charts.duration(result.record["seconds"]) if "seconds" in result.record else "-",
            *((charts.usd(result.usd),) if priced else ()),
            trial.job.name,
        )
    return table
