"""Fork this process for each request, and make each fork the requested process.

A request is a line of JSON: to start a process, with its three open files beside it, or to send one a signal. A line
goes back when a process has started, and one when it has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from idletrain.cluster import owned_process

PR_SET_NAME = 15  # <linux/prctl.h>
HEAD_POLL_SECONDS = 0.5
REQUEST_BYTES, STREAMS = 1 << 16, 3
# Beginnings of the names of variables that are read while a process starts or modules are imported.
READ_ON_IMPORT = (
    "CUDA", "DASK", "GLIBC", "KMP", "LANG", "LC_", "LD_", "MALLOC", "MKL", "NUMBA", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
SCRATCH = "dask-scratch-space"  # in Dask's temporary directory
SET_BY_TORCH = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"})  # on import
Request = dict[str, Any]


class Left(NamedTuple):
    """The fork server that a process was left when it was forked.

    Attributes:
        pid: Its process id.
        channel: The socket from whose other end it reads requests.
        imported: What its modules were imported under.
    """

    pid: int
    channel: socket.socket
    imported: tuple[str, ...]


_left: list[Left] = []
_imported: list[tuple[str, ...]] = []  # what this process' modules were imported under, if it is a fork or forks
_exit_status: list[int] = []


@atexit.register  # before all others, and so called behind them
def _end_at_once() -> None:
    """Leave a fork's memory to the system: freeing what was imported before the fork would copy all of it."""
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


def take_left() -> Left | None:
    """Return the fork server that this process was left, the first time."""
    return _left.pop() if _left else None


def is_fork() -> bool:
    """Return whether this process is the fork of a warm parent, or one."""
    return bool(_imported)


def title(module: str, arguments: Sequence[str]) -> str:
    """Return a fork's name for ps and top, which show 15 letters: `idletrain-work` for a worker."""
    return f"idletrain-{arguments[0] if module == 'idletrain' else module.rpartition('.')[2]}"[:14]


def importable() -> list[str]:
    """Return where this process finds modules, but for its working directory, unless idletrain itself is from there.

    Left out is what comes and goes without a module: a Dask server's scratch folder, and the name that an editable
    install adds to the path.
    """
    here = {"", ".", str(Path.cwd())} - {str(Path(__file__).parents[2])}
    others = [entry for entry in dict.fromkeys(sys.path) if entry not in here and SCRATCH not in Path(entry).parts]
    return [entry for entry in others if Path(entry).exists()]


def imported_under(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what decides how modules are imported: where it is the same, processes can be forks of one parent."""
    names = {name for name in environment if name.startswith(READ_ON_IMPORT)} - SET_BY_TORCH
    read = {name: environment[name] for name in names}
    read["PYTHONPATH"] = os.pathsep.join(importable())
    return (sys.executable, *(f"{name}={value}" for name, value in sorted(read.items())))


class Requests:
    """The requests that come from a socket, and the open files that come with them."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._rest, self._files = channel, b"", list[int]()

    def read(self) -> list[Request] | None:
        """Return the whole requests that are there; None once no more can come."""
        content, files, _, _ = socket.recv_fds(self._channel, REQUEST_BYTES, STREAMS)
        self._files += files
        if not content:
            return None
        *lines, self._rest = (self._rest + content).split(b"\n")
        requests = [json.loads(line) for line in lines]
        for request in requests:
            if "module" in request:
                request["files"], self._files = self._files[:STREAMS], self._files[STREAMS:]
        return requests


def serve(head: int, channel: socket.socket) -> Request | None:
    """Start and signal forks until the head or the socket is gone; return None, or in a fork what it is to be."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    forks: dict[int, int] = {}  # process ids by number
    requests = Requests(channel)
    with selectors.DefaultSelector() as ready:
        ready.register(channel, selectors.EVENT_READ)
        ready.register(wake, selectors.EVENT_READ)
        while os.getppid() == head:
            for at, _ in ready.select(HEAD_POLL_SECONDS):
                if at.fd == wake:
                    os.read(wake, REQUEST_BYTES)
                    continue
                if (received := requests.read()) is None:
                    return None
                for number, request in enumerate(received, 1):
                    if _carry_out(request, forks, channel):
                        others = (file for later in received[number:] for file in later.get("files", ()))
                        for descriptor in (wake, woken, *others):
                            os.close(descriptor)
                        return request
            _reap(forks, channel)
    return None


def _carry_out(request: Request, forks: dict[int, int], channel: socket.socket) -> bool:
    """Send a signal or start a process; return True in that process."""
    number = request["number"]
    if "signal" in request:
        if number in forks:
            os.kill(forks[number], request["signal"])
        return False
    if not (pid := os.fork()):
        return True
    for descriptor in request["files"]:
        os.close(descriptor)
    forks[number] = pid
    _report(channel, {"number": number, "pid": pid})
    return False


def _reap(forks: dict[int, int], channel: socket.socket) -> None:
    """Report the forks that have ended."""
    for number, pid in [*forks.items()]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del forks[number]
            _report(channel, {"number": number, "status": os.waitstatus_to_exitcode(status)})


def _report(channel: socket.socket, fields: Request) -> None:
    channel.sendall(json.dumps(fields).encode() + b"\n")


def run(request: Request, parent: int) -> None:
    """Run what a request asks for in this fork; where it starts others itself, leave it a fork server of its own.

    Args:
        request: The module, its `arguments`, `environment`, `folder` and `files` (input, output and errors), the signal
            `at_parents_end`, and whether it `has_forks`.
        parent: The id of the process of which this is a fork.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if request["has_forks"]:
        own, (ours, theirs) = os.getpid(), socket.socketpair()
        if not (spare := os.fork()):  # its memory is this one's, until either writes to it
            for descriptor in (ours.detach(), *request["files"]):
                os.close(descriptor)
            owned_process.end_with_parent(own, signal.SIGKILL)
            os.setsid()
            _serve_and_run(own, theirs)
            return
        theirs.close()
        _left.append(Left(spare, ours, _imported[0]))
    _become(request, parent)
    warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        _exit_status.append(0)
    except SystemExit as end:
        _exit_status.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def begin(head: int, channel: socket.socket) -> None:
    """Serve a head's requests until it ends, from a process that has imported what its forks need."""
    _imported.append(imported_under(os.environ))
    _serve_and_run(head, channel)


def _serve_and_run(head: int, channel: socket.socket) -> None:
    """Serve a head's requests until it ends; in a fork, run what that is for."""
    own = os.getpid()
    if (request := serve(head, channel)) is not None:
        channel.close()
        run(request, own)


def _become(request: Request, parent: int) -> None:
    """Make this fork the process that a request asks for: with its environment, folder, path, files and session."""
    os.setsid()
    owned_process.end_with_parent(parent, request["at_parents_end"])
    name = title(request["module"], request["arguments"])
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    for to, descriptor in enumerate(request["files"]):
        os.dup2(descriptor, to)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"] or sys.path
    sys.argv = ["idletrain", *request["arguments"]]
    random.seed()  # Dask draws names and delays from it
