"""Measure how much of the nodes' time ends up in the network while nodes are taken.

Four local workers train Fashion-MNIST's MLP 784-1024-1024-10; every 10 s the oldest is taken and replaced as
`idletrain launch` does. Under `salvage` it is warned first (SIGTERM), under `reissue` it is killed (SIGKILL). Each
cut of the network is one run; the rest of the nodes' time is divided by what it went into.

    python -m benchmarks.churn [--tiny] [--json FILE]

Targets: a goodput of at least 0.90 under `salvage` with notices, 0.80 under `reissue` without.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Figure, at_least, report, with_preset
from benchmarks.runs import prepared_of, temporary_job
from idletrain.cluster import dask_scheduler, local
from idletrain.job import Job
from idletrain.observe import time_use
from idletrain.observe.records import Record
from idletrain.observe.summary import summary_of
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.run import RunOptions, launch

WORKERS = 4
WORKER_BYTES = 1 << 30
GOODPUT_TARGETS = {"salvage": 0.90, "reissue": 0.80}


@dataclass(frozen=True)
class Cut:
    """A cut of the work into subnets and rounds."""

    subnets: int
    local_steps: int
    progress_every: str


@dataclass(frozen=True)
class Preset:
    """Length of each run, and the cuts to try; targets are for the first cut."""

    seconds: float = 60.0
    take_seconds: float = 10.0
    data: str = "fashion-mnist"
    widths: tuple[int, ...] = (784, 1024, 1024, 10)
    cuts: tuple[Cut, ...] = (Cut(16, 400, "500ms"), Cut(8, 400, "500ms"), Cut(16, 400, "5s"), Cut(4, 1600, "500ms"))


TINY = Preset(seconds=4, take_seconds=3, data="digits", widths=(64, 64, 64, 10), cuts=(Cut(4, 50, "500ms"),))


def job_tree(preset: Preset, cut: Cut, policy: str) -> dict[str, Any]:
    """Return the job of one run; it ends by a signal, never by itself."""
    return {
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": list(preset.widths)}},
        "data": {"name": preset.data},
        "training": {
            "optimizer": {"name": "sgd", "lr": 0.1},
            "subnets": cut.subnets,
            "local_steps": cut.local_steps,
            "rounds": 1_000_000,
            "evaluate_every": 1_000_000,
        },
        "preemption": {"policy": policy, "progress_every": cut.progress_every},
        "nodes": {"count": WORKERS},
    }


async def churned(preset: Preset, job: Job, policy: str) -> list[Record]:
    """Run a job for the preset's time after its first lease, while workers are taken."""
    events: list[Record] = []
    started = asyncio.Event()

    def sink(event: Record) -> None:
        events.append(event)
        if event["kind"] == "leased":
            started.set()

    async def take_workers() -> None:
        await started.wait()
        while True:
            await asyncio.sleep(preset.take_seconds)
            take = fleet.notice if policy == "salvage" else fleet.stop
            take(_oldest(fleet))

    async def end() -> None:
        await started.wait()
        await asyncio.sleep(preset.seconds)
        signal.raise_signal(signal.SIGINT)  # as Ctrl-C would: the run ends in order

    job.run_dir.mkdir()
    async with dask_scheduler.started(job.run_dir) as address:
        fleet = local.LocalFleet(address, WORKER_BYTES, job.run_dir / "logs")
        beside = [
            asyncio.ensure_future(work)
            for work in (local.keep_workers(fleet, WORKERS, lambda *_kind, **_fields: None), take_workers(), end())
        ]
        try:
            await launch(
                job,
                prepared_of(job),
                RunOptions(provider=ExistingScheduler(LaunchRequest(scheduler=address)), sinks=(sink,)),
            )
        finally:
            for task in beside:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*beside)
            await fleet.close()
    return events


def _oldest(fleet: local.LocalFleet) -> Collection[str]:
    return sorted(fleet.alive(), key=fleet.pid)[:1]


def measure(preset: Preset, cut: Cut, policy: str) -> dict[str, Any]:
    """Return one run's record, with shares of the nodes' time."""
    with temporary_job(job_tree(preset, cut, policy)) as job:
        events = asyncio.run(churned(preset, job, policy))
    summary = summary_of(events)
    record = {key: value for key, value in summary.as_record().items() if key != "run_dir"}  # a temporary one
    shares = time_use.time_shares(events, summary.alive_seconds)
    return {"policy": policy, "cut": vars(cut), "shares": shares, **record}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, take workers and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    runs: list[dict[str, Any]] = []
    for policy in ("salvage", "reissue"):
        for cut in preset.cuts:
            result = measure(preset, cut, policy)
            runs.append(result)
            name = f"goodput, {policy}, {cut.subnets} subnets x {cut.local_steps} steps"
            name += f", progress every {cut.progress_every}"
            figures.append(at_least(name, result["goodput"], "", GOODPUT_TARGETS[policy]))
            if cut == preset.cuts[0]:
                worst = sorted(result["shares"].items(), key=lambda item: -item[1])
                figures += [Figure(f"  {part}", share, "of the time") for part, share in worst]
    return report("churn", options, figures, seconds=preset.seconds, take_seconds=preset.take_seconds, runs=runs)


if __name__ == "__main__":
    main()
