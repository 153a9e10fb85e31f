"""Heads, workers and schedulers as processes of a test, and what must hold of a run afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import waiting
import warm
import yaml

from idletrain.cluster import access, identity
from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import LeaseId
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import from_settings
from idletrain.nn.wide import label_shards
from idletrain.observe import records
from idletrain.rounds.durable import write_ahead_log
from idletrain.worker import device, encoding
from idletrain.worker.process import security_from

from . import steered

T = TypeVar("T")
Event = dict[str, Any]
TOP = Path(__file__).parents[steered.__name__.count(".")]  # where `steered` can be imported from by its full name
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5  # listing all processes of the machine takes milliseconds
PATIENCE_SECONDS = 90.0  # no test waits longer for one thing; on an idle machine all of them take a few seconds


def until(what: str, condition: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """Poll until a condition holds; returns its value."""
    began = looked_at = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < began + seconds, f"waited {seconds} s for {what}"
        waiting.rest(looked_at, POLL_SECONDS)
        looked_at = time.monotonic()
    return value


class Store(NamedTuple):
    """How to reach a head's store."""

    address: str
    connection_args: dict[str, Any]


def python_path() -> str:
    """$PYTHONPATH with the folder from which processes import `steered`."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(entries if str(TOP) in entries else [str(TOP), *entries])


class Control:
    """Steers how fast the workers of a test step (see `steered`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def pace(self, seconds: float) -> None:
        partial = self.path / "partial"
        partial.write_text(str(seconds))
        partial.replace(self.path / "pace")

    def hold(self, pid: int | None = None) -> None:
        (self.path / ("hold" if pid is None else f"hold-{pid}")).touch()

    def release_others(self) -> None:
        """All but those that are held by name."""
        (self.path / "hold").unlink()

    def release(self) -> None:
        for file in self.path.glob("hold*"):
            file.unlink()

    @property
    def environment(self) -> dict[str, str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        home = {"HOME": str(self.path)}  # whose cache is the test's own
        return {**os.environ, **threads, **home, "PYTHONPATH": python_path(), "CHAOS_CONTROL": str(self.path)}


def job_tree(
    to: Path,
    *,
    rounds: int = 4,
    subnets: int = 2,
    local_steps: int = 20,
    nodes: int = 2,
    idle_seconds: int = 600,
    **sections: Mapping[str, Any],
) -> dict[str, Any]:
    """A job as plain values: digits, an MLP of three layers, and a loss that can be slowed."""
    tree: dict[str, Any] = {
        "name": "chaos",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
        "data": {"name": "digits"},
        "training": {
            "method": "ist",
            "subnets": subnets,
            "local_steps": local_steps,
            "rounds": rounds,
            "batch_size": 32,
            "loss": f"{steered.__name__}:loss",
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        },
        "nodes": {"count": nodes, "memory": "1GiB", "idle_duration": f"{idle_seconds}s"},
        "preemption": {"progress_every": "50ms"},
        "checkpoint": {"to": str(to), "every": "1h"},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return tree


def train_alone(job: Job) -> list[str]:
    """The digest after 0, 1, ... rounds, computed here, one subnet after the other: no Dask, no store, no files."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device.make_repeatable()
    device.compute_repeatably(wanted=job.preemption.policy == "reissue")
    try:
        prepared = from_settings(job.model, job.data, job.training)
        program, training = prepared.program, prepared.program.training  # with the method that suits the model
        samples = program.source.open()
        order = batch_order(samples, training)
        network = Network.of(program, prepared.network)
        digests = [network.sha256()]
        for round_ in range(training.rounds):
            updates, phase = [], training.phase(round_)
            specs = program.specs(phase.equal_shares, phase.copies)
            for k, subnet in enumerate(program.subnets(round_, specs)):
                pulled = encoding.decode_pull(
                    program, subnet, encoding.encode_pull(program, subnet, network.pull(subnet))
                )
                flat = torch.zeros(program.buffer_size(subnet, persistent=False))  # untravelled state begins at 0
                flat[: len(pulled)] = pulled
                flat = flat.to(device.device_for(program))
                work = LocalSteps(program, subnet, flat, k, round_)
                if program.output:
                    order = label_shards.open_output(
                        program, work.module, subnet, samples, flat, label_shards.ShardPlace(round_, k)
                    )
                for step in range(phase.local_steps):
                    work.step(samples, order, step)
                trained = flat[: len(pulled)].cpu()
                if coder := encoding.codec(program, subnet, "push"):
                    lease = LeaseId(job.name, 1, round_, k, 1)
                    content = encoding.encode_update(program, subnet, trained, pulled, lease)
                    trained = coder.decode(content, network.pull(subnet))
                updates.append((subnet, trained, phase.local_steps))
            network.commit(updates)
            digests.append(network.sha256())
        return digests
    finally:
        torch.set_num_threads(threads)


class Process:
    """A child process whose whole family can be found and ended; a fork of a warm parent, unless that is not wanted."""

    def __init__(
        self,
        command: Iterable[str | Path],
        environment: Mapping[str, str],
        output: Path,
        cwd: Path,
        *,
        forked: bool = True,
    ) -> None:
        self.output = output
        self._command = [str(part) for part in command]
        self._popen = (warm.start if forked else warm.execute)(self._command, environment, output, cwd)
        self.pid = self._popen.pid
        self.family: dict[int, psutil.Process] = {self.pid: psutil.Process(self.pid)}

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def look(self) -> None:
        """Remember the processes that it has started by now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.family.setdefault(child.pid, child)

    def survivors(self) -> list[psutil.Process]:
        """Those of its family that still run."""
        self.look()
        self._popen.poll()
        return [p for p in self.family.values() if runs(p)]

    def send(self, number: signal.Signals) -> None:
        self.look()
        self._popen.send_signal(number)

    def exit_code(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + seconds
        while self.running:
            assert time.monotonic() < deadline, f"{self._command} did not end within {seconds} s:\n{self.text}"
            self.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(LOOK_SECONDS)
        assert self._popen.returncode is not None
        return self._popen.returncode

    def destroy(self) -> None:
        for process in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()


class Run:
    """A run directory as a test sees it from outside, and the heads that work on it."""

    def __init__(self, tree: dict[str, Any], control: Control, scratch: Path, started: list[Process]) -> None:
        self.tree, self.control, self.scratch, self._started = tree, control, scratch, started
        self.job = parse_job(tree)
        self.dir = self.job.run_dir
        self.file = scratch / f"job-{time.monotonic_ns()}.yaml"
        self.file.write_text(yaml.safe_dump(tree))

    def launch(self, *arguments: str, forked: bool = True) -> Process:
        """`idletrain launch` with the real command line."""
        return self._start([sys.executable, "-m", "idletrain", "launch", self.file, *arguments], forked=forked)

    def launch_until(self, point: str, nth: int = 1, **options: Any) -> Process:
        """A head that kills itself at a point around a durable write."""
        crash = json.dumps({"point": point, "nth": nth, **options})
        return self._start([sys.executable, "-m", f"{__package__}.head", self.file, crash])

    def resume(self, *arguments: str) -> None:
        """Go on to the end."""
        head = self.launch("--resume", *arguments)
        assert head.exit_code() == 0, head.text

    def _start(self, command: list[str | Path], *, forked: bool = True) -> Process:
        output = self.scratch / f"head-{len(self._started)}.log"
        head = Process(command, self.control.environment, output, self.scratch, forked=forked)
        self._started.append(head)
        return head

    def events(self, *kinds: str) -> list[Event]:
        """The events so far, of these kinds or of all."""
        with contextlib.suppress(FileNotFoundError):
            read = list(records.read_records(self.dir / "events.jsonl"))  # a full disk tears a line
            return [event for event in read if not kinds or event["kind"] in kinds]
        return []

    def wait(self, what: str, kind: str, where: Callable[[Event], bool] = lambda _: True, count: int = 1) -> Event:
        """Wait for `count` such events; returns the last of them."""

        def seen() -> list[Event]:
            matching = [event for event in self.events(kind) if where(event)]
            return matching[count - 1 : count]

        return until(what, seen)[0]

    def records(self, *kinds: str) -> list[write_ahead_log.LogRecord]:
        """The ledger's records; reading verifies it."""
        return [r for r in write_ahead_log.read(self.dir / "wal").records if not kinds or r["kind"] in kinds]

    def workers(self) -> dict[str, psutil.Process]:
        """The processes of the workers that joined and did not leave, by address."""
        there: dict[str, int] = {}
        for event in self.events("worker_joined", "worker_left", "run_started"):
            if event["kind"] == "run_started":
                there = {}
            elif event["kind"] == "worker_joined":
                there[event["worker"]] = event["pid"]
            else:
                there.pop(event["worker"], None)
        matching = {}
        for address, pid in there.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                matching[address] = psutil.Process(pid)
        return matching

    def causes_of_loss(self) -> set[str]:
        """Return why leases were lost, but for those that a backup overtook: a busy machine has slow workers."""
        return {event["cause"] for event in self.events("lost")} - {"overtaken"}

    def busy(self) -> dict[str, Event]:
        """The oldest open lease of each worker of the newest head: what it trains."""
        leases: dict[int, Event] = {}
        for event in self.events("leased", "attempt_ended", "run_started"):
            if event["kind"] == "run_started":
                leases = {}
            elif event["kind"] == "leased":
                leases[event["attempt"]] = event
            else:
                leases.pop(event["attempt"], None)
        return {event["worker"]: event for event in reversed(leases.values())}

    def lease_id(self, leased: Event) -> LeaseId:
        epoch = self.records("epoch")[-1]["epoch"]
        return LeaseId(self.job.name, epoch, leased["round"], leased["subnet"], leased["attempt"])

    def store(self, head: Process) -> Store:
        """The head's store, which has its only listening socket, as the run's own user reaches it."""
        sockets = psutil.Process(head.pid).net_connections(kind="tcp")
        (listening,) = [s.laddr for s in sockets if s.status == psutil.CONN_LISTEN]
        folder = access.folder_of(self.dir)
        if not folder.is_dir():  # its workers are those of a scheduler of the user's
            return Store(f"tcp://{listening.ip}:{listening.port}", {})
        security = security_from(*(folder / file for file in identity.OPTIONS))
        return Store(f"tls://{listening.ip}:{listening.port}", security.get_connection_args("worker"))

    def check(
        self, digests: list[str] | None, status: str = "completed", *, damaged: bool = False
    ) -> write_ahead_log.LogRecord:
        """What must hold of every run that was disturbed, or whose files were: returns the ledger's last record."""
        end = check_log(self.dir / "wal", self.job, damaged=damaged)
        assert end["status"] == status
        if digests is not None:
            assert end["params_sha256"] == digests[end["rounds"]]
        return end


def check_log(path: Path, job: Job, *, damaged: bool = False) -> write_ahead_log.LogRecord:
    """What must hold of every ledger, also of one that goes on from an earlier snapshot: returns its last record.

    Where a file was damaged, a later head may have had an update of its own trained again.
    """
    log = write_ahead_log.read(path)
    assert not log.damage
    epochs: list[int] = []
    staged: dict[tuple[int, int], int] = {}  # epochs by round and subnet
    reached = 0
    for record in log.records:
        kind, round_ = record["kind"], record.get("round", 0)
        if kind == "epoch":
            epochs.append(record["epoch"])
            staged = {at: epoch for at, epoch in staged.items() if at[0] != round_} if record["drop"] else staged
        elif kind == "stage":
            at = round_, record["subnet"]
            assert at not in staged or (damaged and staged[at] < epochs[-1]), "staged twice"
            staged[at] = epochs[-1]
        elif kind == "restored":
            reached, staged = round_, {at: epoch for at, epoch in staged.items() if at[0] < round_}
        elif kind == "commit":
            assert round_ == reached
            check_commit(record, staged.keys(), job)
            reached += 1
    end = log.records[-1]
    assert end["kind"] == "end"
    assert end["rounds"] == reached
    assert epochs == sorted(set(epochs))
    return end


def check_commit(commit: write_ahead_log.LogRecord, staged: Collection[tuple[int, int]], job: Job) -> None:
    subnets = [k for k, _ in commit["staged"]]
    assert len(set(subnets)) == len(subnets)
    assert {(commit["round"], k) for k in subnets} <= {*staged}
    if job.preemption.policy == "reissue":
        phase = job.training.phase(commit["round"])
        assert commit["staged"] == [[k, phase.local_steps] for k in range(phase.subnets)]


class Cluster:
    """A stock Dask scheduler, and workers that a test starts one by one."""

    def __init__(self, control: Control, scratch: Path, started: list[Process]) -> None:
        self._control, self._scratch, self._started = control, scratch, started
        self.scheduler = self._start(
            [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"],
            forked=False,  # it has no torch
        )
        self.address = until("the scheduler's address", self._address)

    def dask_worker(self, *arguments: str) -> Process:
        command = [
            sys.executable,
            "-m",
            "dask",
            "worker",
            self.address,
            "--nthreads",
            "1",
            "--no-dashboard",
            *arguments,
        ]
        return self._start(command)

    def idletrain_worker(self, *arguments: str) -> Process:
        return self._start([sys.executable, "-m", "idletrain", "worker", self.address, *arguments])

    def script(self, path: Path) -> Process:
        return self._start([sys.executable, path, self.address])

    def _start(self, command: list[str | Path], *, forked: bool = True) -> Process:
        output = self._scratch / f"process-{len(self._started)}.log"
        started = Process(command, self._control.environment, output, self._scratch, forked=forked)
        self._started.append(started)
        return started

    def _address(self) -> str | None:
        assert self.scheduler.running, self.scheduler.text
        addresses = [line.split()[-1] for line in self.scheduler.text.splitlines() if "Scheduler at:" in line]
        return addresses[0] if addresses else None


def ask_store(store: Store, ask: Callable[[StoreClient], Awaitable[T]]) -> T:
    """Talk to a store as a worker would."""

    async def talk() -> T:
        client = StoreClient(*store)
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(talk())


def await_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until none of them runs."""
    waiting = list(processes)
    until(f"the end of {waiting}", lambda: not [p for p in waiting if runs(p)], seconds)


def runs(process: psutil.Process) -> bool:
    """Neither gone, nor a zombie, nor gone while this looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def destroy_all(started: list[Process]) -> None:
    for process in started:
        process.destroy()


@contextlib.contextmanager
def tmpfs(at: Path, size: str) -> Iterator[Path]:
    """A small file system of its own."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
