"""Start processes as forks of a warm parent: in a tenth of a second instead of three.

A warm parent (`warm_parent`) has imported all that they need. One serves all workers of this process and ends with it,
or `IDLE_SECONDS` after the last of them. A fork that starts others itself has been left a warm parent of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from idletrain.cluster import fork_server, owned_process, warm_parent

IDLE_SECONDS = 60.0  # that it waits for another process to start, as a notebook's next `fit` does
UNUSED_SECONDS = 300.0  # that it waits for the first one: a cloud's head may still boot
WORKER_ENVIRONMENT = {
    # One thread a worker: the fleet fills the cores, and bits depend on the number of threads.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc keeps freed gradients in its heap; mapped one by one they go back to the machine (benchmarks/memory.py:
    # 3.5 times a subnet's parameters at the peak instead of 6.0, measured side by side), and in huge pages mapping
    # costs a step nothing. Setting that threshold fixes the other one, above which free memory at the heap's end goes
    # back, at 128 KiB: every step of a convolutional network would map its activations again. So 64 MiB are kept.
    "GLIBC_TUNABLES": (
        f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={8 << 20}:glibc.malloc.trim_threshold={64 << 20}"
    ),
}
Request = dict[str, Any]


class Parent(Protocol):
    """A warm parent's process."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Spare:
    """The process of a warm parent that was left to this one when it was forked.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        with contextlib.suppress(ChildProcessError):  # another thread has waited
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return -int(signal.SIGKILL)


class ForkedProcess:
    """A process: like a `subprocess.Popen`, but a child of the warm parent.

    Args:
        send: Sends the warm parent a request about it.
        log: Its output.

    Attributes:
        returncode: Its exit status, or minus the signal that ended it; None while it runs.
    """

    def __init__(self, send: Callable[[Request], None], log: Path) -> None:
        self._send, self.log = send, log
        self.returncode: int | None = None
        self._pid = 0
        self._has_started, self._has_ended = threading.Event(), threading.Event()

    @property
    def pid(self) -> int:
        """Its process id; waits until the warm parent has started it."""
        self._has_started.wait()
        return self._pid

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.log), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, once it has started."""
        if self.returncode is None:
            self._send({"signal": int(number)})

    def kill(self) -> None:
        """Kill it, once it has started."""
        self.send_signal(signal.SIGKILL)

    def started(self, pid: int) -> None:
        """Take note of its process id."""
        self._pid = pid
        self._has_started.set()

    def ended(self, status: int) -> None:
        """Take note of its exit status."""
        self.returncode = status
        self._has_started.set()
        self._has_ended.set()


