"""File systems without room: a run waits for some, and says so."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .helpers import Cluster, Control, Process, Run, tmpfs, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")


@pytest.fixture
def small_disk(tmp_path: Path, started: list[object]) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "4m") as at:
        yield at


def fill(disk: Path) -> Path:
    """Take all room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return ballast


def full_in_the_second_round(
    disk: Path, make_run: Callable[..., Run], control: Control, cluster: Cluster
) -> tuple[Run, Process, Path]:
    """A run of three slow rounds whose disk is full in the second; its head; and the file that takes the room."""
    run = make_run(rounds=3, to=disk)
    for _ in range(2):
        cluster.idletrain_worker()
    control.pace(0.05)
    head = run.launch("--scheduler", cluster.address)
    run.wait("the second round", "leased", lambda e: e["round"] == 1)
    return run, head, fill(disk)


@pytest.mark.parametrize("what", ["staging", "snapshot"])
def test_a_full_disk(
    what: str,
    small_disk: Path,
    make_run: Callable[..., Run],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    every = "1h" if what == "staging" else "1ms"
    run = make_run(rounds=4, to=small_disk, checkpoint={"every": every}, preemption={"progress_every": "1h"})
    for _ in range(2):
        cluster.idletrain_worker()
    control.pace(0.05)
    head = run.launch("--scheduler", cluster.address)
    if what == "staging":
        run.wait("the second round", "leased", lambda e: e["round"] == 1)
    else:
        run.wait("a snapshot", "snapshot")
    ballast = fill(small_disk)
    control.pace(0)
    # The events' file is on the full disk too: the head's display is what tells.
    until("the pause", lambda: "no room left in" in head.text)
    assert "ENOSPC" in head.text
    rounds = len(run.records("commit"))
    assert rounds < 4
    assert head.running
    ballast.unlink()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    paused, resumed = run.events("paused"), run.events("resumed")
    assert len(paused) == len(resumed) >= 1
    assert str(small_disk) in paused[0]["reason"]


def test_ctrl_c_on_a_full_disk(
    small_disk: Path,
    make_run: Callable[..., Run],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    """Who waits for room can be stopped, and goes on from there."""
    run, head, ballast = full_in_the_second_round(small_disk, make_run, control, cluster)
    control.pace(0)
    until("the pause", lambda: "no room left in" in head.text)
    head.send(signal.SIGINT)
    assert head.exit_code(20) in (1, 130), head.text  # whether the last words of the ledger found room or not
    assert "stopped" in head.text
    assert "--resume" in head.text
    ballast.unlink()
    assert run.launch("--scheduler", cluster.address, "--resume").exit_code() == 0
    run.check(undisturbed())
    assert [event["status"] for event in run.events("run_ended")][-1] == "completed"


def test_a_head_killed_on_a_full_disk(
    small_disk: Path,
    make_run: Callable[..., Run],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    """What a killed head left half written does not hinder the next one."""
    run, head, ballast = full_in_the_second_round(small_disk, make_run, control, cluster)
    until("the pause", lambda: "no room left in" in head.text)
    head.destroy()
    full = run.launch("--resume", "--scheduler", cluster.address)
    control.pace(0)
    until("the second head's word", lambda: not full.running or "no room left in" in full.text)
    assert full.running or full.exit_code() == 1, full.text
    full.destroy()
    ballast.unlink()
    run.resume("--scheduler", cluster.address)
    run.check(undisturbed())
