"""Import all that our processes need, then fork one for each request: it starts in a tenth of a second, not in three.

python -P -m idletrain.cluster.warm_parent HEAD [MODULE...]

HEAD is the id of the process that starts it, and the modules are imported beside a worker's. It reads requests from a
socket that is its input, a line of JSON each: to start a process, or to send one a signal. It writes a line when a
process has started, and when one has ended. It ends with HEAD or when the socket closes, and its forks with it.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import threading
from collections.abc import Sequence

from idletrain.cluster import fork_server

PRELOADED = ("idletrain.cli.main", "idletrain.worker.process", "idletrain.worker.tasks")


def command(modules: Sequence[str] = ()) -> list[str]:
    """Return the command line that starts one from this process."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *modules]


def _watch(head: int, imported: threading.Event) -> None:
    """End this process with the head while it imports, which takes seconds."""
    while not imported.wait(fork_server.HEAD_POLL_SECONDS):
        if os.getppid() != head:
            os._exit(1)


def main() -> None:
    """Import what forks need, then serve."""
    head, imported = int(sys.argv[1]), threading.Event()
    watching = threading.Thread(target=_watch, args=(head, imported))
    watching.start()
    try:
        for name in (*PRELOADED, *sys.argv[2:]):
            importlib.import_module(name)
    finally:  # where one cannot be imported, this process ends and says why
        imported.set()
    gc.freeze()  # else a fork's first collection would copy all of it
    watching.join()  # a fork has no threads but its own
    os.chdir("/")
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fork_server.begin(head, channel)


if __name__ == "__main__":
    main()
