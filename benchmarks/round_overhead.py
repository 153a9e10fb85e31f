"""Measure what a round costs beside the work in it.

Eight worker processes train subnets so small that training takes no time. A round's overhead is its length, from the
commit of the round before to its own, minus the longest pull + train + push among its attempts: leases through Dask,
the waits, the ledger and the commit. On fewer cores than workers it also holds the time that processes wait for a
core, so the same is measured with as many workers as cores.

    python -m benchmarks.round_overhead [--tiny] [--json FILE]

Target: a median of at most 25 ms with 8 workers.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Figure, at_most, report, with_preset
from benchmarks.runs import events_of, noise_data, of_kind, single_steps
from idletrain.observe.records import Record

TARGET_MS = 25.0
WARM_UP_ROUNDS = 5  # the first rounds open connections and load the program


@dataclass(frozen=True)
class Preset:
    """Repetitions, rounds and workers."""

    runs: int = 3
    rounds: int = 105
    workers: tuple[int, ...] = (8, len(os.sched_getaffinity(0)))


TINY = Preset(runs=1, rounds=8, workers=(2,))


def tree(workers: int, rounds: int) -> dict[str, Any]:
    """Return a job with one tiny subnet a worker and a single local step."""
    return {
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [8, 4 * workers, 2], "norm": None}},
        "data": noise_data(samples=64, inputs=8, classes=2),
        "training": single_steps(workers, rounds),
        "nodes": {"count": workers},
    }


def measured_rounds(events: Sequence[Record]) -> list[Record]:
    """Return the commits of all rounds but the first few."""
    return of_kind(events, "round_committed")[WARM_UP_ROUNDS:]


def overheads_ms(events: Sequence[Record]) -> list[float]:
    """Return the milliseconds of every round, but for the first few, that none of its attempts accounts for."""
    work: dict[int, float] = {}
    for event in of_kind(events, "attempt_ended"):
        seconds = sum(event.get(f"{part}_seconds", 0.0) for part in ("pull", "train", "push"))
        work[event["round"]] = max(work.get(event["round"], 0.0), seconds)
    rounds = [event for event in measured_rounds(events) if event["round"] in work]
    return [(event["seconds"] - work[event["round"]]) * 1000 for event in rounds]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, subtract and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    rounds_ms: dict[str, list[list[float]]] = {}
    for workers in preset.workers:
        runs = [events_of(tree(workers, preset.rounds)) for _ in range(preset.runs)]
        overheads = [overheads_ms(events) for events in runs]
        everything = [event["seconds"] * 1000 for events in runs for event in measured_rounds(events)]
        medians = [statistics.median(one) for one in overheads]
        what = f"overhead of a round, {workers} workers"
        figures.append(at_most(what, statistics.median(medians), "ms", TARGET_MS, medians))
        figures.append(Figure(f"whole round, {workers} workers", statistics.median(everything), "ms"))
        rounds_ms[str(workers)] = overheads
    return report("round_overhead", options, figures, overheads_ms=rounds_ms)


if __name__ == "__main__":
    main()