class WarmParent:
    """A warm parent, as the head sees it.

    Args:
        process: Its process.
        channel: The other end of the socket from which it reads requests.
        errors: What it says when it cannot run; None if nothing.
        lasting: Whether it stays without forks until it is closed.
    """

    def __init__(
        self, process: Parent, channel: socket.socket, errors: IO[bytes] | None = None, *, lasting: bool = False
    ) -> None:
        self._process, self._channel, self._errors = process, channel, errors
        self._forks: dict[int, ForkedProcess] = {}
        self._lock, self._count, self._last_end = threading.Lock(), 0, time.monotonic()
        self._is_open, self._lasting = True, lasting
        self._end: tuple[int, bytes] | None = None  # exit status and what it said
        threading.Thread(target=self._read, daemon=True).start()
        self._end_later(UNUSED_SECONDS)

    @property
    def can_start(self) -> bool:
        """Whether it runs and is to go on."""
        return self._end is None and self._is_open

    def start(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        module: str = "idletrain",
        folder: Path | None = None,
        path: Sequence[str] | None = None,
        files: Sequence[int] = (),
        at_parents_end: signal.Signals = signal.SIGKILL,
        has_forks: bool = False,
    ) -> ForkedProcess:
        """Start a process.

        Args:
            arguments: Of its module.
            log: A file for its output.
            environment: All of its variables.
            module: What it runs.
            folder: Its working directory; None for this process'.
            path: Where it looks for modules; None for where the warm parent does.
            files: Its input, output and errors; by default none, and the log.
            at_parents_end: The signal that it gets when the warm parent ends.
            has_forks: Leave it a warm parent of its own.
        """
        with self._lock:
            self._count += 1
            number, end = self._count, self._end
            process = ForkedProcess(lambda request: self._send({"number": number, **request}), log)
            if end is None:
                self._forks[number] = process
        if end is not None:
            _end(process, end)
            return process
        where = {"folder": str(folder or Path.cwd()), "path": path}
        what = {"module": module, "arguments": [*arguments], "environment": dict(environment), **where}
        how = {"at_parents_end": int(at_parents_end), "has_forks": has_forks}
        with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
            default = (nothing.fileno(), output.fileno(), output.fileno())
            self._send({"number": number, **what, **how}, files or default)
        return process

    def _send(self, request: Request, files: Sequence[int] = ()) -> None:
        """Write a request; what a process that has ended does not read, `_read` answers."""
        content = json.dumps(request).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._channel.sendall(content[socket.send_fds(self._channel, [content], files) :])

    def _read(self) -> None:
        """Take note of what the process reports, until it has ended; then all of its forks have."""
        with contextlib.suppress(OSError, ValueError), self._channel.makefile("rb") as reports:
            for line in reports:
                report = json.loads(line)
                if "pid" in report:
                    self._forks[report["number"]].started(report["pid"])
                else:
                    self._forget(report["number"]).ended(report["status"])
        self._process.kill()  # where it writes what it should not
        status, said = self._process.wait(), b""
        if self._errors:
            with self._errors:
                self._errors.seek(0)
                said = self._errors.read()
        end = status or -int(signal.SIGKILL), said
        with self._lock:
            self._end, left = end, [*self._forks.values()]
            self._channel.close()
        for process in left:
            _end(process, end)

    def _forget(self, number: int) -> ForkedProcess:
        """Return a fork that has ended; after the last one wait for another to start."""
        with self._lock:
            process, self._last_end = self._forks.pop(number), time.monotonic()
        if not self._forks:
            self._end_later(IDLE_SECONDS)
        return process

    def _end_later(self, seconds: float) -> None:
        """End the process if it has no fork for so long, unless it is a lasting one."""
        if self._lasting:
            return
        timer = threading.Timer(seconds, self._end_if_idle, (seconds,))
        timer.daemon = True
        timer.start()

    def _end_if_idle(self, seconds: float) -> None:
        with _choosing, self._lock, contextlib.suppress(OSError):
            if not self._forks and time.monotonic() - self._last_end >= seconds:
                self._is_open = False
                self._channel.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process, and its forks with it."""
        self._process.kill()
        self._process.wait()


def _end(process: ForkedProcess, end: tuple[int, bytes]) -> None:
    """End a process whose parent has ended, and leave what that said in its log."""
    status, said = end
    with contextlib.suppress(OSError), process.log.open("ab") as log:
        log.write(said)
    process.ended(status)


_parents: dict[tuple[str, ...], WarmParent] = {}
_choosing = threading.Lock()


@atexit.register
def _close() -> None:
    for parent in _parents.values():
        parent.close()


def _forget() -> None:
    _parents.clear()


os.register_at_fork(after_in_child=_forget)  # they are children of another process


def start_parent(environment: Mapping[str, str], modules: Sequence[str] = (), *, lasting: bool = False) -> WarmParent:
    """Start a warm parent that imports meanwhile what processes with these variables will need.

    Args:
        environment: All of its variables; those of workers are added.
        modules: What it imports beside what a worker needs.
        lasting: Whether it stays without forks until it is closed.

    Raises:
        OSError: it cannot be started.
    """
    path = {"PYTHONPATH": os.pathsep.join(fork_server.importable())}
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            warm_parent.command(modules),
            stdin=theirs.fileno(), stdout=errors, stderr=errors,
            env={**environment, **WORKER_ENVIRONMENT, **path}, start_new_session=True,
        )  # fmt: skip
    return WarmParent(process, ours, errors, lasting=lasting)


def start(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    output: int | None = None,
    at_parents_end: signal.Signals = signal.SIGKILL,
    has_forks: bool = False,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Run `idletrain` in a process that ends with this one, as a fork of a warm parent, which is started if need be.

    Only on Linux: on macOS a process may not go on as a fork once its libraries have used the system's frameworks.

    Args:
        arguments: Of `idletrain`.
        log: A file for its output and its errors.
        environment: All of its variables.
        output: An open file for its output alone; None for the log.
        at_parents_end: The signal that it gets when this process ends.
        has_forks: Leave it a warm parent of its own, as it starts such processes itself.

    Raises:
        OSError: no process can be started.
    """
    with log.open("ab") as errors, Path(os.devnull).open("rb") as nothing:
        printed = errors.fileno() if output is None else output
        if sys.platform != "linux":
            command = owned_process.command("idletrain", *arguments, number=at_parents_end)
            return subprocess.Popen(
                command, stdin=nothing, stdout=printed, stderr=errors, env=environment, start_new_session=True
            )
        with _choosing:
            return _parent(environment).start(
                arguments,
                log,
                environment,
                path=sys.path,
                files=(nothing.fileno(), printed, errors.fileno()),
                at_parents_end=at_parents_end,
                has_forks=has_forks,
            )


class Piped(NamedTuple):
    """A process whose input and output are pipes of this one."""

    process: ForkedProcess | subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]


def piped(module: str, errors: int) -> Piped:
    """Run a module in a process that ends with this one: as a fork, where a warm parent is there already.

    Args:
        module: The module, run as `python -m` does.
        errors: An open file for what it says beside its output.
    """
    with _choosing:
        if sys.platform != "linux" or not (parent := _there(os.environ)):
            process = subprocess.Popen(
                owned_process.command(module),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            return Piped(process, process.stdin, process.stdout)
        (given, stdin), (stdout, printed) = os.pipe(), os.pipe()
        files = (given, printed, errors)
        fork = parent.start((), Path(os.devnull), os.environ, module=module, path=sys.path, files=files)
        for descriptor in (given, printed):
            os.close(descriptor)
        return Piped(fork, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))


def warm_up(environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
    """Have a warm parent import meanwhile what processes with these variables will need.

    Args:
        environment: Their variables.
        modules: What they import beside what a worker needs.

    Raises:
        OSError: no process can be started.
    """
    if sys.platform == "linux":
        with _choosing:
            _parent(environment, modules)


def _parent(environment: Mapping[str, str], modules: Sequence[str] = ()) -> WarmParent:
    """Return the warm parent of processes with these variables, which is started if need be."""
    if parent := _there(environment):
        return parent
    parent = start_parent(environment, modules)
    _parents[_key(environment)] = parent
    return parent


def _there(environment: Mapping[str, str]) -> WarmParent | None:
    """Return the warm parent of processes with these variables, if there is one."""
    if left := fork_server.take_left():
        _parents[left.imported] = WarmParent(Spare(left.pid), left.channel)
    parent = _parents.get(_key(environment))
    return parent if parent and parent.can_start else None


def _key(environment: Mapping[str, str]) -> tuple[str, ...]:
    return fork_server.imported_under({**environment, **WORKER_ENVIRONMENT})
