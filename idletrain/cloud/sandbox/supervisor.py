"""Run one machine's user data and clean up everything that it started. A program of its own, stdlib only:

python -I -S supervisor.py DIRECTORY [COMMAND...]

It ends the machine when the command ends, or when standard input, a pipe held by the sandbox, is closed, as happens
when the sandbox is killed. It kills the machine's processes even outside its process group, and deletes its directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>: orphans below us become our children
REAP_SECONDS = 0.002  # about as long as a killed process takes to end


def family() -> dict[int, list[int]]:
    """Return the ids of all processes of this computer by parent, zombies included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    """Return the ids of all direct and indirect children of a process."""
    pids = list(children.get(root, ()))
    for pid in pids:  # grows while it is walked
        pids.extend(children.get(pid, ()))
    return pids


def kill_all() -> None:
    """Kill every descendant, including those that are started meanwhile."""
    while pids := descendants(os.getpid(), family()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(REAP_SECONDS)


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    kill_all()  # ends the wait in `main`, too


def main(directory: str, *command: str) -> None:
    """Run the command until it ends or standard input is closed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_watch_parent, daemon=True).start()
    with contextlib.suppress(ChildProcessError):  # raised if the other thread has reaped it
        while os.wait()[0] != child.pid:
            pass  # an orphan that became our child
    kill_all()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
