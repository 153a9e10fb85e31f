"""What a disturbed run may leave behind, and faults that hold something open."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from idletrain.cluster import access
from idletrain.storage import has_head

SEEN_SECONDS, CLOCK_SLACK_SECONDS = 30.0, 300.0
NO_ROOM = re.compile("no room left in|No space left on device")
HALF_OPEN = 40  # connections to each port, which say nothing
CLOCK = """
import os, time
real = time.time
def shifted():
    try:
        return real() + (0.0 if "CHAOS_STEADY" in os.environ else float(os.readlink(%r)))
    except OSError:
        return real()
time.time = shifted
"""  # a module that Python imports at every start: the wall clock of a process, but for C code
STEADY = {"CHAOS_STEADY": "yes"}  # in the environment of a process whose clock stays right


def half_open(processes: Iterable[psutil.Process]) -> list[socket.socket]:
    """Connect to every port that these processes listen on at a loopback address, and say nothing."""
    connections = []
    for process in processes:
        listening: list[tuple[str, int]] = []
        with contextlib.suppress(psutil.Error):
            listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        for address in listening:
            with contextlib.suppress(OSError):  # it has ended since
                connections += [socket.create_connection(address[:2], timeout=5) for _ in range(HALF_OPEN)]
    return connections


def of_run(run_dir: Path) -> list[Path]:
    """What only a run that goes on should have: certificates, unfinished files, and its lock, held."""
    held = [run_dir / "lock"] if has_head(run_dir) else []
    certificates = [access.folder_of(run_dir)] if access.folder_of(run_dir).exists() else []
    return [*held, *certificates, *run_dir.rglob("*.partial"), *sockets(run_dir)]


def temporary(own: Path) -> list[Path]:
    """What is left in a directory of `own_temporary`, but for Dask's, which Dask's next process clears."""
    return [path for path in (own / "tmp").iterdir() if path.name != "dask-scratch-space"]


def sockets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def set_clock(control: Path, dice: random.Random) -> float:
    """Shift the wall clock of all processes that look into this directory; return by how many seconds."""
    shift = dice.choice((-1, 1)) * dice.uniform(600, 7200)
    (control / "clock.new").symlink_to(str(shift))
    (control / "clock.new").replace(control / "clock")
    return shift


def has_jumped(events: list[dict[str, Any]], shift: float) -> bool:
    """Return whether a run's last event was written by a shifted clock."""
    return bool(events) and abs(events[-1]["t"] - time.time() - shift) < CLOCK_SLACK_SECONDS


def own_temporary(folder: Path, control: Path) -> dict[str, str]:
    """Variables of processes that have a directory for temporary files of their own, and a clock that can be set."""
    (folder / "site").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CLOCK % str(control / "clock"))
    path = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))
    return {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": path, "CHAOS_CONTROL": str(control)}
