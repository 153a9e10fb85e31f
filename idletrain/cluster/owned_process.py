"""Run a module in a process that never outlives the one that started it, not even one that is killed.

python -m idletrain.cluster.owned_process PARENT SIGNAL MODULE [ARGUMENTS...]

PARENT is the id of the process that starts it. When that ends, Linux itself sends SIGNAL here (PR_SET_PDEATHSIG), even
in the middle of a long step or an import; on other systems a thread notices within `POLL_SECONDS`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
POLL_SECONDS = 0.5


def command(module: str, *arguments: str, number: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the command line that runs a module as a child of this process and ends it with this process.

    The thread that starts it must live as long as the child: Linux takes a thread's end for its process' end.

    Args:
        module: The module, run as `python -m` does.
        arguments: Its arguments.
        number: The signal that ends it: SIGTERM for a module that has something to clean up.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), str(int(number)), module, *arguments]


def end_with_parent(parent: int, number: int) -> None:
    """Have this process get a signal when its parent ends; at once, if the parent has ended already."""
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), number)


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    _, _, _, module, *sys.argv[1:] = sys.argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
