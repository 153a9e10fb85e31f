"""One method, once, on a set of machines: start its processes, keep the clock and the byte counts, score what it kept.

Machines are a testbed's (network namespaces with shaped links, `infra/testbed`) or, unshaped, plain processes on
loopback. Machine number k is pinned to core k modulo cores, the head is number 0, every process computes on one
thread. The clock runs from the moment at which all nodes are ready; connecting and reading data come before it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from benchmarks.peers import environment
from benchmarks.peers.node import Spec, build, open_data
from idletrain.nn.evaluate import assembled, estimate_statistics, score
from idletrain.nn.program import cross_entropy
from idletrain.nn.subnets import views

ROOT = Path(__file__).parent.parent
START_SECONDS = 120.0  # eight interpreters that import torch on two cores
COUNT_SECONDS = 0.5  # one look costs a process of some 5 ms
LAST_LINE_SECONDS = 2.0  # from a process' end until what it printed has been read
Line = dict[str, Any]


class Bed(Protocol):
    """Machines: the part of a testbed that is needed here."""

    @property
    def names(self) -> Sequence[str]: ...

    def address(self, node: str) -> str: ...

    def popen(self, node: str, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[bytes]: ...

    def carried_bytes(self) -> int | None:
        """What the links have brought to all machines so far, or None where nobody counts."""


class Loopback:
    """Every machine is this one."""

    def __init__(self, nodes: int) -> None:
        self.names = ("head", *(f"n{i}" for i in range(nodes)))

    def address(self, node: str) -> str:  # noqa: ARG002 (all have one)
        return "127.0.0.1"

    def popen(self, node: str, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[bytes]:  # noqa: ARG002
        return subprocess.Popen(argv, **kwargs)

    def carried_bytes(self) -> int | None:
        return None


class Shaped:
    """A testbed's machines."""

    def __init__(self, bed: Any) -> None:
        self._bed, self.names = bed, bed.names
        self.address, self.popen = bed.address, bed.popen

    def carried_bytes(self) -> int | None:
        carried: int = self._bed.delivered()
        return carried


@contextlib.contextmanager
def machines(nodes: int, link: str, head_link: str | None = None) -> Iterator[Bed]:
    """Machines with links of a rate such as `100mbit`; `none` is loopback.

    Raises:
        RuntimeError: links cannot be shaped here; it says what is missing.
    """
    if link == "none":
        yield Loopback(nodes)
        return
    import idletrain_testbed

    if lacking := idletrain_testbed.missing():
        raise RuntimeError(f"links cannot be shaped here: {'; '.join(lacking)}; use --link none")
    with idletrain_testbed.Testbed(nodes=nodes, link=link, head_link=head_link) as bed:
        yield Shaped(bed)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        target: The accuracy whose time is told.
    """

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    target: float
    batch_size: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Method:
    """A way to train: the script of a node, the script on the head if there is one, and fixed settings."""

    node: str
    head: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.node == "idletrain"


METHODS = {
    "ist": Method("idletrain", "idletrain_head"),
    "local-sgd": Method("idletrain", "idletrain_head"),
    "ddp": Method("ddp"),
    "ddp-fp16": Method("ddp", settings={"hook": "fp16"}),
    "ddp-powersgd": Method("ddp", settings={"hook": "powersgd"}),
    "post-local-sgd": Method("post_local_sgd"),
    "torchft-local-sgd": Method("torchft_node", "lighthouse", {"algorithm": "local-sgd"}),
    "torchft-diloco": Method("torchft_node", "lighthouse", {"algorithm": "diloco"}),
    "hivemind": Method("hivemind_node", "dht"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method's settings for one run, and how far it goes.

    Attributes:
        steps: Local steps of every node after which it ends.
        snapshot_every: Steps between two points of the curve; 0 for a timing alone.
        budget_seconds: When it is ended whatever it has done.
    """

    method: str
    settings: dict[str, Any]
    steps: int
    snapshot_every: int = 0
    budget_seconds: float = 600.0


