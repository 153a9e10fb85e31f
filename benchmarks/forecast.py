"""Compare the time that rounds take with the forecast.

Cases of the comparison on machines with links of a rate (`idletrain-testbed`; needs root, but for `none`). On each
fleet, a few times: a measurement, as a launch makes it, and some rounds right behind it, which record the time they
were expected to take. A case's error is that of the median ratio of its measurements. A measurement of a machine whose
host took more or less of it than in the rounds behind does not count, if any other does: another is made. (That is
the share of CPU time that the host gave to others: "steal", as the kernel counts it, of what programs wanted; next to
nothing on a machine of one's own.)

    python -m benchmarks.forecast [--tiny] [--json FILE] [--case a,b,c,d] [--nodes 4,8] [--link 1gbit]

Targets: within 15 % of what was measured, every case; a fleet's first measurement, which a launch waits for, within
10 s.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from distributed import Client
from distributed.security import Security

from benchmarks.machines import START_SECONDS, Cast, Line, machines, print_line
from benchmarks.methods import CASES, Entry
from benchmarks.race import job_tree, run_folder
from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.sweep import OPTIMIZERS
from benchmarks.time_to_accuracy import numbers, words
from idletrain.autotune import choose
from idletrain.autotune.forecast import FleetFigures
from idletrain.autotune.probe import STEP_SECONDS, probe_fleet
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.record_fields import ROUND_PARTS
from idletrain.observe.records import Record
from idletrain.providers.scheduler import RunningCluster
from idletrain.run import RunOptions, launch

OFF, MEASUREMENT_SECONDS = 0.15, 10.0
REPEATS = 5
STEADY = 0.05  # of the CPU time: what a host may take more or less of in a measurement than in the rounds behind
WARM_UP_ROUNDS, ROUNDS = 1, 2  # behind each measurement, at least; the first loads the program
WARM_UP_SECONDS, SECONDS = 3.0, 4.0  # that short ones take together
TRIES = 3  # for each that counts
MOST_ROUNDS = 1_000_000  # a run is stopped long before
MEASURING_SECONDS = 180.0  # beyond which no other measurement is made
TICK_SECONDS = 0.1
CASE_SECONDS = 900.0
TRAININGS = (("ist", 50), ("local-sgd", 10))


async def measure_fleet(address: str, nodes: int, job: Job) -> tuple[FleetFigures, float]:
    """Measure a cluster as a launch does once all workers have joined; return the result and its seconds."""
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        await client.wait_for_workers(nodes)
        started = time.monotonic()
        return await probe_fleet(client, job), time.monotonic() - started


class Ticks(NamedTuple):
    """Seconds of CPU since the machine started: what its programs wanted, and what of it its host gave to others."""

    wanted: float
    stolen: float

    @classmethod
    def now(cls) -> Ticks:
        """Read them."""
        times = psutil.cpu_times()
        stolen = getattr(times, "steal", 0.0)
        used = times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        return cls(used + stolen, stolen)

    def share_until(self, later: Ticks) -> float:
        """Return the share of time stolen between two moments."""
        return (later.stolen - self.stolen) / max(later.wanted - self.wanted, TICK_SECONDS)


async def measure_with_steal(seen: Awaitable[tuple[FleetFigures, float]]) -> tuple[FleetFigures, float, float]:
    """Return a measurement, its seconds, and the share of time stolen while it timed steps, which it does last."""
    ticks, measuring = [Ticks.now()], asyncio.ensure_future(seen)
    while not measuring.done():
        await asyncio.wait([measuring], timeout=TICK_SECONDS)
        ticks.append(Ticks.now())
    return *measuring.result(), ticks[-round(STEP_SECONDS / TICK_SECONDS) :][0].share_until(ticks[-1])


def is_steady(line: Line) -> bool:
    """Return whether a measurement and its rounds had about the same share of the machine."""
    in_measurement, in_rounds = line["stolen"]
    return bool(abs(in_measurement - in_rounds) <= STEADY)


class CountedRounds:
    """The rounds of a run that count, behind a warm-up; after them the run is stopped.

    The head evaluates the network of the first round while others train, on a core that it shares with nodes: what
    begins before that is over does not count.

    Args:
        warm_up: Rounds that do not count, at least.
        enough: Rounds that do.

    Attributes:
        rounds: Their records.
        ticks: The machine's use of its CPU when they began, and at the end of each.
    """

    def __init__(self, warm_up: int, enough: int) -> None:
        self._warm_up, self._enough, self._evaluated = warm_up, enough, False
        self.rounds: list[Record] = []
        self.ticks: list[Ticks] = []

    def on_start(self, stop: Callable[[], None], _record: object) -> None:
        """Keep what stops the run."""
        self._stop, self._loop = stop, asyncio.get_running_loop()

    def on_evaluate(self, *_: object) -> None:
        """Take note that the head has evaluated a network."""
        self._evaluated = True

    def note(self, event: Record) -> None:
        """Count a round that has ended."""
        if event["kind"] != "round_committed" or len(self.rounds) == self._enough:
            return
        if self.ticks:
            self.rounds.append(event)
        elif event["round"] + 1 < self._warm_up or not self._evaluated:
            return
        self.ticks.append(Ticks.now())
        if len(self.rounds) == self._enough:
            self._loop.call_soon(self._stop)


async def lead(host: str, nodes: int, tree: dict[str, Any], repeats: int) -> None:
    """Run a head: measure its workers and train some rounds on them, until so many measurements count."""
    dask_settings.apply()
    job = parse_job(tree)
    prepared = replace(from_settings(job.model, job.data, job.training), test=None)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        async with dask_scheduler.started(Path(folder), host=host) as address:
            print_line({"kind": "serving", "address": address})
            until = time.monotonic() + MEASURING_SECONDS
            measurements: list[Line] = []
            while (
                sum(map(is_steady, measurements)) < repeats
                and len(measurements) < TRIES * repeats
                and time.monotonic() < until
            ):
                own_job = job.model_copy(update={"name": f"measurement-{len(measurements)}"})
                measurements.append(await measure_and_train(address, nodes, own_job, prepared))
                print_line(measurements[-1])
            print_line({"kind": "ended"})


async def measure_and_train(address: str, nodes: int, job: Job, prepared: Prepared) -> Line:
    """Measure a fleet, train some rounds, and return them with the shares of time stolen from both."""
    fleet, seconds, in_measurement = await measure_with_steal(measure_fleet(address, nodes, job))
    _, choice = await asyncio.to_thread(choose.choose_settings, job, fleet)
    expectation = ForecastTracker(choice.expected.as_record(), choice.why)
    warm_up = WARM_UP_ROUNDS + int(WARM_UP_SECONDS / choice.expected.round)
    counted = CountedRounds(warm_up, max(ROUNDS, math.ceil(SECONDS / choice.expected.round)))
    training = job.training.model_copy(update={"rounds": MOST_ROUNDS})
    job = job.model_copy(update={"training": training})
    prepared = replace(prepared, program=replace(prepared.program, training=training))
    job.run_dir.mkdir(parents=True)
    await launch(
        job,
        prepared,
        RunOptions(
            provider=RunningCluster(address, Security()),
            on_start=counted.on_start,
            on_evaluate=counted.on_evaluate,
            sinks=(counted.note,),
            forecast=expectation,
        ),
    )
    return {
        "kind": "measurement",
        "seconds": seconds,
        "rounds": counted.rounds,
        "stolen": (in_measurement, counted.ticks[0].share_until(counted.ticks[-1])),
    }


def measurements_of(case: str, method: str, local_steps: int, nodes: int, link: str, repeats: int) -> list[Line]:
    """Return the rounds after each measurement, repeated until so many measurements count."""
    rates = OPTIMIZERS.get(case, {"lr": 0.05})
    settings = {**rates, "state": "reset", "local_steps": local_steps}
    entry = Entry(method=method, settings=settings, steps=ROUNDS * local_steps)
    with run_folder() as folder, machines(nodes, link) as bed, Cast(bed, folder) as cast:
        tree = job_tree(CASES[case], entry, nodes, folder, 3600.0)
        arguments = "head", bed.address("head"), str(nodes), json.dumps(tree), str(repeats)
        cast.start("head", [sys.executable, "-m", "benchmarks.forecast", *arguments])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        for name in bed.names[1:]:
            cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--memory", "1GiB"])
        cast.output.wait("ended", 1, CASE_SECONDS, cast.all_alive)
    return cast.output.of("measurement")


def counting(lines: Sequence[Line]) -> list[list[Record]]:
    """Return the rounds after the measurements that count; after all, if none does."""
    return [line["rounds"] for line in lines if is_steady(line)] or [line["rounds"] for line in lines]


def figures_of(name: str, lines: Sequence[Line]) -> Iterator[Figure]:
    """Return the median error of a case's forecasts, and further figures."""
    counted = counting(lines)
    ratios = [_expected(rounds) / _measured(rounds) for rounds in counted]
    yield Figure(f"{name}: off by", abs(statistics.median(ratios) - 1), "", samples=ratios)
    first, *later = (line["seconds"] for line in lines)
    yield Figure(f"{name}: the first measurement", first, "s")
    yield Figure(f"{name}: later measurements", statistics.median(later or [first]), "s", samples=later)
    for which, place in (("measurements", 0), ("rounds", 1)):
        shares = [line["stolen"][place] for line in lines]
        yield Figure(f"{name}: stolen from {which}", statistics.median(shares), "", samples=shares)
    for part in ROUND_PARTS:
        for which in ("expected", "measured"):
            each = [statistics.median(event[which][part] for event in rounds) for rounds in counted]
            yield Figure(f"{name}: {part}, {which}", statistics.median(each), "s", samples=each)


