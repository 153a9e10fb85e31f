"""Does a round take what it was expected to take?

A look at a fleet of as many workers as cores, as a launch takes it; then cases of the comparison, a few rounds of each,
their seconds beside those that were foreseen.

    python -m benchmarks.forecast [--tiny] [--json FILE]

Target: within 15 % of what was measured, every case.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.methods import CASES
from benchmarks.report import Figure, arguments, at_most, report
from benchmarks.runs import of_kind, run, temporary_job
from idletrain.fabric import cluster, outlook
from idletrain.fabric.forecast import PARTS, Fleet
from idletrain.fabric.survey import survey

OFF = 0.15
WARM_UP_ROUNDS = 1  # the first loads the program
TRAININGS = (("ist", 50), ("local-sgd", 10))
ROUNDS = 6


async def fleet_of(count: int) -> Fleet:
    """A look at workers on this machine."""
    async with cluster.here(count) as client:
        return await survey(client)


def tree(case: str, method: str, local_steps: int, workers: int, rounds: int) -> dict[str, Any]:
    """A job of a case."""
    found = CASES[case]
    return {
        "model": found.model,
        "data": found.data,
        "training": {
            "method": method,
            "subnets": workers,
            "local_steps": local_steps,
            "rounds": rounds,
            "batch_size": found.batch_size,
            "optimizer": {"lr": 0.05},
            "evaluate_every": 1000,
        },
        "nodes": {"count": workers},
    }


def compared(case: str, method: str, local_steps: int, fleet: Fleet, rounds: int) -> Iterator[Figure]:
    """A case's rounds, and how far off the forecast was."""
    with temporary_job(tree(case, method, local_steps, fleet.nodes, rounds)) as job:
        _, choice = outlook.chosen(job, fleet)
        committed = of_kind(asyncio.run(run(job)), "round_committed")[WARM_UP_ROUNDS:]
    seconds = [event["seconds"] for event in committed]
    typical, name = statistics.median(seconds), f"case {case}, {method}, {local_steps} steps"
    yield at_most(f"{name}: off by", abs(choice.expected.round / typical - 1), "", OFF, seconds)
    for part in PARTS:
        each = [event["measured"][part] for event in committed]
        yield Figure(f"{name}: {part}, expected", getattr(choice.expected, part), "s")
        yield Figure(f"{name}: {part}, measured", statistics.median(each), "s", samples=each)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Look, run and report."""
    options = arguments(__doc__, argv)
    workers = max(2, len(os.sched_getaffinity(0)))
    fleet = asyncio.run(fleet_of(workers))
    cases = (("tiny", "ist", 5),) if options.tiny else tuple((case, *how) for case in "abc" for how in TRAININGS)
    rounds = 3 if options.tiny else ROUNDS
    figures = [figure for case in cases for figure in compared(*case, fleet, rounds)]
    return report("forecast", options, figures, fleet=vars(fleet))


if __name__ == "__main__":
    main()
