"""Run one method once on a set of machines: start processes, record times and bytes, and score its snapshots.

The clock runs from the moment at which all nodes are ready; connecting and reading data come before it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.environment import PEERS
from benchmarks.machines import START_SECONDS, Bed, Cast, Counter, Line, cores_shares, free_port, machines
from benchmarks.methods import METHODS, Case, Entry
from benchmarks.peers.node import Spec, build, open_data
from idletrain.nn.evaluate import assembled, score
from idletrain.nn.ist.subnets import views
from idletrain.nn.program import cross_entropy
from idletrain.nn.statistics import estimate_statistics

STILL = 10  # times the usual time between two steps (idletrain's rounds): what does not go on for so long hangs
LAST_SNAPSHOT_SECONDS = 20.0  # between the first node's end and that of the one that writes


def job_tree(case: Case, entry: Entry, nodes: int, folder: Path, snapshot_seconds: float) -> dict[str, Any]:
    """Return idletrain's job for an entry: as many subnets as nodes unless the settings say otherwise."""
    settings = dict(entry.settings)
    local_steps = settings.pop("local_steps")
    subnets = settings.pop("subnets", nodes)
    preemption, count = settings.pop("preemption", {}), settings.pop("count", nodes)
    exchange = settings.pop("exchange", {})
    slack = {"slack": settings.pop("slack")} if "slack" in settings else {}
    return {
        "name": "bench",
        "model": case.model,
        "data": case.data,
        "training": {
            "method": entry.method,
            "subnets": subnets,
            "local_steps": local_steps,
            "rounds": max(1, entry.steps // local_steps * nodes // subnets),
            "batch_size": case.batch_size,
            "optimizer": {"name": "sgd", **settings},
            "exchange": exchange,
            **slack,
            "seed": case.seed,
            "evaluate_every": 1_000_000,
        },
        "nodes": {"count": count},
        "preemption": preemption,
        "checkpoint": {"to": str(folder), "every": snapshot_seconds, "keep": 1_000_000},
    }


class Stage:
    """Starts an entry's processes on machines, and any node again."""

    def __init__(self, cast: Cast, case: Case, entry: Entry, nodes: int, folder: Path, snapshot_seconds: float) -> None:
        self._cast, self._case, self._entry, self._nodes, self._folder = cast, case, entry, nodes, folder
        self.method = METHODS[entry.method]
        self._port = free_port()
        self._settings = {**self.method.settings, **entry.settings}
        if self.method.ours:
            self._settings = {"tree": job_tree(case, entry, nodes, folder, snapshot_seconds)}
        (folder / "snapshots").mkdir(exist_ok=True)

    def open(self) -> None:
        """Start what runs on the head, and wait until it serves."""
        if not self.method.head:
            return
        self._start("head", self.method.head, 0)
        alive = self._cast.all_alive
        serving = self._cast.output.wait("serving", 1, START_SECONDS, alive)[0]["address"]
        if self.method.head == "dht":
            self._settings["initial_peers"] = serving
        self._address = serving

    def start(self, node: str) -> None:
        """Start a node's process."""
        if self.method.ours:
            argv = [sys.executable, "-m", "idletrain", "worker", self._address, "--memory", "1GiB"]
            self._cast.start(node, argv)
        else:
            self._start(node, self.method.node, int(node[1:]))

    def _start(self, machine: str, script: str, rank: int) -> None:
        bed, case, entry = self._cast.bed, self._case, self._entry
        spec = Spec(
            rank=rank,
            nodes=self._nodes,
            address=bed.address(machine),
            root=bed.address("head" if self.method.head else "n0"),
            port=self._port,
            model=case.model,
            data=case.data,
            batch_size=case.batch_size,
            seed=case.seed,
            steps=entry.steps,
            settings=self._settings,
            snapshots=str(self._folder / "snapshots") if rank == 0 else "",
            snapshot_every=entry.snapshot_every,
        )
        python = sys.executable if self.method.ours else str(PEERS.python())
        self._cast.start(machine, [python, "-m", f"benchmarks.peers.{script}", json.dumps(asdict(spec))])


class NoStepError(RuntimeError):
    """A run had too few seconds."""


@dataclass(frozen=True)
class Timed:
    """The times and counts of a run whose processes have ended.

    Attributes:
        started: When all nodes were ready.
        progress: Of `progress_of`.
        cores: Of `cores_shares`.
    """

    started: float
    progress: dict[int, tuple[int, float]]
    lines: list[Line]
    counter: Counter
    cores: dict[str, float]


def run(
    case: Case,
    entry: Entry,
    nodes: int,
    link: str,
    head_link: str | None = None,
    events: Path | None = None,
    **faults: Any,
) -> dict[str, Any]:
    """Run an entry once; returns its record, curve included. idletrain's own events are put into the folder `events`;
    `faults` are those of `machines`.

    Raises:
        NoStepError: its seconds were over before its first step was.
        RuntimeError: it did not start or broke off; both say what the processes said last.
    """
    with run_folder() as folder:
        try:
            with machines(nodes, link, head_link, **faults) as bed:
                timed = _timed(bed, case, entry, nodes, folder)
        except RuntimeError as error:
            log = folder / "stderr"
            raise type(error)(f"{error}\n{log.read_text()[-3000:] if log.exists() else ''}") from None
        if events and METHODS[entry.method].ours:
            events.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "bench" / "events.jsonl", events)
        return {
            "case": case.name,
            "nodes": nodes,
            "link": link,
            "head_link": head_link or link,
            "method": entry.method,
            "settings": entry.settings,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **account(timed, METHODS[entry.method].ours, nodes),
            "target": case.target,
            "curve": curve(case, entry, timed, folder),
        }


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a folder for a run's files, in RAM where possible: a snapshot should cost a copy, not a disk."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="idletrain-race-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _timed(bed: Bed, case: Case, entry: Entry, nodes: int, folder: Path) -> Timed:
    """Run the processes until they are done or the budget is spent.

    Raises:
        NoStepError: their seconds were over before their first step was.
        RuntimeError: they did not start, stood still, or one ended before.
    """
    snapshot_seconds = max(entry.budget_seconds / 16, 0.001) if entry.snapshot_every else 3600.0
    with Cast(bed, folder) as cast:
        stage = Stage(cast, case, entry, nodes, folder, snapshot_seconds)
        stage.open()
        for node in list(bed.names)[1:]:
            stage.start(node)
        ours = stage.method.ours
        ready = cast.output.wait("leased" if ours else "ready", 1 if ours else nodes, START_SECONDS, cast.all_alive)
        started = ready[0]["t"] if ours else max(line["t"] for line in ready)
        counter, cores = Counter(bed), psutil.cpu_times()
        until = time.monotonic() + entry.budget_seconds
        ended = "run_ended" if ours else "done"
        while time.monotonic() < until and cast.all_alive() and not cast.output.of(ended):
            time.sleep(0.1)
        left_at = time.time()
        counter.close()
        cores_used = cores_shares(cores, psutil.cpu_times())
        if cast.output.of(ended) or not cast.all_alive():  # who writes the snapshots may be the last to be done
            writer = "head" if ours else "n0"
            cast.output.wait(ended, 1, LAST_SNAPSHOT_SECONDS, lambda: True, writer)
    lines = list(cast.output.lines)
    progress = progress_of(lines, ours, nodes)
    if not progress:
        raise NoStepError(f"no step in {entry.budget_seconds:g} s")
    steps, last = max(progress.values())
    if not cast.output.of(ended) and left_at - last > STILL * (last - started) / len(progress):
        raise RuntimeError(f"it stood still after {steps} steps, for {left_at - last:.0f} s")
    return Timed(started, progress, lines, counter, cores_used)


