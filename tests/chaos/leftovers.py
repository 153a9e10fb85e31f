"""What a disturbed run may leave behind, and faults that hold something open."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from idletrain.cluster import access
from idletrain.storage import has_head

HALF_OPEN = 40  # connections to each port, which say nothing
CLOCK = """
import os, time
real = time.time
def shifted():
    try:
        return real() + float(os.readlink(os.path.join(os.environ.get("CHAOS_CONTROL", ""), "clock")))
    except OSError:
        return real()
time.time = shifted
"""  # a module that Python imports at every start: the wall clock of a process, but for C code


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


def set_clock(control: Path, seconds: float) -> None:
    """Shift the wall clock of all processes that look into this directory."""
    (control / "clock.new").symlink_to(str(seconds))
    (control / "clock.new").replace(control / "clock")


def own_temporary(folder: Path, control: Path) -> dict[str, str]:
    """Variables of processes that have a directory for temporary files of their own, and a clock that can be set."""
    (folder / "site").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CLOCK)
    path = os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))
    return {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": path, "CHAOS_CONTROL": str(control)}
