"""Read how much memory the kernel lets this process take: a service's or a container's part of the machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MOUNTS, OWN_GROUPS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
LIMIT_FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
USE_FILES = {"cgroup": "memory.usage_in_bytes", "cgroup2": "memory.current"}
CACHED = {"cgroup": "total_inactive_file", "cgroup2": "inactive_file"}  # in memory.stat; freed when memory is needed


def available_bytes() -> int:
    """Return the free memory of this machine, or this process' limit if that is less."""
    return min(psutil.virtual_memory().available, memory_limit_bytes())


def memory_limit_bytes(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> int:
    """Return the lowest limit of this process' cgroup and of those above it; `sys.maxsize` if there is none.

    Dask reads only the limit at the root of the hierarchy: right in a container, wrong in a systemd unit (MemoryMax).
    """
    return min((limit for limit, _, _ in _limits(mounts, own)), default=sys.maxsize)


def unused_bytes(mounts: Path = MOUNTS, own: Path = OWN_GROUPS) -> int:
    """Return what another process in this one's cgroup could take now: no more than the machine has free."""
    rooms = [limit - _used(group, kind) for limit, group, kind in _limits(mounts, own)]
    return min([psutil.virtual_memory().available, *rooms])


def _used(group: Path, kind: str) -> int:
    """Return what a cgroup uses, without files that the kernel keeps in memory as long as there is room."""
    stat, use = group / "memory.stat", group / USE_FILES[kind]
    lines = stat.read_text().splitlines() if stat.exists() else []
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == CACHED[kind])
    return int(use.read_text()) - cached if use.exists() else 0


def _limits(mounts: Path, own: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield each limit, with its cgroup and the kind of hierarchy."""
    groups = dict(_groups(own))
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, mount_point, kind, options, *_ = line.split()
        if kind not in LIMIT_FILES or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root = Path(mount_point)
        group = root / groups.get("memory" if kind == "cgroup" else "", "")
        for directory in (group, *group.parents):
            if (directory / LIMIT_FILES[kind]).exists():
                text = (directory / LIMIT_FILES[kind]).read_text().strip()
                if text.isdecimal():  # or `max`
                    yield int(text), directory, kind
            if directory == root:
                break


def _groups(own: Path) -> Iterator[tuple[str, str]]:
    """Yield (controller, cgroup path) of this process; the controller is "" for all of cgroup version 2."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path.lstrip("/")
