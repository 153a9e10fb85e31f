"""Check that a worker's memory stays in proportion to its subnet.

Real runs of a network of 1.2 GB (an MLP 3072-16000-16000-10) in 8 subnets on two worker processes: one that
pushes a progress checkpoint after every step that it can, which is the worst case, and one without. Of every worker:
its peak resident memory (VmHWM) minus what it held when it had imported everything and joined, before its first subnet.

    python -m benchmarks.memory [--tiny] [--json FILE]

Target: at most 5 times the subnet's parameter bytes; and below half the network whatever happens.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, at_most, report, with_preset
from benchmarks.runs import noise_data, prepared_of, run, temporary_job
from idletrain.nn.memory import subnet_need, subnet_of_share
from idletrain.observe.records import Record

MB = 1e6
SUBNETS = 8


@dataclass(frozen=True)
class Preset:
    """The network and how long it is trained."""

    widths: tuple[int, ...] = (3072, 16_000, 16_000, 10)
    rounds: int = 4
    local_steps: int = 10
    workers: int = 2


TINY = Preset(widths=(1024, 6144, 6144, 10), rounds=2, local_steps=2, workers=1)


def tree(preset: Preset, progress_every: str) -> dict[str, Any]:
    """Return the job of one run."""
    return {
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": list(preset.widths)}},
        "data": noise_data(samples=64, inputs=preset.widths[0]),
        "training": {
            "optimizer": {"name": "sgd", "lr": 0.1},
            "subnets": SUBNETS,
            "local_steps": preset.local_steps,
            "rounds": preset.rounds,
            "batch_size": 8,
            "evaluate_every": preset.rounds,
        },
        "preemption": {"progress_every": progress_every},
        "nodes": {"count": preset.workers},
    }


def memory_of(pid: int) -> dict[str, int]:
    """Return a process' resident bytes, now and at their peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


class Watch:
    """A sink that reads the workers' memory when they join and at every commit."""

    def __init__(self) -> None:
        self.joined: dict[int, int] = {}
        self.peak: dict[int, int] = {}

    def __call__(self, event: Record) -> None:
        if event["kind"] == "worker_joined":
            self.joined[event["pid"]] = memory_of(event["pid"])["VmRSS"]
        if event["kind"] == "round_committed":
            self.peak = {pid: memory_of(pid)["VmHWM"] for pid in self.joined}

    def growth(self) -> list[int]:
        """Return the bytes that each worker took for its work."""
        return [self.peak[pid] - resident for pid, resident in self.joined.items()]


def measure(preset: Preset, progress_every: str) -> tuple[Watch, dict[str, int]]:
    """Run once; return the watched workers, and the bytes to compare them with."""
    watch = Watch()
    with temporary_job(tree(preset, progress_every)) as job:
        prepared = prepared_of(job)
        sizes = {
            "subnet": 4 * subnet_of_share(prepared.program, 1 / SUBNETS).parameters,
            "network": sum(tensor.nbytes for tensor in prepared.network),
            "need": subnet_need(prepared.program)(1 / SUBNETS),
        }
        del prepared
        asyncio.run(run(job, [watch]))
    return watch, sizes


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, watch and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    for what, progress_every in (("with checkpoints", "1ms"), ("without checkpoints", "1h")):
        watch, sizes = measure(preset, progress_every)
        growth = watch.growth()
        most, ratios = max(growth), [each / sizes["subnet"] for each in growth]
        if not figures:
            figures += [
                Figure("network's parameters", sizes["network"] / MB, "MB"),
                Figure("a subnet's parameters", sizes["subnet"] / MB, "MB"),
                Figure("a worker when it joins", statistics.median(watch.joined.values()) / MB, "MB"),
            ]
        figures += [
            Figure(f"a worker's growth {what}", most / MB, "MB", samples=[each / MB for each in growth]),
            at_most(f"growth {what} / a subnet's parameters", max(ratios), "", 5.0, ratios),
            at_most(f"growth {what} / what planning counts with", most / sizes["need"], "", 1.0),
            at_most(f"growth {what} / the network's parameters", most / sizes["network"], "", 0.5),
        ]
    return report("memory", options, figures, subnets=SUBNETS, sizes_bytes=sizes, widths=preset.widths)


if __name__ == "__main__":
    main()
