"""Import all that a worker needs, then fork a worker for each request: it starts in a tenth of a second, not in three.

python -P -m idletrain.cluster.warm_parent HEAD

HEAD is the id of the process that starts it. It reads requests from its input, a line of JSON each: to start a worker,
or to send one a signal. It writes a line when a worker has started, and when one has ended. It ends with HEAD or when
its input closes, and its workers end with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import sys
import threading
from typing import Any

from idletrain.cluster import owned_process

PR_SET_NAME = 15  # <linux/prctl.h>
PRELOADED = ("idletrain.cli.main", "idletrain.worker.process", "idletrain.worker.tasks")
HEAD_POLL_SECONDS = 0.5
TITLE = "idletrain-work"  # of a worker, as ps and top name it; at most 15 letters
Request = dict[str, Any]


def command() -> list[str]:
    """Return the command line that starts one from this process."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid())]


def serve(head: int) -> Request | None:
    """Start and signal workers until the head or its input is gone; return None, or in a worker what it is to run."""
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    workers: dict[int, int] = {}  # process ids by number
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(0, selectors.EVENT_READ)
        ready.register(wake, selectors.EVENT_READ)
        while os.getppid() == head:
            for at, _ in ready.select(HEAD_POLL_SECONDS):
                content = os.read(at.fd, 1 << 16)
                if at.fd == wake:
                    continue
                if not content:
                    return None
                *lines, rest = (rest + content).split(b"\n")
                for line in lines:
                    if _carry_out(request := json.loads(line), workers):
                        os.close(wake)
                        os.close(woken)
                        return dict(request)
            _reap(workers)
    return None


def _carry_out(request: Request, workers: dict[int, int]) -> bool:
    """Send a signal or start a worker; return True in that worker."""
    number = request["worker"]
    if "signal" in request:
        if number in workers:
            os.kill(workers[number], request["signal"])
        return False
    pid = os.fork()
    if pid:
        workers[number] = pid
        _report({"worker": number, "pid": pid})
    return not pid


def _reap(workers: dict[int, int]) -> None:
    """Report the workers that have ended."""
    for number, pid in [*workers.items()]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del workers[number]
            _report({"worker": number, "status": os.waitstatus_to_exitcode(status)})


def _report(fields: Request) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")


def become(request: Request, parent: int) -> None:
    """Make this fork the process that a request asks for: with its environment, folder, path, output and session."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    owned_process.end_with_parent(parent, signal.SIGKILL)
    ctypes.CDLL(None).prctl(PR_SET_NAME, TITLE.encode(), 0, 0, 0)
    output, nothing = os.open(request["log"], os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for to, descriptor in ((0, nothing), (1, output), (2, output)):
        os.dup2(descriptor, to)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[:] = request["path"]
    sys.argv = ["idletrain", *request["arguments"]]
    random.seed()  # Dask draws names and delays from it


def _watch(head: int, imported: threading.Event) -> None:
    """End this process with the head while it imports, which takes seconds."""
    while not imported.wait(HEAD_POLL_SECONDS):
        if os.getppid() != head:
            os._exit(1)


def main() -> None:
    """Import what workers need, then serve; in a worker, run it."""
    head, own, imported = int(sys.argv[1]), os.getpid(), threading.Event()
    watching = threading.Thread(target=_watch, args=(head, imported))
    watching.start()
    for name in PRELOADED:
        importlib.import_module(name)
    imported.set()
    watching.join()  # a fork has no threads but its own
    if (request := serve(head)) is not None:
        become(request, own)
        runpy.run_module("idletrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
