"""Measure what a round costs the head with 8 to 1,000 workers.

Simulated workers, many to a process, sleep instead of training; all else is real: the scheduler in its process, the
round manager in this one, leases, pulls and pushes of small subnets, the ledger, the commit. A round's overhead is its
length beyond the sleep. On few cores that holds the workers' own CPU time too, which a real fleet has at its nodes.

    python -m benchmarks.scale [--workers 8,32,100,300,1000] [--tiny] [--json FILE]

CPU time is divided into what a round costs (leases, exchange, commit) and what a second costs while all train
(beats, heartbeats), which is read off the two seconds of a round with the least; lines through the sizes give the cost
of one more worker, and so the number of workers at which the head's link, or a core of it, is full.

Targets: the overhead grows no worse than linearly (an exponent of at most 1 over all sizes), and with 1,000 workers is
at most 5 % of a 60 s round.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from benchmarks import simulated
from benchmarks.report import Figure, at_most, parser, report
from benchmarks.runs import of_kind, prepared_of, scheduler_pid, single_steps, temporary_job
from idletrain.cluster import dask_scheduler
from idletrain.job import Job
from idletrain.observe.records import Record
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.run import RunOptions, launch

TARGET_ROUND_SECONDS = 60.0  # of the round that the targets are for
SHARE = 0.05
LINK_BYTES = 10e9 / 8  # a second, each way
SUBNET_BYTES = (1e6, 10e6, 100e6)
WIDTH = 4  # neurons a subnet
SAMPLE_SECONDS = 0.1
REST_SECONDS = 2.0  # in which nothing but heartbeats arrives
NOTE = """
Workers, scheduler and head share this machine's cores. CPU time of the simulated workers, which a fleet has on its
nodes, is most of what a round lasts beyond the sleep here; the scheduler's and the head's, each with a core of its own,
would be all.
""".strip()
COSTS = ("scheduler", "head", "wire")


@dataclass(frozen=True)
class Preset:
    """Numbers of workers, how long they sleep, and how many rounds count (after those that load the program).

    A thousand sleep longer than a few: all should have their leases, and the head be at rest, before the first is back.
    """

    workers: tuple[int, ...] = (8, 32, 100, 300, 1000)
    least_seconds: float = 6.0
    seconds_a_worker: float = 0.02
    rounds: int = 4
    warm_up_rounds: int = 1

    def sleep_seconds(self, workers: int) -> float:
        """Return the seconds that each of so many workers sleeps."""
        return self.least_seconds + self.seconds_a_worker * workers


TINY = Preset(workers=(2, 4), least_seconds=0.5, rounds=2)


def tree(workers: int, preset: Preset) -> dict[str, Any]:
    """Return a job with one tiny subnet a worker and a single local step, which sleeps."""
    rounds = preset.warm_up_rounds + preset.rounds
    return {
        "model": {
            "factory": "idletrain.nn.models:mlp",
            "args": {"widths": [simulated.INPUTS, WIDTH * workers, 2], "norm": None},
        },
        "data": {"factory": "benchmarks.simulated:samples", "args": {"seconds": preset.sleep_seconds(workers)}},
        "training": single_steps(workers, rounds),
        # Here a thousand workers share the head's cores: starved ones are not dead.
        "preemption": {"lease": "1m"},
        "nodes": {"count": workers},
    }


@dataclass
class Meter:
    """CPU seconds and bytes so far, over time, of a run's processes and of the loopback device."""

    processes: Mapping[str, Sequence[psutil.Process]]
    times: list[float] = field(default_factory=list)
    totals: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure, in a thread, as long as the block lasts."""
        ended = threading.Event()
        thread = threading.Thread(target=self._measure, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def between(self, what: str, start: float, end: float) -> float:
        """Return how much of a resource was used in a time."""
        before, after = np.interp([start, end], self.times, self.totals[what])
        return float(after - before)

    def rest_in(self, start: float, end: float, seconds: float) -> float:
        """Return when the stretch of so many seconds begins in which the head and the scheduler use the least CPU."""
        beginnings = np.arange(start, max(end - seconds, start) + SAMPLE_SECONDS / 2, SAMPLE_SECONDS)
        used = [sum(self.between(what, at, at + seconds) for what in ("scheduler", "head")) for at in beginnings]
        return float(beginnings[int(np.argmin(used))])

    def _measure(self, ended: threading.Event) -> None:
        while not ended.wait(SAMPLE_SECONDS):
            self.times.append(time.time())
            self._add("wire", psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
            for name, processes in self.processes.items():
                self._add(name, sum(sum(process.cpu_times()[:2]) for process in processes))
                now = sum(process.memory_info().rss for process in processes)
                self.peak_bytes[name] = max(now, self.peak_bytes.get(name, 0))

    def _add(self, what: str, total: float) -> None:
        self.totals.setdefault(what, []).append(total)


async def measured(job: Job, workers: int) -> tuple[list[Record], Meter]:
    """Run a job on simulated workers."""
    events: list[Record] = []
    (job.run_dir / "logs").mkdir(parents=True)
    async with dask_scheduler.started(job.run_dir) as address:
        with simulated.started(address, workers, job.run_dir / "logs") as pids:
            meter = Meter(
                {
                    "scheduler": [psutil.Process(scheduler_pid(job))],
                    "head": [psutil.Process()],
                    "workers": [psutil.Process(pid) for pid in pids],
                }
            )
            with meter.running():
                await launch(
                    job,
                    prepared_of(job),
                    RunOptions(provider=ExistingScheduler(LaunchRequest(scheduler=address)), sinks=(events.append,)),
                )
    return events, meter


def account(events: Sequence[Record], meter: Meter, preset: Preset, workers: int) -> dict[str, Any]:
    """Return the cost of one number of workers, round by round.

    Raises:
        RuntimeError: in a round that counts, not all workers took part, or one lost a lease.
    """
    committed, slept = of_kind(events, "round_committed")[preset.warm_up_rounds :], preset.sleep_seconds(workers)
    for event in committed:
        of_round = [e for e in events if e.get("round") == event["round"]]
        took_part, lost = {e["worker"] for e in of_kind(of_round, "leased")}, of_kind(of_round, "lost")
        if len(took_part) != workers or lost:
            number = event["round"]
            raise RuntimeError(
                f"round {number}: {len(took_part)} of {workers} workers trained, {len(lost)} leases lost"
            )
    rounds = []
    for event in committed:
        first = min(e["t"] for e in of_kind(events, "staged") if e["round"] == event["round"])
        seconds = min(REST_SECONDS, slept / 2)
        rest = meter.rest_in(event["t"] - event["seconds"], first, seconds)
        a_second = {what: meter.between(what, rest, rest + seconds) / seconds for what in COSTS}
        whole = {what: meter.between(what, event["t"] - event["seconds"], event["t"]) for what in COSTS}
        rounds.append(
            {
                "overhead_seconds": event["seconds"] - slept,
                "commit_seconds": event["commit_seconds"],
                "workers_cpu_seconds": meter.between("workers", event["t"] - event["seconds"], event["t"]),
                "store_bytes": event["bytes_down"] + event["bytes_up"],
                "a_second": a_second,
                "a_round": {what: whole[what] - a_second[what] * event["seconds"] for what in COSTS},
            }
        )
    return {"workers": workers, "sleep_seconds": slept, "peak_bytes": meter.peak_bytes, "rounds": rounds}


def median(size: Mapping[str, Any], what: str, kind: str = "") -> float:
    """Return the median over a size's rounds."""
    value: float = statistics.median(round_[kind][what] if kind else round_[what] for round_ in size["rounds"])
    return value


