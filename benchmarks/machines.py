"""The machines of a comparison and their processes: a testbed's, or this one for all; what links and cores did.

A testbed's machines are network namespaces with shaped links (`infra/testbed`); unshaped, they are plain processes on
loopback. Machine number k is pinned to core k modulo cores, the head is number 0, every process computes on one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).parent.parent
COUNT_SECONDS = 0.5  # one reading costs a process of some 5 ms
START_SECONDS = 120.0  # until every machine of a run has started: eight interpreters that import torch on two cores
LAST_LINE_SECONDS = 2.0  # from a process' end until what it printed has been read
Line = dict[str, Any]


class Bed(Protocol):
    """Machines: the part of a testbed that is needed here."""

    @property
    def names(self) -> Sequence[str]: ...

    def address(self, node: str) -> str: ...

    def popen(self, node: str, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[bytes]: ...

    def carried_bytes(self) -> int | None:
        """Return the bytes that all machines received so far, or None where nobody counts."""


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
def machines(nodes: int, link: str, head_link: str | None = None, **faults: Any) -> Iterator[Bed]:
    """Yield machines with links of a rate such as `100mbit`; `none` is loopback.

    `faults` are the links' `loss`, `delay`, `queue` and `congestion` control as a testbed takes them.

    Raises:
        RuntimeError: links cannot be shaped here; it says what is missing.
    """
    if link == "none":
        yield Loopback(nodes)
        return
    import idletrain_testbed

    if missing := idletrain_testbed.missing():
        raise RuntimeError(f"links cannot be shaped here: {'; '.join(missing)}; use --link none")
    with idletrain_testbed.Testbed(nodes=nodes, link=link, head_link=head_link, **faults) as bed:
        yield Shaped(bed)


class Output:
    """The lines that processes print, as they arrive."""

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

    def of(self, kind: str, machine: str = "") -> list[Line]:
        """Return the lines of a kind so far, of one machine or of all."""
        return [line for line in list(self.lines) if line["kind"] == kind and machine in ("", line["machine"])]

    def wait(self, kind: str, count: int, seconds: float, alive: Callable[[], bool], machine: str = "") -> list[Line]:
        """Wait for lines of a kind.

        Raises:
            RuntimeError: they do not come, or a process ended before.
        """
        until = time.monotonic() + seconds
        with self._arrived:
            while len(self.of(kind, machine)) < count:
                if time.monotonic() > until or not alive():
                    raise RuntimeError(f"{count} times {kind!r} did not come")
                self._arrived.wait(0.2)
        return self.of(kind, machine)

    def close(self) -> None:
        """Read what ended processes still had to say."""
        for reader in self._readers:
            reader.join(LAST_LINE_SECONDS)


def print_line(line: Line) -> None:
    """Print a JSON line for the process that started this one."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Cast:
    """The processes of one run; they are ended, by their ids, when the context ends."""

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
        """Kill a machine's processes at once, as the machine's end would: all of its session."""
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
    """Kill every process of a session that we started with SIGKILL: helpers that it made go with it.

    Args:
        leader: The process id of the session's first process; 0 for one that could not be started.
    """
    if leader <= 0:  # which would be our own
        return
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and int(stat.parent.name) != leader:
                os.kill(int(stat.parent.name), 9)
    with contextlib.suppress(ProcessLookupError):
        os.kill(leader, 9)


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Counter:
    """Samples of the bytes over all links, taken on a thread."""

    def __init__(self, bed: Bed) -> None:
        self._bed, self._ended = bed, threading.Event()
        self.samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        last = False  # one reading behind the end
        while (carried := self._bed.carried_bytes()) is not None:
            self.samples.append((time.time(), carried))
            if last:
                return
            last = self._ended.wait(COUNT_SECONDS)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start: float, end: float) -> float | None:
        """Return the bytes from one time to another."""
        if not self.samples:
            return None
        times, values = zip(*self.samples, strict=True)
        return float(np.interp(end, times, values) - np.interp(start, times, values))


def cores_shares(before: Any, after: Any) -> dict[str, float]:
    """Return the shares of all cores between two readings: programs, the kernel (which emulates links, too), idle."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields if "guest" not in name}
    whole = max(sum(spent.values()), 1e-9)
    user = spent["user"] + spent.get("nice", 0.0)
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return {"user": user / whole, "kernel": 1 - (user + idle) / whole, "idle": idle / whole}