class Output:
    """The lines that processes print, as they come."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._arrived = threading.Condition()
        self._readers: list[threading.Thread] = []

    def read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Take a process' lines until it ends, on a thread."""
        self._readers.append(threading.Thread(target=self._read, args=(name, process), daemon=True))
        self._readers[-1].start()

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith(b"{"):
                    with self._arrived:
                        self.lines.append({"machine": name, **json.loads(line)})
                        self._arrived.notify_all()

    def of(self, kind: str) -> list[Line]:
        """The lines of a kind so far."""
        return [line for line in list(self.lines) if line["kind"] == kind]

    def wait(self, kind: str, count: int, seconds: float, alive: Any) -> list[Line]:
        """Wait for lines of a kind.

        Raises:
            RuntimeError: they do not come, or a process ended before.
        """
        until = time.monotonic() + seconds
        with self._arrived:
            while len(self.of(kind)) < count:
                if time.monotonic() > until or not alive():
                    raise RuntimeError(f"{count} times {kind!r} did not come")
                self._arrived.wait(0.2)
        return self.of(kind)

    def close(self) -> None:
        """Read what ended processes still had to say."""
        for reader in self._readers:
            reader.join(LAST_LINE_SECONDS)


class Cast:
    """The processes of one run; ended, by their ids, behind the context."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.output = bed, Output()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (folder / "stderr").open("ab")
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> Cast:
        return self

    def start(self, name: str, argv: Sequence[str]) -> None:
        """Start a machine's process, in a session of its own, pinned to the machine's core."""
        number = list(self.bed.names).index(name)
        core = self._cores[number % len(self._cores)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.processes[name] = self.bed.popen(
            name,
            ["taskset", "-c", str(core), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=str(ROOT),
            env={**os.environ, **threads},
            start_new_session=True,
        )
        self.output.read(name, self.processes[name])

    def kill(self, name: str) -> None:
        """End a machine's processes at once, as the machine's end would: all of its session."""
        process = self.processes.pop(name)
        kill_session(process.pid)
        process.wait()

    def all_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes.values())

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.output.close()
        self._log.close()


def kill_session(leader: int) -> None:
    """SIGKILL every process of a session that we started: helpers that it made go with it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and int(stat.parent.name) != leader:
                os.kill(int(stat.parent.name), 9)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, 9)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def job_tree(case: Case, entry: Entry, nodes: int, folder: Path, snapshot_seconds: float) -> dict[str, Any]:
    """idletrain's job for an entry: as many subnets as nodes unless the settings say otherwise."""
    settings = dict(entry.settings)
    local_steps = settings.pop("local_steps")
    subnets = settings.pop("subnets", nodes)
    preemption, count = settings.pop("preemption", {}), settings.pop("count", nodes)
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
            "optimizer": settings,
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
        python = sys.executable if self.method.ours else str(environment.python())
        self._cast.start(machine, [python, "-m", f"benchmarks.peers.{script}", json.dumps(asdict(spec))])


class Counter:
    """Samples of the bytes over all links, taken on a thread."""

    def __init__(self, bed: Bed) -> None:
        self._bed, self._ended = bed, threading.Event()
        self.samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while (carried := self._bed.carried_bytes()) is not None:
            self.samples.append((time.time(), carried))
            if self._ended.wait(COUNT_SECONDS):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> float | None:
        """Bytes from one time to another."""
        if not self.samples:
            return None
        times, values = zip(*self.samples, strict=True)
        return float(np.interp(end, times, values) - np.interp(start, times, values))


@dataclass(frozen=True)
class Timed:
    """What is known of a run when its processes have ended.

    Attributes:
        begun: When all nodes were ready.
        progress: Of `progress_of`.
        cores: Of `cores_shares`.
    """

    begun: float
    progress: dict[int, tuple[int, float]]
    lines: list[Line]
    counter: Counter
    cores: dict[str, float]