def row_of(name: str, lines: Sequence[Line], off: float) -> list[str]:
    """Return a case's row of the table."""
    counted = counting(lines)
    seconds = (statistics.median(map(each, counted)) for each in (_expected, _measured))
    steady = sum(map(is_steady, lines))
    return [name, *(f"{value:.2f}" for value in seconds), f"{off:.0%}", f"{steady} of {len(lines)}"]


def overall(where: str, figures: Sequence[Figure]) -> Iterator[Figure]:
    """Return the figures over all cases."""
    off = [figure.value for figure in figures if figure.what.endswith(": off by")]
    firsts = [figure.value for figure in figures if figure.what.endswith(": the first measurement")]
    yield at_least(f"{where}: cases within 15 %", sum(value <= OFF for value in off), "", len(off), off)
    yield at_most(
        f"{where}: a first measurement, in the median", statistics.median(firsts), "s", MEASUREMENT_SECONDS, firsts
    )
    yield at_most(f"{where}: a first measurement, at worst", max(firsts), "s", MEASUREMENT_SECONDS, firsts)


def _expected(rounds: Sequence[Record]) -> float:
    return float(sum(rounds[0]["expected"].values()))


def _measured(rounds: Sequence[Record]) -> float:
    return float(statistics.median(event["seconds"] for event in rounds))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run and report."""
    command = parser(__doc__)
    command.add_argument("--case", type=words, default=["a", "b", "c", "d"])
    command.add_argument("--nodes", type=numbers, default=[4, 8])
    command.add_argument("--link", default="1gbit")
    options = command.parse_args(argv)
    cases, fleets, link, trainings, repeats = options.case, options.nodes, options.link, list(TRAININGS), REPEATS
    if options.tiny:
        cases, fleets, link, trainings, repeats = ["tiny"], [2], "none", [("ist", 5)], 1
    figures: list[Figure] = []
    rows: list[list[str]] = []
    for nodes in fleets:
        for case in cases:
            for method, local_steps in trainings:
                name = f"{link}: case {case}, {method}, {local_steps} steps, {nodes} nodes"
                lines = measurements_of(case, method, local_steps, nodes, link, repeats)
                figures += figures_of(name, lines)
                rows.append(row_of(name, lines, next(f.value for f in figures if f.what == f"{name}: off by")))
                print(": ".join(rows[-1]), flush=True)
    head = ["case", "expected s a round", "measured", "off by", "measurements on a steady machine"]
    tables = [{"title": f"Links of {link}", "head": head, "rows": rows}]
    return report("forecast", options, [*overall(link, figures), *figures], tables=tables)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, nodes, tree, repeats]:
            asyncio.run(lead(host, int(nodes), json.loads(tree), int(repeats)))
        case _:
            main()
