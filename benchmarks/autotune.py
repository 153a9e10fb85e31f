"""Compare the settings that are chosen for a fleet with the best of a sweep by hand.

A case of the comparison on machines with shaped links (`idletrain-testbed`; needs root): a measurement of the fleet, as
a launch makes it, chooses method, subnets, local steps and codes; the same job with other numbers of subnets and of
local steps, and with the other method, runs beside it. Seconds from the first lease to the case's target, between two
snapshots in proportion. All of it runs there and back, the last setting first, with the chosen one at both ends and in
the middle: a machine that others use is faster at one minute than at the next. What takes 1.5 times as long as the
chosen one at first is ended, and counts with that, as if it had been there by then.

    python -m benchmarks.autotune [--tiny] [--json FILE] [--case b] [--nodes 8] [--link 100mbit]

Target: at most 10 % behind the best of the sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.forecast import measure_fleet
from benchmarks.machines import START_SECONDS, Cast, machines, print_line
from benchmarks.methods import CASES, Case, Entry
from benchmarks.race import NoStepError, job_tree, run, seconds_to
from benchmarks.report import Figure, at_most, parser, report
from benchmarks.sweep import CASE_STEPS, IST_INTERVALS, OPTIMIZERS
from idletrain.autotune import choose
from idletrain.autotune.forecast import FleetFigures
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.job import OPEN_SETTINGS
from idletrain.job_file import parse_job

MOST_RATIO = 1.1
SLOWER = 1.5
BUDGET_SECONDS = 240.0
LOCAL_INTERVALS = (10, 25, 50)
PROBE_SECONDS = 120.0


async def lead(host: str, nodes: int, tree: dict[str, Any]) -> None:
    """Run a head: serve the scheduler, and measure the fleet once all workers have joined."""
    dask_settings.apply()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        async with dask_scheduler.started(Path(folder), host=host) as address:
            print_line({"kind": "serving", "address": address})
            print_line({"kind": "fleet", "fleet": asdict((await measure_fleet(address, nodes, parse_job(tree)))[0])})


def fleet_of(nodes: int, link: str, tree: dict[str, Any]) -> FleetFigures:
    """Measure machines with such links as a launch of a job would."""
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        machines(nodes, link) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        arguments = "head", bed.address("head"), str(nodes), json.dumps(tree)
        cast.start("head", [sys.executable, "-m", "benchmarks.autotune", *arguments])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        for name in bed.names[1:]:
            cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--memory", "1GiB"])
        (line,) = cast.output.wait("fleet", 1, START_SECONDS + PROBE_SECONDS, cast.all_alive)
    return FleetFigures(**line["fleet"])


def entry(case: Case, method: str, chosen: dict[str, Any], nodes: int) -> Entry:
    """Run with such settings, for as long as the method needs."""
    _, local, ist = CASE_STEPS.get(case.name, (100, 100, 100))
    rates = {**OPTIMIZERS.get(case.name, {"lr": 0.2}), "state": "reset"}
    # All nodes share each pass: with more subnets than nodes every one gets fewer samples in as many steps.
    steps = (ist if method == "ist" else local) * max(1, chosen["subnets"] // nodes)
    every = chosen["local_steps"]
    return Entry(
        method=method,
        settings={**rates, **chosen},
        steps=-(-steps // every) * every,
        snapshot_every=every,
    )


def chosen_entry(case: Case, nodes: int, link: str) -> tuple[Entry, tuple[str, ...]]:
    """Return the settings that a launch would choose, and why."""
    initial = entry(case, "ist", {"subnets": nodes, "local_steps": 50}, nodes)
    tree = job_tree(case, initial, nodes, Path(), BUDGET_SECONDS)
    tree["training"] = {name: value for name, value in tree["training"].items() if name not in OPEN_SETTINGS}
    job, choice = choose.choose_settings(parse_job(tree), fleet_of(nodes, link, tree))
    training = job.training
    exchange = training.exchange.model_dump(exclude_defaults=True)
    chosen = {"subnets": training.subnets, "local_steps": training.local_steps, "exchange": exchange}
    return entry(case, training.method, chosen, nodes), choice.why


def sweep(case: Case, nodes: int, exchange: dict[str, Any]) -> Iterator[Entry]:
    """Yield settings chosen by hand: both methods, numbers of subnets and of local steps, over the same codes."""
    for subnets in (nodes, 2 * nodes):
        for every in IST_INTERVALS:
            yield entry(case, "ist", {"subnets": subnets, "local_steps": every, "exchange": exchange}, nodes)
    for every in LOCAL_INTERVALS:
        yield entry(case, "local-sgd", {"subnets": nodes, "local_steps": every, "exchange": exchange}, nodes)


def order(others: int) -> list[int]:
    """Return the order of settings by number, the chosen one being 0: forward and back."""
    forward = [0, *range(1, others + 1), 0]
    return [*forward, *forward[-2::-1]]


def label_of(own: Entry, one: Entry) -> str:
    """Return the label of a setting."""
    name = "chosen" if one is own else "by hand"
    return f"{name}: {one.method}, {one.settings['subnets']} subnets, {one.settings['local_steps']} local steps"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Choose, run and report."""
    command = parser(__doc__)
    command.add_argument("--case", default="b", choices=[name for name in CASES if name != "tiny"])
    command.add_argument("--nodes", type=int, default=8)
    command.add_argument("--link", default="100mbit")
    options = command.parse_args(argv)
    case, nodes, link, slower = CASES[options.case], options.nodes, options.link, SLOWER
    if options.tiny:
        case, nodes, link, slower = replace(CASES["tiny"], target=0.3), 2, "none", math.inf
    chosen, why = chosen_entry(case, nodes, link)
    among = sweep(case, nodes, chosen.settings["exchange"])
    others = [one for one in among if (one.method, one.settings) != (chosen.method, chosen.settings)]
    others = others[:1] if options.tiny else others
    records: list[dict[str, Any]] = []
    seconds_by_setting: dict[int, list[float]] = {}
    budget = BUDGET_SECONDS
    for number in order(len(others)):
        one = [chosen, *others][number]
        record, seconds = {}, budget
        with contextlib.suppress(NoStepError):
            record = run(case, replace(one, budget_seconds=budget), nodes, link)
            seconds = min(seconds_to(record), budget)
        records.append({"setting": number, "most_seconds": budget, **record})
        seconds_by_setting.setdefault(number, []).append(seconds)
        budget = min(budget, slower * seconds_by_setting[0][0])
        print(f"{label_of(chosen, one)}: {seconds:.1f} s", flush=True)
    figures = [
        Figure(label_of(chosen, [chosen, *others][number]), statistics.median(seconds), "s", samples=seconds)
        for number, seconds in sorted(seconds_by_setting.items())
    ]
    best = min(figure.value for figure in figures[1:])
    figures.append(at_most("chosen / best by hand", figures[0].value / best, "", MOST_RATIO))
    return report("autotune", options, figures, case=case.name, nodes=nodes, link=link, why=why, runs=records)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, nodes, tree]:
            asyncio.run(lead(host, int(nodes), json.loads(tree)))
        case _:
            main()
