"""Start worker processes as forks of a warm parent: in a tenth of a second instead of three.

A warm parent (`warm_parent`) has imported all that a worker needs. One serves all workers of this process and ends with
it, or `IDLE_SECONDS` after the last of them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from idletrain.cluster import owned_process, warm_parent

IDLE_SECONDS = 10.0  # that it waits for another worker to start, as a notebook's next `fit` does
UNUSED_SECONDS = 300.0  # that it waits for the first one: a cloud's head may still boot
# Beginnings of the names of variables that are read while a process starts or modules are imported.
READ_ON_IMPORT = (
    "CUDA", "DASK", "GLIBC", "HOME", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NUMBA", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH", "XDG",
)  # fmt: skip
Request = dict[str, Any]


class ForkedWorker:
    """A worker process: like a `subprocess.Popen`, but a child of the warm parent.

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

    def wait(self) -> int | None:
        """Wait until it has ended; return its exit status."""
        self._has_ended.wait()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, once it has started."""
        if self.returncode is None:
            self._send({"signal": int(number)})

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
        environment: Its environment, of which workers keep what is read on import.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        self._process = subprocess.Popen(
            warm_parent.command(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._reports = self._process.stdin, self._process.stdout
        self._workers: dict[int, ForkedWorker] = {}
        self._lock, self._count, self._last_end = threading.Lock(), 0, time.monotonic()
        self._end: tuple[int, bytes] | None = None  # exit status and what it said
        threading.Thread(target=self._read, daemon=True).start()
        self._end_later(UNUSED_SECONDS)

    @property
    def can_start(self) -> bool:
        """Whether it runs and is to go on."""
        return self._end is None and not self._requests.closed

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedWorker:
        """Start a worker; see `start`."""
        with self._lock:
            self._count += 1
            number, end = self._count, self._end
            worker = ForkedWorker(lambda request: self._send({"worker": number, **request}), log)
            if end is None:
                self._workers[number] = worker
        if end is not None:
            _end(worker, end)
            return worker
        place = {"log": str(log), "folder": str(Path.cwd()), "path": sys.path}
        self._send({"worker": number, "arguments": [*arguments], "environment": dict(environment), **place})
        return worker

    def _send(self, request: Request) -> None:
        """Write a request; what a process that has ended does not read, `_read` answers."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def _read(self) -> None:
        """Take note of what the process reports, until it has ended; then all of its workers have."""
        with contextlib.suppress(ValueError):
            for line in self._reports:
                report = json.loads(line)
                if "pid" in report:
                    self._workers[report["worker"]].started(report["pid"])
                else:
                    self._forget(report["worker"]).ended(report["status"])
        self._process.kill()  # where it writes what it should not
        status = self._process.wait()
        self._errors.seek(0)
        end = status or -int(signal.SIGKILL), self._errors.read()
        with self._lock:
            self._end, left = end, [*self._workers.values()]
            for file in (self._reports, self._errors):
                file.close()
            with contextlib.suppress(OSError):  # what it has not read
                self._requests.close()
        for worker in left:
            _end(worker, end)

    def _forget(self, number: int) -> ForkedWorker:
        """Return a worker that has ended; after the last one wait for another to start."""
        with self._lock:
            worker, self._last_end = self._workers.pop(number), time.monotonic()
        if not self._workers:
            self._end_later(IDLE_SECONDS)
        return worker

    def _end_later(self, seconds: float) -> None:
        """End the process if it has no worker for so long."""
        timer = threading.Timer(seconds, self._end_if_idle, (seconds,))
        timer.daemon = True
        timer.start()

    def _end_if_idle(self, seconds: float) -> None:
        with _choosing, self._lock, contextlib.suppress(OSError):
            if not self._workers and time.monotonic() - self._last_end >= seconds:
                self._requests.close()

    def close(self) -> None:
        """End the process, and its workers with it."""
        self._process.kill()
        self._process.wait()


def _end(worker: ForkedWorker, end: tuple[int, bytes]) -> None:
    """End a worker whose parent has ended, and leave what that said in its log."""
    status, said = end
    with contextlib.suppress(OSError), worker.log.open("ab") as log:
        log.write(said)
    worker.ended(status)


_parents: dict[tuple[Any, ...], WarmParent] = {}
_choosing = threading.Lock()


@atexit.register
def _close() -> None:
    for parent in _parents.values():
        parent.close()


def _forget() -> None:
    _parents.clear()


os.register_at_fork(after_in_child=_forget)  # they are children of another process


def start(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> ForkedWorker | subprocess.Popen[bytes]:
    """Run `idletrain` in a process that ends with this one, as a fork of a warm parent, which is started if need be.

    Only on Linux: on macOS a process may not go on as a fork once its libraries have used the system's frameworks.

    Args:
        arguments: Of `idletrain`.
        log: An existing file for its output.
        environment: All of its variables.

    Raises:
        OSError: no process can be started.
    """
    if sys.platform != "linux":
        command = owned_process.command("idletrain", *arguments)
        with log.open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
    with _choosing:
        return _parent(environment).start(arguments, log, environment)


def warm_up(environment: Mapping[str, str]) -> None:
    """Have a warm parent import meanwhile what workers with these variables will need.

    Raises:
        OSError: no process can be started.
    """
    if sys.platform == "linux":
        with _choosing:
            _parent(environment)


def _parent(environment: Mapping[str, str]) -> WarmParent:
    here = {"", ".", str(Path.cwd())}  # whose modules are imported by the worker alone
    own = {**environment, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry not in here)}
    key = (sys.executable, *sorted(item for item in own.items() if item[0].startswith(READ_ON_IMPORT)))
    if key not in _parents or not _parents[key].can_start:
        _parents[key] = WarmParent(own)
    return _parents[key]
