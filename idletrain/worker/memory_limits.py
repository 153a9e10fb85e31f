"""The memory that this process may take, as the kernel sees it: a service's or a container's part of the machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNTS, MINE = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


def available_bytes() -> int:
    """What is free on this machine, or this process' part of it if that is less."""
    return min(psutil.virtual_memory().available, memory_limit_bytes())


def memory_limit_bytes(mounts: Path = MOUNTS, own: Path = MINE) -> int:
    """The tightest limit of this process' cgroup and of those above it; `sys.maxsize` if there is none.

    Dask reads the one at the root of the hierarchy alone: right in a container, not in a systemd unit with `MemoryMax`.
    """
    return min(_limits(mounts, own), default=sys.maxsize)


def _limits(mounts: Path, own: Path) -> Iterator[int]:
    groups = dict(_groups(own))
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, place, kind, options, *_ = line.split()
        if kind not in FILES or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root = Path(place)
        group = root / groups.get("memory" if kind == "cgroup" else "", "")
        for at in (group, *group.parents):
            if (at / FILES[kind]).exists():
                text = (at / FILES[kind]).read_text().strip()
                if text.isdecimal():  # or `max`
                    yield int(text)
            if at == root:
                break


def _groups(own: Path) -> Iterator[tuple[str, str]]:
    """This process' group of every controller, "" for all of version 2."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path.lstrip("/")
