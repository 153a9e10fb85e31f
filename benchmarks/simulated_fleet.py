"""Compare simulated runs with real ones, and show what simulated fleets come to that nobody here has.

Real runs are those of `trace_goodput`'s file: eight nodes at most that follow a recorded trace. Each is simulated on
the same trace, with the seconds of a step, a pull and a push that it had, and of a node's start; target: goodputs
differ by at most 0.03.

Then 64 simulated nodes stay for a shorter and shorter time, under each policy and in data parallel training by the
models of `idletrain.simulation.peers`. Last, a fleet after Decoupled DiLoCo's failures (arXiv 2604.21428): its 1.2
million chips, each with one failure a year, read as 256 nodes of 4,688 chips, which stop together when one fails and
are back after five minutes; target: a goodput of at least 0.95 under `rolling`, beside its 0.88.

    python -m benchmarks.simulated_fleet [--trace FILE] [--tiny] [--json FILE]

Without the trace, which IDLETRAIN_TRACE can name, too, nothing real is compared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.trace_goodput import RESULTS, SPEED, TRACE_VARIABLE, thinned
from idletrain.simulation.engine import Outcome, Policy, Simulation, Work
from idletrain.simulation.fleet import Fleet
from idletrain.simulation.peers import PEERS, data_parallel
from idletrain.simulation.trace import TraceChange, read_trace

POLICIES: tuple[Policy, ...] = ("reissue", "salvage", "rolling")
DIFFERENCE = 0.03
REPLAY_SECONDS, COMMIT_SECONDS = 150.0, 0.03
YEAR, CHIPS, NODES = 365 * 86400.0, 1_200_000, 256
HOUR = 3600.0


@dataclass(frozen=True)
class Preset:
    """Sizes of the fleets.

    Attributes:
        nodes: Nodes of each, but for the last.
        large: Nodes of the last.
        hours: Simulated time.
        stays: Mean hours that a node stays.
    """

    nodes: int = 64
    large: int = NODES
    hours: float = 2.0
    stays: Sequence[float] = (0.25, 1.0, 4.0, 16.0, math.inf)


TINY = Preset(nodes=8, large=8, hours=0.2, stays=(0.1, math.inf))


def work_of(policy: Policy, nodes: int) -> Work:
    """Return subnets of 100 seconds, with two seconds for each pull and push and a checkpoint every ten."""
    lanes = nodes + nodes // 4 if policy == "rolling" else nodes
    return Work(
        policy=policy,
        subnets=lanes,
        local_steps=100,
        step_seconds=1.0,
        pull_seconds=2.0,
        push_seconds=2.0,
        commit_seconds=0.1,
        progress_seconds=10.0,
    )


def outcomes_of(fleet: Fleet, seconds: float) -> dict[str, Outcome]:
    """Return what each kind of training comes to on a fleet."""
    found: dict[str, Outcome] = {}
    for policy in POLICIES:
        found[policy] = Simulation(work_of(policy, fleet.nodes), fleet).run(seconds)
    return found | {name: data_parallel(model(1.0), fleet, seconds) for name, model in PEERS.items()}


def simulated(run: Mapping[str, Any], changes: Sequence[TraceChange]) -> Outcome:
    """Simulate a real run of `trace_goodput`."""
    settings, shares = run["settings"], run.get("shares") or {}
    alive = run["of_all"] * run["node_seconds"] / run["goodput"]
    start_seconds = (run["node_seconds"] - alive) / run["starts"]
    updates = run["steps"] / settings["local_steps"]
    work = Work(
        policy=settings["preemption"]["policy"],
        subnets=settings["subnets"],
        local_steps=settings["local_steps"],
        step_seconds=run["of_all"] / run["steps_per_node_second"],
        pull_seconds=shares.get("pull", 0.0) * alive / updates,
        push_seconds=shares.get("push", 0.0) * alive / updates,
        commit_seconds=COMMIT_SECONDS,
        progress_seconds=float(settings["preemption"]["progress_every"].removesuffix("ms")) / 1000,
    )
    fleet = Fleet(nodes=1, changes=tuple(_joined(changes, start_seconds)))
    return Simulation(work, fleet).run(REPLAY_SECONDS)


def _joined(changes: Sequence[TraceChange], start_seconds: float) -> Iterator[tuple[float, str, bool]]:
    """Yield when nodes of a trace join, after their start, and go; the first are there when it begins."""
    first, came = changes[0].at_ms, dict[str, float]()
    for change in changes:
        at = (change.at_ms - first) / 1000 / SPEED
        if change.present:
            came[change.node] = at + start_seconds if at else 0.0
        elif (joined := came.pop(change.node, math.inf)) < at:
            yield joined, change.node, True
            yield at, change.node, False
    yield from ((joined, node, True) for node, joined in came.items())


def compared(trace: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Return how far each real run's simulation is from it."""
    changes = thinned(read_trace(trace.read_text()))
    rows, figures = [], []
    for run in json.loads(RESULTS.read_text())["runs"]:
        if "subnets" not in run["settings"]:
            continue
        settings, found = run["settings"], simulated(run, changes)
        name = f"{run['contender']}, {settings['subnets']}, {settings['preemption']['progress_every']}"
        difference = found.goodput - run["goodput"]
        figures.append(at_most(f"{name}: simulated and real goodput differ by", abs(difference), "", DIFFERENCE))
        rows.append([name, f"{run['goodput']:.3f}", f"{found.goodput:.3f}", f"{run['steps']:,.0f}", f"{found.steps:,}"])
    head = ["run", "goodput", "simulated", "steps", "simulated"]
    return figures, {"title": "real runs on a recorded trace", "head": head, "rows": rows}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Simulate, compare and report."""
    command = parser(__doc__)
    named = os.environ.get(TRACE_VARIABLE)
    command.add_argument("--trace", type=Path, default=named and Path(named), help="the trace of the real runs")
    options = command.parse_args(argv)
    preset = TINY if options.tiny else Preset()
    figures, tables, fleets = list[Figure](), list[dict[str, Any]](), dict[str, dict[str, float]]()
    if options.trace and not options.tiny:
        figures, table = compared(options.trace)
        tables.append(table)
    for stay in preset.stays:
        fleet = Fleet(nodes=preset.nodes, stay_seconds=stay * HOUR, return_seconds=300.0, spread=0.1)
        found = outcomes_of(fleet, preset.hours * HOUR)
        fleets[f"{stay:g} h"] = {name: outcome.goodput for name, outcome in found.items()}
    rows = [[stay, *(f"{goodput:.3f}" for goodput in by_kind.values())] for stay, by_kind in fleets.items()]
    title = f"goodput of {preset.nodes} simulated nodes by how long one stays"
    tables.append({"title": title, "head": ["a node stays", *next(iter(fleets.values()))], "rows": rows})
    large = Fleet(nodes=preset.large, stay_seconds=YEAR / (CHIPS / NODES), return_seconds=300.0, spread=0.1)
    goodput = Simulation(work_of("rolling", preset.large), large).run(preset.hours * HOUR).goodput
    what = f"rolling, {preset.large} nodes of {CHIPS / NODES:,.0f} chips: goodput"
    figures.append(at_least(what, goodput, "", 0.95))
    return report("simulated_fleet", options, figures, tables=tables, fleets=fleets)


if __name__ == "__main__":
    main()
