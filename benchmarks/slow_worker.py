"""Measure what a fleet trains when one of its four workers is 20 times slower than the others.

Each policy trains with four workers, of which one is slow, and with the three others alone. Samples take their time by
sleeping, so that the workers do not share cores; all else is real.

    python -m benchmarks.slow_worker [--tiny] [--json FILE]

Target: under `rolling` at least 0.95 of the steps a second of the three alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import get_worker
from numpy.typing import NDArray

from benchmarks.report import Figure, at_least, report, with_preset
from benchmarks.runs import events_of, of_kind, single_steps
from idletrain.observe.records import Record

INPUTS, QUICK_WORKERS = 8, 3
SLOW_WORKER = "-0"  # the end of the first local worker's name
TARGET = 0.95
POLICIES = ("rolling", "reissue", "salvage")


@dataclass(frozen=True)
class Slow:
    """Samples that take one worker much longer than the others."""

    seconds: float
    slow_seconds: float

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        with contextlib.suppress(ValueError):  # not in a worker
            slow = str(get_worker().name).endswith(SLOW_WORKER)
            time.sleep(self.slow_seconds if slow else self.seconds)
        return np.ones(INPUTS, dtype=np.float32), np.zeros((), dtype=np.int64)


def samples(seconds: float, slow_seconds: float) -> tuple[Slow, Slow]:
    """Return the data of a job whose local steps last so long, with a batch of one."""
    return Slow(seconds, slow_seconds), Slow(seconds, slow_seconds)


@dataclass(frozen=True)
class Preset:
    """Lengths of a step and of a run."""

    seconds: float = 0.01
    times_slower: int = 20
    local_steps: int = 100
    rounds: int = 20
    policies: tuple[str, ...] = POLICIES


TINY = Preset(local_steps=10, rounds=3, policies=POLICIES[:1])


def tree(preset: Preset, policy: str, workers: int) -> dict[str, Any]:
    """Return a job of four subnets; with three workers none is slow."""
    slower = preset.times_slower if workers > QUICK_WORKERS else 1
    data = {"seconds": preset.seconds, "slow_seconds": slower * preset.seconds}
    return {
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [INPUTS, 48, 2], "norm": None}},
        "data": {"factory": "benchmarks.slow_worker:samples", "args": data},
        "training": {
            **single_steps(QUICK_WORKERS + 1, preset.rounds),
            "method": "ist",
            "local_steps": preset.local_steps,
        },
        "preemption": {"policy": policy, "progress_every": "1s"},
        "nodes": {"count": workers},
    }


def steps_a_second(events: Sequence[Record]) -> float:
    """Return the steps that reached the network, a second from the first round's end to the last one's."""
    staged, rounds = of_kind(events, "staged"), of_kind(events, "round_committed")
    first, last = rounds[0]["t"], rounds[-1]["t"]
    return float(sum(event["steps"] for event in staged if first < event["t"] <= last) / (last - first))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train with the slow worker and without it, and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    paces: dict[str, dict[str, float]] = {}
    for policy in preset.policies:
        runs = {n: events_of(tree(preset, policy, n)) for n in (QUICK_WORKERS, QUICK_WORKERS + 1)}
        alone, together = (steps_a_second(events) for events in runs.values())
        paces[policy] = {"alone": alone, "together": together}
        figures.append(Figure(f"{policy}: steps a second of the three alone", alone, ""))
        figures.append(Figure(f"{policy}: with a worker {preset.times_slower} times slower", together, ""))
        what = f"{policy}: with it / alone"
        ratio = together / alone
        figures.append(at_least(what, ratio, "", TARGET) if policy == "rolling" else Figure(what, ratio, ""))
    return report("slow_worker", options, figures, paces=paces)


if __name__ == "__main__":
    main()