def slope(workers: Sequence[float], values: Sequence[float]) -> float:
    """Return what one more worker adds: the slope of a line, fitted by least squares."""
    return float(np.polyfit(workers, values, 1)[0])


def exponent(workers: Sequence[float], values: Sequence[float]) -> float:
    """Return p of values ~ workers^p: the slope of a line through the logarithms."""
    return float(np.polyfit(np.log(workers), np.log(values), 1)[0])


def figures_of(sizes: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the curve and its slope, what a worker more costs, and what follows for the head."""
    counts = [size["workers"] for size in sizes]
    overheads = [median(size, "overhead_seconds") for size in sizes]
    figures = [
        Figure(f"overhead of a round, {n} workers", seconds, "s", samples=_overheads(size))
        for n, seconds, size in zip(counts[:-1], overheads, sizes, strict=False)
    ]
    name, limit = f"overhead of a round, {counts[-1]} workers", SHARE * TARGET_ROUND_SECONDS
    figures.append(at_most(name, overheads[-1], "s", limit, _overheads(sizes[-1])))
    busy = {"simulated workers": median(sizes[-1], "workers_cpu_seconds")}
    busy |= {what: median(sizes[-1], what, "a_round") for what in ("scheduler", "head")}
    figures += [Figure(f"CPU time of the {what} in it", seconds, "s") for what, seconds in busy.items()]
    figures.append(at_most("exponent of the overhead over the workers", exponent(counts, overheads), "", 1.0))
    for what, unit, scale in (("scheduler", "ms CPU", 1e3), ("head", "ms CPU", 1e3), ("wire", "kB", 1e-3)):
        a_round, a_second = (
            slope(counts, [median(size, what, kind) for size in sizes]) for kind in ("a_round", "a_second")
        )
        figures.append(Figure(f"{what}: a worker more, a round", a_round * scale, unit))
        figures.append(Figure(f"{what}: a worker more, a second", a_second * scale, unit))
        figures += _limits(what, a_round + a_second * TARGET_ROUND_SECONDS)
    figures += [
        Figure(f"memory of the {what}, {counts[-1]} workers", sizes[-1]["peak_bytes"][what] / 1e6, "MB")
        for what in ("scheduler", "head")
    ]
    return figures


def _overheads(size: Mapping[str, Any]) -> list[float]:
    return [round_["overhead_seconds"] for round_ in size["rounds"]]


def _limits(what: str, a_worker: float) -> list[Figure]:
    """Return with how many workers, in rounds of a minute, a core or the link is full, at `a_worker` each a round."""
    a_worker = max(a_worker, 1e-9)  # what a tiny run says of it is noise
    if what != "wire":
        return [Figure(f"workers that fill a core with the {what}", TARGET_ROUND_SECONDS / a_worker, "")]
    return [
        Figure(
            f"workers that fill the head's 10 Gbit/s, subnets of {subnet / 1e6:.0f} MB",
            LINK_BYTES * TARGET_ROUND_SECONDS / (subnet + a_worker),
            "",
        )
        for subnet in SUBNET_BYTES
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run every size, fit and report."""
    command = parser(__doc__)
    command.add_argument("--workers", metavar="N,...", help="the sizes, in ascending order")
    options = command.parse_args(argv)
    preset = TINY if options.tiny else Preset()
    sizes = []
    for workers in [int(n) for n in options.workers.split(",")] if options.workers else preset.workers:
        with temporary_job(tree(workers, preset)) as job:
            events, meter = asyncio.run(measured(job, workers))
        sizes.append(account(events, meter, preset, workers))
        print(f"{workers} workers: {median(sizes[-1], 'overhead_seconds'):.3f} s beyond the sleep", flush=True)
    return report("scale", options, figures_of(sizes), notes=[NOTE], sizes=sizes)


if __name__ == "__main__":
    main()
