"""Measure how much of the nodes' time counts when nodes come and go as on a recorded spot market.

Nodes of a trace (lines `milliseconds,add|remove,node`, such as the g4dn trace of Bamboo, NSDI'23) start and are killed
(SIGKILL, without a notice) for every method alike, 100 times as fast as recorded; of a trace with many nodes every
third one, to leave the cores some air. All methods train case a's network over loopback.

A node-second counts if it was spent on local steps that reached the others: for idletrain what its own summary calls
useful; for torchft and hivemind the local work up to each synchronisation that took place (generous: a failed one
costs them nothing as long as the node lives until the next). `goodput` is that over the node-seconds since the node
was ready; `of all` over those since its process started, with imports and joining. Steps are not alike: idletrain's are
of a subnet, a peer's of the whole network; the time to an accuracy compares them.

Peers run with several intervals between synchronisations, idletrain with several numbers of subnets and of local
steps; the one with the best goodput is kept.

    python -m benchmarks.trace_goodput --trace FILE [--methods NAME,...] [--seconds S] [--tiny] [--json FILE]

Runs add to the JSON file. The trace can also be named by IDLETRAIN_TRACE. Targets: 0.97 under `rolling`, 0.95 under
`salvage`, 0.93 under `reissue`, each above torchft and hivemind; under `rolling` the accuracy no later than by torchft.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machines import START_SECONDS, Bed, Cast, Line, Loopback
from benchmarks.methods import CASES, METHODS, Case, Entry
from benchmarks.race import Stage, evaluate, progress_of, run_folder, snapshots_of
from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.time_to_accuracy import words
from idletrain.errors import JobError
from idletrain.observe import time_use
from idletrain.observe.summary import summary_of
from idletrain.simulation.trace import TraceChange, read_trace

RESULTS = Path(__file__).parent / "results" / "trace_goodput.json"
TRACE_VARIABLE = "IDLETRAIN_TRACE"
SPEED = 100.0
EVERY, OFFSET = 3, 2  # of the trace's nodes, in the order in which they come
GOODPUT_TARGETS = {"ist-rolling": 0.97, "ist-salvage": 0.95, "ist-reissue": 0.93}
PEER_INTERVALS = (25, 100, 400)  # steps
SUBNET_COUNTS = (16, 24, 32)  # two to four for each of the eight nodes that are there at most
LONGER = 800  # local steps of a round, instead of 400
LANES, SLACK, INTERVALS = 8, 0.25, ("500ms", "250ms")  # as many lanes as nodes at most; between checkpoints
FOREVER = 1_000_000
NEVER_SECONDS = 1e6  # to an accuracy that is not reached


def _ist(policy: str, subnets: int = 16, local_steps: int = 400, progress: str = "500ms", **own: Any) -> Entry:
    """Return an entry that begins with the nodes present."""
    preemption = {"policy": policy, "progress_every": progress}
    settings = {"lr": 0.2, "local_steps": local_steps, "subnets": subnets, "count": 1, "preemption": preemption, **own}
    return Entry(method="ist", settings=settings, steps=FOREVER, snapshot_every=1)


def _peer(method: str, every: int, **own: Any) -> Entry:
    return Entry(method=method, settings={"lr": 0.2, "sync_every": every, **own}, steps=FOREVER, snapshot_every=every)


CONTENDERS: dict[str, tuple[Entry, ...]] = {
    "ist-rolling": tuple(_ist("rolling", LANES, progress=interval, slack=SLACK) for interval in INTERVALS),
    "ist-salvage": (
        *(_ist("salvage", subnets) for subnets in SUBNET_COUNTS),
        *(_ist("salvage", subnets, LONGER) for subnets in SUBNET_COUNTS[1:]),
    ),
    "ist-reissue": tuple(_ist("reissue", subnets) for subnets in SUBNET_COUNTS),
    "torchft": tuple(_peer("torchft-local-sgd", every, min_nodes=1) for every in PEER_INTERVALS),
    "hivemind": tuple(_peer("hivemind", every, min_nodes=1, timeout=15.0) for every in PEER_INTERVALS),
}


TINY = {name: entries[:1] for name, entries in CONTENDERS.items()} | {"ist-reissue": (_ist("reissue", local_steps=20),)}


@dataclass(frozen=True)
class Scenario:
    """The case and the part of the trace to replay, in seconds."""

    case: Case
    changes: tuple[TraceChange, ...]
    seconds: float


@dataclass(frozen=True)
class Turn:
    """The start or the death of a machine, `at` seconds after the beginning."""

    at: float
    machine: str
    there: bool


def turns_of(changes: Sequence[TraceChange], seconds: float) -> list[Turn]:
    """Return a trace as turns of numbered machines; one is used again once its node is gone.

    The node that stays longest has machine n0, whose snapshots are scored.
    """
    first = changes[0].at_ms
    end = first + seconds * 1000 * SPEED
    last = {change.node: min(change.at_ms, end) for change in changes if not change.present}
    stays = max((c for c in changes if c.present), key=lambda c: last.get(c.node, end) - c.at_ms).node
    free, launched, held = list[int](), 1, dict[str, int]()
    turns = []
    for change in changes:
        at = (change.at_ms - first) / 1000 / SPEED
        if at > seconds:
            break
        if change.present:
            if change.node == stays:
                number = 0
            elif free:
                number = heapq.heappop(free)
            else:
                number, launched = launched, launched + 1
            held[change.node] = number
        elif change.node in held:
            number = held.pop(change.node)
            if number:
                heapq.heappush(free, number)
        else:
            continue
        turns.append(Turn(at, f"n{number}", change.present))
    return turns


def thinned(changes: Sequence[TraceChange]) -> tuple[TraceChange, ...]:
    """Return every third node's changes."""
    order = list(dict.fromkeys(change.node for change in changes))
    chosen = set(order[OFFSET::EVERY])
    return tuple(change for change in changes if change.node in chosen)