def progress_of(lines: Sequence[Line], ours: bool, nodes: int) -> dict[int, tuple[int, float]]:
    """Return steps of every node and their time, by snapshot number: idletrain's rounds, a peer's steps."""
    if not ours:
        reports = (line for line in lines if line["kind"] == "step" and line["machine"] == "n0")
        return {line["steps"]: (line["steps"], line["t"]) for line in reports}
    progress, steps = {}, 0
    for line in lines:
        if line["kind"] == "round_committed":
            steps += line["steps"]
            progress[line["round"] + 1] = steps // nodes, line["t"]
    return progress


def account(timed: Timed, ours: bool, nodes: int) -> dict[str, Any]:
    """Return steps, seconds, and a node's mean local work and (idletrain's) pull and push."""
    steps, ended = max(timed.progress.values())
    seconds = ended - timed.started
    lines = [line for line in timed.lines if line["t"] <= ended]
    parts: dict[str, float] = {}
    if ours:
        accounts = [line for line in lines if line["kind"] == "attempt_ended" and "train_seconds" in line]
        local = sum(line["train_seconds"] for line in accounts) / nodes
        for part in ("pull", "push"):
            parts[f"{part}_step_seconds"] = sum(line[f"{part}_seconds"] for line in accounts) / nodes / steps
    else:
        last = {line["machine"]: line["local_seconds"] for line in lines if line["kind"] == "step"}
        local = sum(last.values()) / len(last)
    carried = timed.counter.between(timed.started, ended)
    return {
        "steps": steps,
        "seconds": seconds,
        "step_seconds": seconds / steps,
        "local_step_seconds": local / steps,
        **parts,
        "bytes_per_step": None if carried is None else carried / steps,
        "cores": timed.cores,
    }


