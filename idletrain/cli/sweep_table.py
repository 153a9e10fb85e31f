"""Print the trials of a sweep as a table, and tables in which nothing is cut."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from idletrain.sweeps.grid import SweepTrial
    from idletrain.sweeps.trial_results import SweepResult

FOLDED_LETTERS = 24  # of a column in a narrow terminal: names and numbers are still read at a glance
GAP = 2  # letters between two columns, and at both edges of a table together
WIDEST = 1 << 20  # letters; no table is as wide


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
    headings, rows = sweep_rows(found, results, watched, better)
    print_columns(headings, rows, left=("state", "run"))
    for name, result in results.items():
        for warning in result.record.get("warnings", ()):
            typer.echo(f"warning: {name}: {warning}", err=True)


def result_entries(found: Sequence[SweepTrial], results: Mapping[str, SweepResult]) -> list[dict[str, Any]]:
    """Return what trials have come to, in their own order, for JSON."""
    entries = []
    for trial in found:
        entry = asdict(results[trial.job.name])
        del entry["settings"]  # most are those of the job file
        entries.append({**entry, "name": trial.job.name, "set": trial.values})
    return entries


def sweep_rows(
    found: Sequence[SweepTrial], results: Mapping[str, SweepResult], watched: str, better: Literal["higher", "lower"]
) -> tuple[list[str], list[list[str]]]:
    """Return the headings of a table of the trials, and its rows, the best first."""
    from idletrain.observe import charts
    from idletrain.sweeps.grid import as_written

    def rank(trial: SweepTrial) -> tuple[bool, float]:
        value = results[trial.job.name].value
        known = value is not None and math.isfinite(value)
        return not known, (-value if better == "higher" else value) if known and value is not None else 0.0

    paths = list(found[0].values)
    priced = any(result.usd for result in results.values())
    classes = watched != "accuracy" and any(result.record.get("accuracy") is not None for result in results.values())
    scores = (watched, *(("accuracy",) if classes else ()))
    settings = (path.rpartition(".")[2] for path in paths)
    rows = []
    for trial in sorted(found, key=rank):
        result = results[trial.job.name]
        row = (
            *(as_written(trial.values[path]) for path in paths),
            result.state,
            str(result.values[-1][0] if result.values else "-"),
            charts.fixed(result.value),
            *((charts.fixed(result.record.get("accuracy")),) if classes else ()),
            charts.duration(result.record["seconds"]) if "seconds" in result.record else "-",
            *((charts.usd(result.usd),) if priced else ()),
            trial.job.name,
        )
        rows.append(list(row))
    return [*settings, "state", "rounds", *scores, "time", *(("cost",) if priced else ()), "run"], rows


def print_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Container[str], in_parts: bool = False
) -> None:
    """Print a table in which nothing is cut; in a narrow terminal, what is long goes on in the next line.

    Args:
        headings: Of the columns.
        rows: The texts of each row.
        left: Headings of the columns that are aligned on the left.
        in_parts: Print several tables, each with the first column, if a terminal has no room for all others.
    """
    from rich.cells import cell_len
    from rich.console import Console

    columns = list(zip(headings, *rows, strict=True))
    longest = [max(map(cell_len, column)) for column in columns]
    console = Console()
    room = console.width if sys.stdout.isatty() else WIDEST
    console.width = WIDEST  # a terminal goes on in its next line
    for part in _parts(longest, room) if in_parts else [range(len(columns))]:
        widths = _folded([longest[column] for column in part], room)
        console.print(_table([columns[column] for column in part], widths, left))


def _parts(longest: Sequence[int], room: int) -> list[list[int]]:
    """Return the columns of each of several tables: the first one and as many others as there is room for."""
    least = [min(letters, FOLDED_LETTERS) + GAP for letters in longest]
    parts = [[0]]
    for column in range(1, len(longest)):
        if len(parts[-1]) > 1 and sum(least[shown] for shown in (*parts[-1], column)) + GAP > room:
            parts.append([0])
        parts[-1].append(column)
    return parts


def _folded(longest: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns, of which the widest give way where there is no room."""
    widths = list(longest)
    while sum(widths) + GAP * (len(widths) + 1) > room and max(widths) > FOLDED_LETTERS:
        widths[widths.index(max(widths))] -= 1
    return widths


def _table(columns: Sequence[Sequence[str]], widths: Sequence[int], left: Container[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for (heading, *_), width in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        table.add_column(Text(heading), justify=justify, width=width, overflow="fold")
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(Text, row))  # whose brackets are no markup
    return table
