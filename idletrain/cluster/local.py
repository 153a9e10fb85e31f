"""Start, warn, kill and replace worker processes on this machine; they end with the process that started them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path

from idletrain.cluster import forked_processes
from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT
from idletrain.storage import make_private, owner_only

REPLACE_SECONDS = 3.0  # pause before a lost worker is replaced: a spot request is filled no sooner
FLEET_POLL_SECONDS = 0.2
QUICK_SECONDS, QUICK_DEATHS = 10.0, 3  # so many short lives in a row are no preemptions
STOP_GRACE_SECONDS = 2.0  # from SIGTERM to SIGKILL when the fleet is stopped: by then all results are stored
LOG_LINES, LOG_BYTES = 10, 4096  # of the end of a worker's log, that say why it ended


class LocalFleet:
    """Worker processes of one scheduler.

    Args:
        scheduler: The scheduler's address.
        memory_bytes: RAM that each worker may use.
        logs: Directory for their output, one file a worker.
        name: What their names begin with; must be unique in the cluster.
        options: Further options of `idletrain worker`.
    """

    def __init__(
        self, scheduler: str, memory_bytes: int, logs: Path, name: str = "local", options: Sequence[str] = ()
    ) -> None:
        self._scheduler, self.logs, self._name = scheduler, logs, f"{name}-{os.getpid()}"
        self._options = ("--memory", str(memory_bytes), *options)
        self._processes: dict[str, forked_processes.ForkedProcess | subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count()
        self._started_at = 0.0
        make_private(logs)

    def start(self, count: int) -> Sequence[str]:
        """Start workers and return their ids at once; they join a second or two later."""
        return [self._start_one() for _ in range(count)]

    def stop(self, ids: Collection[str]) -> None:
        """Kill workers at once, ignoring unknown or dead ones."""
        self._signal(ids, signal.SIGKILL)

    def notice(self, ids: Collection[str]) -> None:
        """Notify workers that they will be taken."""
        self._signal(ids, signal.SIGTERM)

    def warn(self, ids: Collection[str]) -> None:
        """Warn workers that they may be taken soon."""
        self._signal(ids, signal.SIGUSR1)

    def alive(self) -> frozenset[str]:
        """Return the ids of workers whose processes run."""
        return frozenset(name for name, process in self._processes.items() if process.poll() is None)

    def youngest_seconds(self) -> float:
        """Return how many seconds ago the last worker was started."""
        return time.monotonic() - self._started_at

    def last_words(self) -> dict[str, str]:
        """Return the last lines of the log of each worker that ended by itself."""
        failed = [name for name, process in self._processes.items() if process.poll()]
        return {name: last_lines(self.logs / f"{name}.log") for name in failed}

    def exit_codes(self) -> dict[str, int]:
        """Return the exit code of each worker that ended by itself, and not in order or by a signal."""
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: code for name, code in codes.items() if code and code > 0}

    def pid(self, worker: str) -> int:
        """Return the process id of a worker."""
        return self._processes[worker].pid

    async def close(self) -> None:
        """End all workers: by a notice, then by force."""
        self.notice(self.alive())
        for _ in range(round(STOP_GRACE_SECONDS / FLEET_POLL_SECONDS)):
            if not self.alive():
                break
            await asyncio.sleep(FLEET_POLL_SECONDS)
        self.stop(self.alive())
        for process in self._processes.values():
            process.wait()

    def _start_one(self) -> str:
        name = f"{self._name}-{next(self._numbers)}"
        self._started_at, log = time.monotonic(), self.logs / f"{name}.log"
        with open(log, "wb", opener=owner_only):
            arguments = ("worker", self._scheduler, "--name", name, *self._options)
        self._processes[name] = forked_processes.start(arguments, log, _environment())
        return name

    def _signal(self, ids: Collection[str], number: signal.Signals) -> None:
        for name in self.alive() & frozenset(ids):
            self._processes[name].send_signal(number)


def warm_up() -> None:
    """Import meanwhile what workers will need, in the process that starts them."""
    with contextlib.suppress(OSError):  # which the first worker reports
        forked_processes.warm_up(_environment())


def _environment() -> dict[str, str]:
    """Return the environment of workers, who can import all that the head can, such as a script's own folder."""
    return {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def last_lines(log: Path) -> str:
    """Return the last lines of a worker's log.

    Raises:
        OSError: It is not on this machine.
    """
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(lines or ["(none)"])


async def keep_workers(fleet: LocalFleet, count: int, record: Callable[..., None]) -> None:
    """Start `count` workers and replace every one that is lost, a few seconds later, until cancelled.

    Args:
        fleet: The workers.
        count: How many workers to keep.
        record: Called with an event and its `reason`: `waiting` when workers cannot be kept, and a `warning` when the
            first one ends by itself.
    """
    quick, warned = 0, False
    _start(fleet, count, record)
    while True:
        await asyncio.sleep(FLEET_POLL_SECONDS)
        if not warned and (codes := fleet.exit_codes()):
            name, code = next(iter(codes.items()))
            said = f"{name} was not taken, but ended by itself with exit code {code}"
            record("warning", reason=f"{said}; {fleet.logs}/{name}.log says why, if code of the job does not")
            warned = True
        if missing := count - len(fleet.alive()):
            quick = quick + 1 if fleet.youngest_seconds() < QUICK_SECONDS else 0
            if quick == QUICK_DEATHS:
                record("waiting", reason=f"for workers: they end as soon as they start; {fleet.logs} says why")
            await asyncio.sleep(REPLACE_SECONDS)
            _start(fleet, missing, record)


def _start(fleet: LocalFleet, count: int, record: Callable[..., None]) -> None:
    try:
        fleet.start(count)
    except OSError as error:
        record("waiting", reason=f"for workers: none can be started ({error}); it is tried again")


async def churn(fleet: LocalFleet, every_seconds: float, trained: Callable[[], Awaitable[Collection[str]]]) -> None:
    """Take the oldest worker every `every_seconds`, alternately with and without a notice, until cancelled.

    Args:
        fleet: The workers.
        every_seconds: The time between two; longer while none has trained, for taking those that start shows nothing.
        trained: Returns the workers that have trained a step.
    """
    for take in _in_turn(fleet):
        await asyncio.sleep(every_seconds)
        while not (able := sorted(fleet.alive() & frozenset(await trained()), key=fleet.pid)):
            await asyncio.sleep(FLEET_POLL_SECONDS)
        take(able[:1])


def _in_turn(fleet: LocalFleet) -> Iterator[Callable[[Collection[str]], None]]:
    return itertools.cycle((fleet.notice, fleet.stop))