def curve(case: Case, entry: Entry, timed: Timed, folder: Path) -> list[list[float | None]]:
    """Return points `[steps, seconds, bytes over all links, accuracy]`, up to the first at the target."""
    points: list[list[float | None]] = []
    for number, file in snapshots_of(entry, folder):
        if number not in timed.progress:
            continue
        steps, when = timed.progress[number]
        accuracy = evaluate(case, file)
        points.append([steps, when - timed.started, timed.counter.between(timed.started, when), accuracy])
        if accuracy >= case.target:
            break
    return points


def seconds_to(record: dict[str, Any]) -> float:
    """Return the seconds to the target, in a straight line from the snapshot before; infinite if never reached."""
    before, below = 0.0, 0.0
    for _, seconds, _, accuracy in record["curve"]:
        if accuracy >= record["target"]:
            return float(before + (seconds - before) * (record["target"] - below) / (accuracy - below))
        before, below = seconds, accuracy
    return math.inf


def own_snapshots(folder: Path) -> list[tuple[int, Path]]:
    """Return the networks of idletrain's snapshots, by round."""
    files = [m.parent / "network" for m in (folder / "bench" / "snapshots").glob("*/manifest.json")]
    return sorted((int(file.parent.name), file) for file in files if int(file.parent.name))


def snapshots_of(entry: Entry, folder: Path) -> list[tuple[int, Path]]:
    """Return the saved networks by number: idletrain's by round, a peer's by step."""
    if METHODS[entry.method].ours:
        return own_snapshots(folder)
    return sorted((int(file.name), file) for file in (folder / "snapshots").glob("*[0-9]"))


def evaluate(case: Case, file: Path) -> float:
    """Return the test accuracy of parameters in a file, BatchNorm's statistics estimated as idletrain does."""
    torch.manual_seed(case.seed)
    module = build(case.model)
    shapes = [p.shape for p in module.parameters()]
    size = sum(shape.numel() for shape in shapes)
    flat = torch.from_numpy(np.fromfile(file, np.float32, count=size))
    train, test = open_data(case.data)
    module = assembled(module, list(views(flat, shapes)))
    with torch.no_grad():
        estimate_statistics(module, train, case.seed)
    accuracy = score(module, test, cross_entropy).accuracy
    assert accuracy is not None
    return accuracy
