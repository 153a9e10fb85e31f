"""Runs one machine's user data and sees to it that nothing of it stays behind. A program of its own, stdlib only:

python -I -S supervisor.py DIRECTORY [COMMAND...]

It ends the machine when the command ends, or when standard input, a pipe held by the sandbox, is closed: also by a
SIGKILL of the sandbox. What the machine started is killed even where it left the process group; the directory goes too.
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
REAP_SECONDS = 0.002  # a killed process needs about as long to go


def family() -> dict[int, list[int]]:
    """All processes of this machine by parent, zombies included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def descendants(root: int, children: dict[int, list[int]]) -> list[int]:
    """All processes below a process."""
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return found


def kill_all() -> None:
    """Kill every descendant, those that are born meanwhile too."""
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
    kill_all()  # and so ends the wait below


def main(directory: str, *command: str) -> None:
    """Run the command until it ends or the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_watch_parent, daemon=True).start()
    with contextlib.suppress(ChildProcessError):  # raised where the other thread has seen the end of it
        while os.wait()[0] != child.pid:
            pass  # an orphan that was left to us
    kill_all()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