@dataclass
class Life:
    """The lifetime of one process."""

    machine: str
    started: float
    ended: float = 0.0


def replay(scenario: Scenario, name: str, entry: Entry) -> dict[str, Any]:
    """Train while machines come and go as in the trace; return the record."""
    turns = turns_of(scenario.changes, scenario.seconds)
    nodes = 1 + max(int(turn.machine[1:]) for turn in turns)
    with run_folder() as folder:
        lives, lines, ended = _play(Loopback(nodes), scenario, entry, turns, folder)
        counted = _of_idletrain(lines) if METHODS[entry.method].ours else _of_peer(lines, lives, ended)
        reached = _reached(scenario.case, entry, lines, folder)
    all_seconds = sum(life.ended - life.started for life in lives)
    return {
        "contender": name,
        "settings": entry.settings,
        "machines": nodes,
        "starts": sum(turn.there for turn in turns),
        "kills": sum(not turn.there for turn in turns),
        "node_seconds": all_seconds,
        "goodput": counted["useful"] / max(counted["alive"], 1e-9),
        "of_all": counted["useful"] / all_seconds,
        "shares": counted.get("shares"),
        "steps": counted["steps"],
        "steps_per_node_second": counted["steps"] / all_seconds,
        "target": scenario.case.target,
        "seconds_to_target": reached,
    }


def _play(
    bed: Bed, scenario: Scenario, entry: Entry, turns: Sequence[Turn], folder: Path
) -> tuple[list[Life], list[Line], float]:
    """Start and kill as the trace says; its clock runs from the moment at which the first nodes are there."""
    first = [turn for turn in turns if turn.at == 0]
    lives: dict[str, Life] = {}
    past: list[Life] = []
    with Cast(bed, folder) as cast:
        stage = Stage(cast, scenario.case, entry, len(bed.names) - 1, folder, snapshot_seconds=2.0)
        stage.open()
        for turn in first:
            stage.start(turn.machine)
            lives[turn.machine] = Life(turn.machine, time.time())
        joined = "worker_joined" if stage.method.ours else "ready"
        cast.output.wait(joined, len(first), START_SECONDS, cast.all_alive)
        start = time.time()
        for turn in turns[len(first) :]:
            time.sleep(max(0.0, start + turn.at - time.time()))
            if turn.there:
                stage.start(turn.machine)
                lives[turn.machine] = Life(turn.machine, time.time())
            else:
                cast.kill(turn.machine)
                past.append(_over(lives.pop(turn.machine)))
        time.sleep(max(0.0, start + scenario.seconds - time.time()))
        ended = time.time()
        lines = list(cast.output.lines)
    return past + [_over(life, ended) for life in lives.values()], lines, ended


def _over(life: Life, ended: float | None = None) -> Life:
    return replace(life, ended=ended or time.time())