def run(case: Case, entry: Entry, nodes: int, link: str, head_link: str | None = None) -> dict[str, Any]:
    """Run an entry once; returns its record, curve included.

    Raises:
        RuntimeError: it did not start, took no step, or broke off; it says what the processes said last.
    """
    with run_folder() as folder:
        try:
            with machines(nodes, link, head_link) as bed:
                timed = _timed(bed, case, entry, nodes, folder)
        except RuntimeError as error:
            log = folder / "stderr"
            raise RuntimeError(f"{error}\n{log.read_text()[-3000:] if log.exists() else ''}") from None
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
    """A folder for what a run writes, in RAM where that can be: a snapshot should cost a copy, not a disk."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="idletrain-contest-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _timed(bed: Bed, case: Case, entry: Entry, nodes: int, folder: Path) -> Timed:
    """Run the processes until they are done or the budget is spent.

    Raises:
        RuntimeError: they did not start, took no step, or one ended before.
    """
    snapshot_seconds = max(entry.budget_seconds / 16, 0.001) if entry.snapshot_every else 3600.0
    with Cast(bed, folder) as cast:
        stage = Stage(cast, case, entry, nodes, folder, snapshot_seconds)
        stage.open()
        for node in list(bed.names)[1:]:
            stage.start(node)
        ours = stage.method.ours
        ready = cast.output.wait("leased" if ours else "ready", 1 if ours else nodes, START_SECONDS, cast.all_alive)
        begun = ready[0]["t"] if ours else max(line["t"] for line in ready)
        counter, cores = Counter(bed), psutil.cpu_times()
        until = time.monotonic() + entry.budget_seconds
        ended = "run_ended" if ours else "done"
        while time.monotonic() < until and cast.all_alive() and not cast.output.of(ended):
            time.sleep(0.1)
        counter.close()
        cores_used = cores_shares(cores, psutil.cpu_times())
        if not cast.all_alive():
            cast.output.wait(ended, 1, LAST_LINE_SECONDS, lambda: True)
        lines = list(cast.output.lines)
    progress = progress_of(lines, ours, nodes)
    if not progress:
        raise RuntimeError(f"no step in {entry.budget_seconds:g} s")
    return Timed(begun, progress, lines, counter, cores_used)


def cores_shares(before: Any, after: Any) -> dict[str, float]:
    """What all cores did between two looks: programs, the kernel (which emulates the links, too), nothing."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields if "guest" not in name}
    whole = max(sum(spent.values()), 1e-9)
    user = spent["user"] + spent.get("nice", 0.0)
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return {"user": user / whole, "kernel": 1 - (user + idle) / whole, "idle": idle / whole}


def progress_of(lines: Sequence[Line], ours: bool, nodes: int) -> dict[int, tuple[int, float]]:
    """Steps of every node and when they were done, by a snapshot's number: idletrain's rounds, a peer's steps."""
    if not ours:
        mine = (line for line in lines if line["kind"] == "step" and line["machine"] == "n0")
        return {line["steps"]: (line["steps"], line["t"]) for line in mine}
    progress, steps = {}, 0
    for line in lines:
        if line["kind"] == "round_committed":
            steps += line["steps"]
            progress[line["round"] + 1] = steps // nodes, line["t"]
    return progress


def account(timed: Timed, ours: bool, nodes: int) -> dict[str, Any]:
    """Steps, seconds, and what of them was local work and (idletrain's) pull and push, a node's mean."""
    steps, ended = max(timed.progress.values())
    seconds = ended - timed.begun
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
    carried = timed.counter.between(timed.begun, ended)
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
    """Points `[steps, seconds, bytes over all links, accuracy]`, up to the first at the target."""
    points: list[list[float | None]] = []
    for number, file in snapshots_of(entry, folder):
        if number not in timed.progress:
            continue
        steps, when = timed.progress[number]
        accuracy = evaluate(case, file)
        points.append([steps, when - timed.begun, timed.counter.between(timed.begun, when), accuracy])
        if accuracy >= case.target:
            break
    return points


def snapshots_of(entry: Entry, folder: Path) -> list[tuple[int, Path]]:
    """What was kept, by number: idletrain's after so many rounds, a peer's after so many steps."""
    if METHODS[entry.method].ours:
        files = [m.parent / "network" for m in (folder / "bench" / "snapshots").glob("*/manifest.json")]
        return sorted((int(file.parent.name), file) for file in files if int(file.parent.name))
    return sorted((int(file.name), file) for file in (folder / "snapshots").glob("*[0-9]"))


def evaluate(case: Case, file: Path) -> float:
    """Accuracy on the test set of parameters in a file, BatchNorm's statistics estimated as idletrain does."""
    torch.manual_seed(case.seed)
    module = build(case.model)
    shapes = [p.shape for p in module.parameters()]
    size = sum(shape.numel() for shape in shapes)
    flat = torch.from_numpy(np.fromfile(file, np.float32, count=size))
    train, test = open_data(case.data)
    module = assembled(module, list(views(flat, shapes)))
    with torch.no_grad():
        estimate_statistics(module, train, case.seed)
    accuracy, _ = score(module, test, cross_entropy)
    assert accuracy is not None
    return accuracy
