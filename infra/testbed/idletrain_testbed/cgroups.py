"""Limit a node's CPUs and memory, by cgroup v1 or v2, whichever has the controller on this machine."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from idletrain_testbed.settings import TestbedError

MOUNTS = Path("/proc/self/mounts")
# The scheduler's usual 100 ms would let a node of 0.25 CPUs run at full speed for 25 ms and then not answer for 75;
# 20 ms keep its pauses below the delays that are emulated, at no cost that could be measured.
PERIOD_MICROSECONDS = 20_000
GONE = (errno.ENOENT, errno.ENODEV)  # errors of reading a cgroup that is removed meanwhile
REMOVAL_SECONDS = 5.0  # an ended process leaves its cgroup a moment after it has left /proc


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy of cgroups, and the version of its files."""

    root: Path
    version: int


def hierarchies(mounts: str) -> dict[str, Hierarchy]:
    """Return the hierarchies of `cpu` and `memory` that are mounted; `mounts` is the text of /proc/mounts."""
    mounted: dict[str, Hierarchy] = {}
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup":
            names = options.split(",")
        elif kind == "cgroup2" and (Path(place) / "cgroup.controllers").exists():
            names = (Path(place) / "cgroup.controllers").read_text().split()
        else:
            continue
        for name in {"cpu", "memory"}.intersection(names):
            mounted[name] = Hierarchy(Path(place), 1 if kind == "cgroup" else 2)
    return mounted


def files(version: int, cpus: float | None, memory: int | None) -> dict[str, dict[str, str]]:
    """Return, for each limited controller, the text of each of its files; a kernel may lack some of them."""
    texts: dict[str, dict[str, str]] = {}
    if cpus is not None:
        quota = str(round(cpus * PERIOD_MICROSECONDS))
        period = str(PERIOD_MICROSECONDS)
        texts["cpu"] = (
            {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
            if version == 1
            else {"cpu.max": f"{quota} {period}"}
        )
    if memory is not None:
        texts["memory"] = (
            {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)}
            if version == 1
            else {"memory.max": str(memory), "memory.swap.max": "0"}
        )
    return texts


def limit(mounted: Mapping[str, Hierarchy], name: str, node: str, cpus: float | None, memory: int | None) -> None:
    """Create a node's cgroups, with their limits.

    Raises:
        TestbedError: a limit cannot be written.
    """
    for controller, hierarchy in mounted.items():
        place = _place(hierarchy, name) / node
        for file, text in files(hierarchy.version, cpus, memory).get(controller, {}).items():
            try:
                _write(hierarchy, controller, place, file, text)
            except OSError as fault:
                raise TestbedError(
                    f"{place} cannot hold a limit ({fault.strerror}): run outside of a container, or do without it."
                ) from None


def _write(hierarchy: Hierarchy, controller: str, place: Path, file: str, text: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    if hierarchy.version == 2:
        for above in (hierarchy.root, place.parent):
            (above / "cgroup.subtree_control").write_text(f"+{controller}")
    if "sw" not in file or (place / file).exists():  # a kernel may not account for swap
        (place / file).write_text(text)


def entrances(mounted: Mapping[str, Hierarchy], name: str, node: str) -> list[Path]:
    """Return the files to which a process writes its id to be limited like `node`."""
    places = {_place(hierarchy, name) / node for hierarchy in mounted.values()}
    return sorted(place / "cgroup.procs" for place in places if place.is_dir())


def inhabitants(mounted: Mapping[str, Hierarchy], name: str) -> set[int]:
    """Return the processes in an instance's cgroups, and in those that they have created below."""
    pids: set[int] = set()
    for place in _places(mounted, name):
        try:
            pids |= {int(pid) for pid in (place / "cgroup.procs").read_text().split()}
        except OSError as fault:
            if fault.errno not in GONE:
                raise
    return pids - {0}  # stands for processes of another PID namespace, which cannot be reached


def remove(mounted: Mapping[str, Hierarchy], name: str) -> None:
    """Remove an instance's cgroups and those below; nothing runs in them any more."""
    for place in _places(mounted, name):
        _remove(place)


def missing(*, cpus: bool, memory: bool) -> list[str]:
    """Return a sentence for each limit that cannot be set on this machine."""
    mounted = hierarchies(MOUNTS.read_text())
    limits = {"cpu": cpus, "memory": memory}
    return [
        f"The cgroup controller {name} cannot be written here: mount it, or do without the limit."
        for name, wanted in limits.items()
        if wanted and not (name in mounted and os.access(mounted[name].root / "cgroup.procs", os.W_OK))
    ]


def _places(mounted: Mapping[str, Hierarchy], name: str) -> list[Path]:
    """Return all of an instance's cgroups, the inner ones first, as they can only be removed in that order."""
    tops = {_place(hierarchy, name) for hierarchy in mounted.values()}
    return [Path(place) for top in sorted(tops) for place, _, _ in os.walk(top, topdown=False)]


def _place(hierarchy: Hierarchy, name: str) -> Path:
    return hierarchy.root / f"idletrain-{name}"


def _remove(place: Path) -> None:
    deadline = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            return place.rmdir()
        except FileNotFoundError:
            return None
        except OSError as fault:
            if fault.errno != errno.EBUSY:
                raise
            if time.monotonic() > deadline:
                raise TestbedError(f"{place} still holds processes: end them and run `down` again.") from None
        time.sleep(0.01)