def _of_idletrain(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the figures of the run's own events."""
    events = [line for line in lines if "v" in line]
    summary = summary_of(events)
    shares = time_use.time_shares(events, summary.alive_seconds)
    return {
        "useful": summary.useful_seconds,
        "alive": summary.alive_seconds,
        "steps": summary.local_steps,
        "shares": shares,
    }


def _of_peer(lines: Sequence[Line], lives: Sequence[Life], ended: float) -> dict[str, float]:
    """Sum each process' local work up to its last synchronisation that took place, and its time since it was ready."""
    useful = alive = steps = 0.0
    for life in lives:
        reports = [
            line for line in lines if line["machine"] == life.machine and life.started <= line["t"] <= life.ended
        ]
        ready = [line["t"] for line in reports if line["kind"] == "ready"]
        alive += min(life.ended, ended) - ready[0] if ready else 0.0
        synced = [line for line in reports if line["kind"] == "step" and line.get("counted", True)]
        if synced:
            useful += synced[-1]["local_seconds"]
            steps += synced[-1]["steps"]
    return {"useful": useful, "alive": alive, "steps": steps}


def _reached(case: Case, entry: Entry, lines: Sequence[Line], folder: Path) -> float | None:
    """Return the seconds from the first ready node to the first snapshot at the target."""
    ours = METHODS[entry.method].ours
    first = min((line["t"] for line in lines if line["kind"] == ("leased" if ours else "ready")), default=0.0)
    progress = progress_of(lines, ours, nodes=1)
    for number, file in snapshots_of(entry, folder):
        if number in progress and evaluate(case, file) >= case.target:
            return float(progress[number][1] - first)
    return None


def figures_of(runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return goodputs against the targets, and further counts."""
    figures: list[Figure] = []
    best: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: float(run["goodput"])):
        best[run["contender"]] = run
    peers = [run["goodput"] for name, run in best.items() if name not in GOODPUT_TARGETS]
    for name, run in best.items():
        goodput = run["goodput"]
        target = GOODPUT_TARGETS.get(name)
        what = f"{name}: goodput"
        figures.append(at_least(what, goodput, "", target) if target else Figure(what, goodput, ""))
        if target and peers:
            figures.append(at_least(f"{name}: goodput / the better peer's", goodput / max(*peers, 1e-9), "x", 1.0))
        figures.append(Figure(f"{name}: goodput with starting", run["of_all"], ""))
        whose = "a subnet's" if name in GOODPUT_TARGETS else "the network's"
        figures.append(Figure(f"{name}: {whose} steps that counted", run["steps_per_node_second"], "a node-second"))
        if run["seconds_to_target"] is not None:
            figures.append(Figure(f"{name}: time to {run['target']:g}", run["seconds_to_target"], "s"))
    if {"ist-rolling", "torchft"} <= best.keys() and (theirs := best["torchft"]["seconds_to_target"]):
        ours = best["ist-rolling"]["seconds_to_target"] or NEVER_SECONDS
        figures.append(at_most(f"ist-rolling: time to {runs[0]['target']:g} / torchft's", ours / theirs, "x", 1.0))
    return figures


def table_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a table of every setting tried, not only each contender's best."""
    target = f"seconds to {runs[0]['target']:g}"
    head = ["contender", "subnets, steps between exchanges", "goodput", "with starting", target]
    rows = [
        [
            run["contender"],
            _spacing(run["settings"]),
            f"{run['goodput']:.3f}",
            f"{run['of_all']:.3f}",
            "not reached" if run["seconds_to_target"] is None else f"{run['seconds_to_target']:.0f}",
        ]
        for run in sorted(runs, key=lambda run: -float(run["goodput"]))
    ]
    return {"title": f"{runs[0]['starts']} starts and {runs[0]['kills']} kills of nodes", "head": head, "rows": rows}


def _spacing(settings: dict[str, Any]) -> str:
    """Return how many subnets a run has, if any, and the steps between two exchanges."""
    return f"{settings['subnets']}, {settings['local_steps']}" if "subnets" in settings else str(settings["sync_every"])


def tiny_scenario() -> Scenario:
    """Return a scenario of three nodes, of which one is killed and replaced."""
    text = "0,add,a\n0,add,b\n300000,remove,b\n350000,add,c\n"
    return Scenario(CASES["tiny"], read_trace(text), 8.0)


def scenario_of(options: argparse.Namespace) -> Scenario:
    """Return the scenario that the command line names.

    Raises:
        ValueError: it names what there is not.
    """
    if unknown := set(options.methods) - set(CONTENDERS):
        raise ValueError(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(CONTENDERS)}")
    if options.tiny:
        return tiny_scenario()
    if options.trace is None or not options.trace.is_file():
        raise ValueError(
            f"name a trace that is there: --trace FILE, or {TRACE_VARIABLE}; see the text above for its lines"
        )
    try:
        return Scenario(CASES["a"], thinned(read_trace(options.trace.read_text())), options.seconds)
    except JobError as error:
        raise ValueError(str(error)) from None


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Replay the scenario, count and report."""
    command = parser(__doc__)
    named = os.environ.get(TRACE_VARIABLE)
    command.add_argument("--trace", type=Path, default=named and Path(named), help="a recorded trace")
    command.add_argument("--methods", type=words, default=list(CONTENDERS), help=", ".join(CONTENDERS))
    command.add_argument("--seconds", type=float, default=150.0, help="of the replay")
    options = command.parse_args(argv)
    try:
        scenario = scenario_of(options)
    except ValueError as error:
        command.error(str(error))
    options.json = options.json or (None if options.tiny else RESULTS)
    earlier: dict[str, Any] | None = None
    if options.json and options.json.exists() and not options.tiny:
        earlier = json.loads(options.json.read_text())
    runs: list[dict[str, Any]] = earlier["runs"] if earlier else []
    for name in options.methods:
        for entry in (TINY if options.tiny else CONTENDERS)[name]:
            sys.stderr.write(f"{name} {entry.settings}\n")
            record = replay(scenario, name, entry)
            runs = [run for run in runs if (run["contender"], run["settings"]) != (name, entry.settings)] + [record]
            result = report("trace_goodput", options, figures_of(runs), earlier, tables=[table_of(runs)], runs=runs)
    return result


if __name__ == "__main__":
    main()
