"""Does a round take what it was expected to take?

Cases of the comparison on machines with links of a rate (`idletrain-testbed`; needs root, but for `none`). On each
fleet, a few times: a look, as a launch takes it, and some rounds right behind it, which hold what they were expected to
take. A case is as far off as its looks are in the median, for machines that others use, too, are now fast, now slow.

    python -m benchmarks.forecast [--tiny] [--json FILE] [--case a,b,c,d] [--nodes 4,8] [--link 1gbit,100mbit]

Target: within 15 % of what was measured, every case.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.security import Security

from benchmarks.candidates import RATES, WHOLE
from benchmarks.contest import job_tree, run_folder
from benchmarks.machines import Cast, Line, machines
from benchmarks.methods import CASES, Entry
from benchmarks.report import Figure, at_most, parser, report
from benchmarks.runs import of_kind
from benchmarks.time_to_accuracy import numbers, words
from idletrain.fabric import outlook
from idletrain.fabric.forecast import PARTS, Fleet
from idletrain.fabric.survey import survey
from idletrain.fleet import scheduler, settings
from idletrain.job import Job, parse_job
from idletrain.launch import Options, launch
from idletrain.nn.prepare import from_settings
from idletrain.observe.expectation import Expectation
from idletrain.observe.records import Event

OFF = 0.15
LOOKS = 5
WARM_UP_ROUNDS, ROUNDS = 1, 2  # behind each look; the first loads the program
LOOKING_SECONDS = 100.0  # beyond which no other look is taken: long rounds have their own fast and slow times
START_SECONDS, CASE_SECONDS = 120.0, 900.0
TRAININGS = (("ist", 50), ("local-sgd", 10))


async def look(address: str, nodes: int, job: Job) -> Fleet:
    """What a launch sees of a cluster, once all workers are there."""
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        await client.wait_for_workers(nodes)
        return await survey(client, job)


def tell(line: Line) -> None:
    """Say something to who started this process."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def lead(host: str, nodes: int, tree: dict[str, Any], looks: int) -> None:
    """A head: looks at its workers and trains some rounds on them, again and again."""
    settings.apply()
    job = parse_job(tree)
    prepared = replace(from_settings(job.model, job.data, job.training), test=None)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        async with scheduler.started(Path(folder), host=host) as address:
            tell({"kind": "serving", "address": address})
            until = time.monotonic() + LOOKING_SECONDS
            for number in range(looks):
                if number and time.monotonic() > until:
                    break
                _, choice = await asyncio.to_thread(outlook.chosen, job, await look(address, nodes, job))
                expectation = Expectation(choice.expected.as_record(), choice.why)
                mine = job.model_copy(update={"name": f"look-{number}"})
                mine.run_dir.mkdir(parents=True)
                events: list[Event] = []
                cluster = address, Security()
                await launch(mine, prepared, Options(cluster=cluster, sinks=(events.append,), expectation=expectation))
                tell({"kind": "look", "rounds": of_kind(events, "round_committed")[WARM_UP_ROUNDS:]})
            tell({"kind": "ended"})


def looks_of(case: str, method: str, local_steps: int, nodes: int, link: str, looks: int) -> list[list[Event]]:
    """The rounds behind each look."""
    rates = RATES.get(case, {"lr": 0.05})
    told = {**rates, **WHOLE.get(case, {}), "state": "reset", "local_steps": local_steps}
    entry = Entry(method=method, settings=told, steps=(WARM_UP_ROUNDS + ROUNDS) * local_steps)
    with run_folder() as folder, machines(nodes, link) as bed, Cast(bed, folder) as cast:
        tree = job_tree(CASES[case], entry, nodes, folder, 3600.0)
        told_head = "head", bed.address("head"), str(nodes), json.dumps(tree), str(looks)
        cast.start("head", [sys.executable, "-m", "benchmarks.forecast", *told_head])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        for name in list(bed.names)[1:]:
            cast.start(name, [sys.executable, "-m", "idletrain", "worker", serving["address"], "--memory", "1GiB"])
        cast.output.wait("ended", 1, CASE_SECONDS, cast.all_alive)
    return [line["rounds"] for line in cast.output.of("look")]


def figures_of(name: str, looks: Sequence[Sequence[Event]]) -> Iterator[Figure]:
    """How far off the looks were in the median, and what each part was expected to take and took."""
    ratios = [
        sum(rounds[0]["expected"].values()) / statistics.median(event["seconds"] for event in rounds)
        for rounds in looks
    ]
    yield at_most(f"{name}: off by", abs(statistics.median(ratios) - 1), "", OFF, ratios)
    for part in PARTS:
        for which in ("expected", "measured"):
            each = [statistics.median(event[which][part] for event in rounds) for rounds in looks]
            yield Figure(f"{name}: {part}, {which}", statistics.median(each), "s", samples=each)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run and report."""
    command = parser(__doc__)
    command.add_argument("--case", type=words, default=["a", "b", "c", "d"])
    command.add_argument("--nodes", type=numbers, default=[4, 8])
    command.add_argument("--link", type=words, default=["1gbit", "100mbit"])
    options = command.parse_args(argv)
    cases, places = options.case, [(nodes, link) for link in options.link for nodes in options.nodes]
    trainings, looks = list(TRAININGS), LOOKS
    if options.tiny:
        cases, places, trainings, looks = ["tiny"], [(2, "none")], [("ist", 5)], 2
    figures: list[Figure] = []
    for nodes, link in places:
        for case in cases:
            for method, local_steps in trainings:
                name = f"case {case}, {method}, {local_steps} steps, {nodes} nodes, {link}"
                found = list(figures_of(name, looks_of(case, method, local_steps, nodes, link, looks)))
                figures += found
                print(f"{found[0].what} {found[0].value:.0%}", flush=True)
    return report("forecast", options, figures)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, nodes, tree, looks]:
            asyncio.run(lead(host, int(nodes), json.loads(tree), int(looks)))
        case _:
            main()
