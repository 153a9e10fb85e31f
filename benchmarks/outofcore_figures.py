"""Figures and tables of `benchmarks.outofcore`, from its measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.report import Figure, at_least, at_most

SHOWN_MODES = 24  # of a plan in a table
SMALLER = "smaller batch"
SWAPPING = ("swap all", "swap, keep the tail")
OVER_PLAN = {100.0: 1.52, 300.0: 1.15}  # at least, by the link's MB/s: the paper's, and what a quicker link leaves
NAMED = (
    "swap all",
    "recompute all",
    "recompute segments",
    "recompute all, inputs swapped",
    "swap, keep the tail",
    "recompute, keep the tail",
)


def compiled_table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of compiled networks for RESULTS.md."""
    head = ["network", "activation memory budget", "compiled / in core", "memory", "memory in core"]
    lines = [
        [
            row["network"],
            f"{row['part']:.0%}",
            f"{row['over_in_core']:.2f}",
            *(f"{row[key] >> 20} MiB" for key in ("bytes", "in_core_bytes")),
        ]
        for row in rows
    ]
    return {
        "title": "compiled by torch, with other bits (it fuses), and a budget for activations",
        "head": head,
        "rows": lines,
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Sum the rows up: medians of the ratios of steps of one turn."""
    add_ratios(rows)
    for row in rows:
        row["swap_style_over_plan"] = best_over_plan(row, SWAPPING)
        row["any_single_over_plan"] = best_over_plan(row, NAMED)
    every = [row["any_single_over_plan"] for row in rows if row["any_single_over_plan"]]
    models = _of_models(rows, "any_single_over_plan")
    native = [row["plan_over_in_core"] for row in rows if not row["mb_per_second"]]
    paced = [r["plan_over_in_core"] * r["tried_in_core_seconds"] / r["predicted_seconds"] - 1 for r in rows]
    raw = [statistics.median(row["seconds"]["plan"]) / row["predicted_seconds"] - 1 for row in rows]
    memory = [max(row["step_bytes"]) / row["predicted_bytes"] - 1 for row in rows]
    over = [step > row["budget"] for row in rows for step in row["step_bytes"]]
    return [
        *_swap_style(rows),
        *(_any_single(every, models) if every else ()),
        at_most("plan / in core on the disk as it is, worst", max(native), "", 1.15, native),
        at_most("plan / in core on the disk as it is, mean", mean_ratio(native), "", 1.15),
        at_most("step time against its prediction, median error", _median_error(raw), "", 0.10, raw),
        at_most("step time against its prediction, worst error", max(map(abs, raw)), "", 0.25),
        at_most("plan / in core against its prediction, median error", _median_error(paced), "", 0.10, paced),
        at_most("plan / in core against its prediction, worst error", max(map(abs, paced)), "", 0.25),
        at_most("peak memory over its prediction, worst", max(memory), "", 0.10, memory),
        at_most("steps by a plan that took more than the budget", float(sum(over)), f"of {len(over)}", 0.0),
        at_most("steps by a plan with other bits than in core", float(sum(not r["same_bits"] for r in rows)), "", 0.0),
    ]


def _any_single(every: list[float], models: list[float]) -> tuple[Figure, Figure]:
    what = "best single technique with the same bits / plan"
    return (
        at_least(f"{what}, mean over models", mean_ratio(models), "", 1.03, models),
        at_least(f"{what}, worst case", min(every), "", 0.97, every),
    )


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row how many times as long as the plan each technique takes, and the plan as a step in core."""
    for row in rows:
        row["over_plan"] = {name: median_ratio(own, row["seconds"]["plan"]) for name, own in row["seconds"].items()}
        row["over_plan"] |= dict.fromkeys(row["same_plan"], 1.0)
        row["plan_over_in_core"] = 1 / row["over_plan"]["in core"]


def _swap_style(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the paper's comparison at each throttled link."""
    figures: list[Figure] = []
    for speed in sorted({row["mb_per_second"] for row in rows if row["mb_per_second"]}):
        ratios = _of_models([row for row in rows if row["mb_per_second"] == speed], "swap_style_over_plan")
        if not ratios:  # no such technique keeps to its budget
            continue
        what = f"best swap-style / plan at {speed:.0f} MB/s, mean over models"
        figures.append(at_least(what, mean_ratio(ratios), "", OVER_PLAN[speed], ratios))
    return figures


def _of_models(rows: Sequence[dict[str, Any]], ratio: str) -> list[float]:
    """Return each model's mean over its budgets and links: models count alike, however many budgets a plan fits."""
    by_network: dict[str, list[float]] = {}
    for row in rows:
        if row[ratio]:
            by_network.setdefault(row["network"], []).append(row[ratio])
    return [mean_ratio(ratios) for ratios in by_network.values()]


def median_ratio(technique: Sequence[float], plan: Sequence[float]) -> float:
    """Return the median ratio of the seconds that two techniques took in each turn."""
    return statistics.median(one / other for one, other in zip(technique, plan, strict=True))


def _median_error(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def best_over_plan(row: dict[str, Any], names: Sequence[str]) -> float | None:
    """Return how many times as long as the plan the best of some techniques takes; None where none of them fits.

    In every turn the best is who was in the others: the quickest of several is quick by luck, too.
    """
    plan: list[float] = row["seconds"]["plan"]
    seconds_by_name = {name: plan if name in row["same_plan"] else row["seconds"].get(name) for name in names}
    fitting: list[list[float]] = [seconds for seconds in seconds_by_name.values() if seconds]
    if not fitting:
        return None
    ratios = []
    for turn, own in enumerate(plan):
        others = [t for t in range(len(plan)) if t != turn] or [turn]
        best = min(fitting, key=lambda seconds: sum(seconds[t] for t in others))
        ratios.append(best[turn] / own)
    return statistics.median(ratios)


def table_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a table for RESULTS.md: a row per network, link and budget; `-` where a technique does not fit."""
    others = (*NAMED, SMALLER)
    ratios = ["plan / in core", *(f"{name} / plan" for name in others)]
    lines = []
    for row in rows:
        link = f"{row['mb_per_second']:.0f} MB/s" if row["mb_per_second"] else "the disk"
        measured = [row["plan_over_in_core"], *map(row["over_plan"].get, others)]
        modes = row["letters"] if len(row["letters"]) <= SHOWN_MODES else f"{row['letters'][:SHOWN_MODES]}..."
        cells = [f"{row['network']} (from {row['least_part']:.0%})", link, f"{row['part']:.0%}", modes]
        lines.append([*cells, *("-" if r is None else f"{r:.2f}" for r in measured)])
    head = ["network", "link", "budget", "plan", *ratios]
    return {
        "title": "a step beyond memory, technique by technique (medians of ratios of steps of one turn)",
        "head": head,
        "rows": lines,
    }


def mean_ratio(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.mean(map(math.log, ratios)))
