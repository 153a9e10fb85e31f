"""Limits are written as each version of cgroups wants them; here into directories that look like theirs."""

from __future__ import annotations

from pathlib import Path

from idletrain_testbed import cgroups
from idletrain_testbed.cgroups import Hierarchy


def test_each_controller_is_found_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset io memory\n")
    mounts = (
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
        f"cgroup2 {tmp_path} cgroup2 rw,nsdelegate 0 0\n"
    )
    hierarchies = cgroups.hierarchies(mounts)
    assert hierarchies == {"cpu": Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), 1), "memory": Hierarchy(tmp_path, 2)}


def test_limits_by_version_1(tmp_path: Path) -> None:
    hierarchies = {"cpu": Hierarchy(tmp_path / "cpu", 1), "memory": Hierarchy(tmp_path / "memory", 1)}
    cgroups.limit(hierarchies, "a", "n0", 0.25, 2**30)
    cpu, memory = tmp_path / "cpu/idletrain-a/n0", tmp_path / "memory/idletrain-a/n0"
    share = int((cpu / "cpu.cfs_quota_us").read_text()) / int((cpu / "cpu.cfs_period_us").read_text())
    assert share == 0.25
    assert (memory / "memory.limit_in_bytes").read_text() == str(2**30)
    assert not (memory / "memory.memsw.limit_in_bytes").exists()  # where swap is not accounted for
    assert cgroups.entrances(hierarchies, "a", "n0") == [cpu / "cgroup.procs", memory / "cgroup.procs"]


def test_limits_by_version_2(tmp_path: Path) -> None:
    hierarchies = {"cpu": Hierarchy(tmp_path, 2), "memory": Hierarchy(tmp_path, 2)}
    cgroups.limit(hierarchies, "a", "n0", 0.5, 2**20)
    node = tmp_path / "idletrain-a/n0"
    quota, period = (node / "cpu.max").read_text().split()
    assert int(quota) / int(period) == 0.5
    assert (node / "memory.max").read_text() == str(2**20)
    assert (tmp_path / "idletrain-a/cgroup.subtree_control").read_text() == "+memory"  # after "+cpu": each is one write
    assert cgroups.entrances(hierarchies, "a", "n0") == [node / "cgroup.procs"]


def test_without_limits_nothing_is_made(tmp_path: Path) -> None:
    hierarchies = {"cpu": Hierarchy(tmp_path, 1), "memory": Hierarchy(tmp_path, 2)}
    cgroups.limit(hierarchies, "a", "n0", None, None)
    assert list(tmp_path.iterdir()) == []
    assert cgroups.entrances(hierarchies, "a", "n0") == []
    cgroups.remove(hierarchies, "a")
