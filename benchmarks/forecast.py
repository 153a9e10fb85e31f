"""Does a round take what it was expected to take?

A look at a fleet over links of a rate (`idletrain-testbed`; needs root, but for `none`), as a launch takes it; then
cases of the comparison, a few rounds of each, their seconds beside those that were foreseen.

    python -m benchmarks.forecast [--tiny] [--json FILE] [--case a,b,c,d] [--nodes 4,8] [--link 1gbit,100mbit]

Target: within 15 % of what was measured, every case.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.candidates import RATES, WHOLE
from benchmarks.contest import job_tree, run
from benchmarks.machines import Cast, machines
from benchmarks.methods import CASES, Entry
from benchmarks.report import Figure, at_most, parser, report
from benchmarks.runs import of_kind
from benchmarks.time_to_accuracy import numbers, words
from idletrain.fabric import outlook
from idletrain.fabric.forecast import PARTS, Expected, Fleet
from idletrain.fabric.survey import survey
from idletrain.fleet import scheduler, settings
from idletrain.job import parse_job
from idletrain.observe.records import read

OFF = 0.15
WARM_UP_ROUNDS = 1  # the first loads the program
ROUNDS = 6
TRAININGS = (("ist", 50), ("local-sgd", 10))
START_SECONDS, LOOK_SECONDS, BUDGET_SECONDS = 120.0, 120.0, 240.0


async def lead(host: str, nodes: int) -> None:
    """A head: the scheduler, and a look at the fleet once all workers are there."""
    settings.apply()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        async with scheduler.started(Path(folder), host=host) as address:
            _print({"kind": "serving", "address": address})
            async with Client(address, asynchronous=True, set_as_default=False) as client:
                await client.wait_for_workers(nodes)
                _print({"kind": "fleet", "fleet": asdict(await survey(client))})


def _print(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def fleet_of(nodes: int, link: str) -> Fleet:
    """What a launch would see of machines with such links."""
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        machines(nodes, link) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        cast.start("head", [sys.executable, "-m", "benchmarks.forecast", "head", bed.address("head"), str(nodes)])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        for name in bed.names[1:]:
            cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--memory", "1GiB"])
        (line,) = cast.output.wait("fleet", 1, START_SECONDS + LOOK_SECONDS, cast.all_alive)
    return Fleet(**line["fleet"])


def entry_of(case: str, method: str, local_steps: int, rounds: int) -> Entry:
    """Some rounds of a case."""
    rates = RATES.get(case, {"lr": 0.05})
    told = {**rates, **WHOLE.get(case, {}), "state": "reset", "local_steps": local_steps}
    return Entry(method=method, settings=told, steps=rounds * local_steps, budget_seconds=BUDGET_SECONDS)


def foreseen(case: str, entry: Entry, fleet: Fleet) -> Expected:
    """What a round of a run should take."""
    tree = job_tree(CASES[case], entry, fleet.nodes, Path(), BUDGET_SECONDS)
    _, choice = outlook.chosen(parse_job(tree), fleet)
    return choice.expected


def compared(case: str, entry: Entry, fleet: Fleet, link: str) -> Iterator[Figure]:
    """A case's rounds, and how far off the forecast was."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        expected = foreseen(case, entry, fleet)
        run(CASES[case], entry, fleet.nodes, link, events=Path(folder))
        committed = of_kind(list(read(Path(folder) / "events.jsonl")), "round_committed")[WARM_UP_ROUNDS:]
    seconds = [event["seconds"] for event in committed]
    typical = statistics.median(seconds)
    name = f"case {case}, {entry.method}, {entry.settings['local_steps']} steps, {fleet.nodes} nodes, {link}"
    yield at_most(f"{name}: off by", abs(expected.round / typical - 1), "", OFF, seconds)
    for part in PARTS:
        each = [event["measured"][part] for event in committed]
        yield Figure(f"{name}: {part}, expected", getattr(expected, part), "s")
        yield Figure(f"{name}: {part}, measured", statistics.median(each), "s", samples=each)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Look, run and report."""
    command = parser(__doc__)
    command.add_argument("--case", type=words, default=["a", "b", "c", "d"])
    command.add_argument("--nodes", type=numbers, default=[4, 8])
    command.add_argument("--link", type=words, default=["1gbit", "100mbit"])
    options = command.parse_args(argv)
    cases, places = options.case, [(nodes, link) for link in options.link for nodes in options.nodes]
    trainings, rounds = list(TRAININGS), ROUNDS
    if options.tiny:
        cases, places, trainings, rounds = ["tiny"], [(2, "none")], [("ist", 5)], 3
    figures: list[Figure] = []
    fleets: list[dict[str, Any]] = []
    for place in places:
        fleet = fleet_of(*place)
        fleets.append({"link": place[1], **asdict(fleet)})
        for case in cases:
            for method, local_steps in trainings:
                figures += compared(case, entry_of(case, method, local_steps, rounds), fleet, place[1])
                print(f"{figures[-9].what} {figures[-9].value:.0%}", flush=True)
    return report("forecast", options, figures, fleets=fleets)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, nodes]:
            asyncio.run(lead(host, int(nodes)))
        case _:
            main()
