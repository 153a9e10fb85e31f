"""Measure whether head, scheduler and workers grow from round to round.

A job of tiny subnets runs for 1,500 rounds on two workers. The resident memory of each process is read at every round's
commit; its slope is that of the least-squares line through the rounds after the first 200.

    python -m benchmarks.memory_over_rounds [--tiny] [--json FILE]

Target: at most 0.2 MB per 100 rounds in every process.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from benchmarks.report import Figure, at_most, report, with_preset
from benchmarks.round_overhead import tree
from benchmarks.runs import prepared_of, scheduler_pid, temporary_job
from idletrain.observe.records import Record
from idletrain.providers.local import LocalProcesses
from idletrain.run import RunOptions, launch

TARGET_MB = 0.2
WORKERS = 2


@dataclass(frozen=True)
class Preset:
    """Rounds, and the first that counts."""

    rounds: int = 1500
    warm_up: int = 200


TINY = Preset(rounds=12, warm_up=2)


class Sampler:
    """A sink that reads the memory of every process of a run at each commit.

    Attributes:
        megabytes: For each process, its resident memory at every commit, in MB.
    """

    def __init__(self, scheduler: int) -> None:
        self.megabytes: dict[str, list[float]] = defaultdict(list)
        self._processes = {"head": psutil.Process(os.getpid()), "scheduler": psutil.Process(scheduler)}

    def __call__(self, event: Record) -> None:
        """Take an event."""
        if event["kind"] == "worker_joined":
            self._processes[f"worker {len(self._processes) - 1}"] = psutil.Process(event["pid"])
        if event["kind"] == "round_committed":
            for name, process in self._processes.items():
                self.megabytes[name].append(process.memory_info().rss / 1e6)


def measure(preset: Preset) -> dict[str, list[float]]:
    """Run the job; return each process' memory by round, in MB."""
    samplers: list[Sampler] = []
    with temporary_job(tree(WORKERS, preset.rounds)) as job:

        def take(event: Record) -> None:
            if not samplers:
                samplers.append(Sampler(scheduler_pid(job)))
            samplers[0](event)

        asyncio.run(launch(job, prepared_of(job), RunOptions(provider=LocalProcesses(), sinks=(take,))))
    return dict(samplers[0].megabytes)


def slope(megabytes: list[float], preset: Preset) -> float:
    """Return the growth per 100 rounds after the warm-up, in MB."""
    late = megabytes[preset.warm_up :]
    return float(100 * np.polyfit(np.arange(len(late)), late, 1)[0])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, compare and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    by_process = measure(preset)
    figures: list[Figure] = [
        at_most(f"{name}: growth per 100 rounds", slope(megabytes, preset), "MB", TARGET_MB)
        for name, megabytes in by_process.items()
    ]
    return report("memory_over_rounds", options, figures, megabytes=by_process)


if __name__ == "__main__":
    main()
