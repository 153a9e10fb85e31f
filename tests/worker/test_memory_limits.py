"""The memory that a process may take, of made-up and of this machine's cgroups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from idletrain_testbed import Testbed, missing

from idletrain.worker.memory_limits import memory_limit_bytes, unused_bytes


def made_up(folder: Path, kind: str, options: str, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A hierarchy as the kernel shows it: its mount, this process' group, and limits by group."""
    root = folder / "cgroups"
    file = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
    for group, limit in limits.items():
        (root / group).mkdir(parents=True, exist_ok=True)
        (root / group / file).write_text(limit + "\n")
    mounts, groups = folder / "mounts", folder / "cgroup"
    mounts.write_text(f"proc /proc proc rw 0 0\n{kind} {root} {kind} {options} 0 0\n")
    groups.write_text(own)
    return mounts, groups


@pytest.mark.parametrize(
    ("kind", "options", "own"),
    [
        ("cgroup", "rw,memory", "9:cpu,cpuacct:/other\n8:memory:/system.slice/box.service\n"),
        ("cgroup2", "rw,nsdelegate", "0::/system.slice/box.service\n"),
    ],
)
def test_the_tightest_limit_on_the_way_up_counts(kind: str, options: str, own: str, tmp_path: Path) -> None:
    limits = {"": "9223372036854771712", "system.slice": "1000", "system.slice/box.service": "5000", "other": "7"}
    assert memory_limit_bytes(*made_up(tmp_path, kind, options, own, limits)) == 1000


@pytest.mark.parametrize(
    ("kind", "use", "cached"),
    [("cgroup", "memory.usage_in_bytes", "total_inactive_file"), ("cgroup2", "memory.current", "inactive_file")],
)
def test_what_a_group_uses_but_for_cached_files_is_not_unused(kind: str, use: str, cached: str, tmp_path: Path) -> None:
    own = made_up(tmp_path, kind, "rw,memory", "8:memory:/a\n" if kind == "cgroup" else "0::/a\n", {"a": "9000"})
    assert unused_bytes(*own) == 9000
    group = tmp_path / "cgroups" / "a"
    (group / use).write_text("5000\n")
    assert unused_bytes(*own) == 4000
    (group / "memory.stat").write_text(f"anon 4000\n{cached} 1000\n")
    assert unused_bytes(*own) == 5000
    assert unused_bytes(tmp_path / "no-mounts", tmp_path / "no-groups") > 0


def test_no_limit_is_as_much_as_there_can_be(tmp_path: Path) -> None:
    assert memory_limit_bytes(*made_up(tmp_path, "cgroup2", "rw", "0::/a\n", {"a": "max"})) == sys.maxsize
    assert memory_limit_bytes(tmp_path / "no-mounts", tmp_path / "no-groups") == sys.maxsize


def test_a_group_that_is_not_mounted_here_is_the_root_s(tmp_path: Path) -> None:
    """A container sees its own group as the root, whatever its group is called outside."""
    group = made_up(tmp_path, "cgroup", "rw,memory", "8:memory:/docker/1234\n", {"": "3000"})
    assert memory_limit_bytes(*group) == 3000


def test_this_machine_s_can_be_read() -> None:
    assert memory_limit_bytes() > 0


def test_a_process_in_a_group_of_its_own_sees_that_group_s_limit() -> None:
    if reason := missing(memory=True):
        pytest.skip(" ".join(reason))
    say = "from idletrain.worker.memory_limits import memory_limit_bytes; print(memory_limit_bytes())"
    with Testbed(1, memory="128MiB") as bed:
        printed = bed.popen("n0", [sys.executable, "-c", say], stdout=subprocess.PIPE, text=True).communicate()[0]
    assert int(printed) == 128 << 20
