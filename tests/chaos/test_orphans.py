"""Nothing that a command started outlives it, whenever and however it is killed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import psutil
import pytest
import yaml

from idletrain.cluster import dask_scheduler, fork_server, warm_parent
from idletrain.fabric.measuring import collective_process

from .helpers import PATIENCE_SECONDS, Control, Process, Run, until
from .test_cloud import IDLETRAIN, job_tree
from .test_head import ORPHAN_SECONDS


def left(place: Path) -> list[str]:
    """All processes of this machine that have a place in their environment: those of a launch that began with it."""
    orphans = []
    for process in psutil.process_iter():
        try:
            if str(place) in " ".join(process.environ().values()) and process.status() != psutil.STATUS_ZOMBIE:
                orphans.append(f"{process.pid} {process.name()} {' '.join(process.cmdline())}")
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return orphans


# Moments of a launch, in their order, by what can be seen from outside.
MOMENTS: dict[str, Callable[[Path, Process], bool]] = {
    "it starts its first processes": lambda place, _: len(left(place)) >= 3,
    "its cloud answers": lambda place, _: any(place.glob(".cache/idletrain/sandboxes/*/address.json")),
    "its machines boot": lambda place, _: any(place.glob(".cache/idletrain/sandboxes/*/i-*.log")),
    "it trains": lambda _, launch: '"rounds": 1' in launch.text,
}


@pytest.mark.parametrize(
    ("number", "moment"),
    [*itertools.product([signal.SIGKILL, signal.SIGTERM], MOMENTS), (signal.SIGHUP, "it trains")],
)
def test_nothing_outlives_a_launch_in_a_sandbox(
    number: signal.Signals, moment: str, tmp_path: Path, started: list[Process]
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_tree("orphans", rounds=1000)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    path = os.pathsep.join((environment["PATH"], str(tmp_path)))  # which machines have of it, too
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": path}
    command = [*IDLETRAIN, "launch", "job.yaml", "--spot", "--cloud", "sandbox", "--json"]
    launch = Process(command, environment, tmp_path / "launch.log", tmp_path, forked=False)
    started.append(launch)
    until(moment, lambda: MOMENTS[moment](tmp_path, launch))
    assert launch.running, launch.text
    assert len(left(tmp_path)) >= 2
    launch.send(number)
    until(f"the end of {left(tmp_path)}", lambda: not left(tmp_path), ORPHAN_SECONDS)
    assert launch.exit_code() == (-signal.SIGKILL if number == signal.SIGKILL else 130), launch.text
    if number != signal.SIGKILL and moment == "it trains":
        assert "and what orphans has trained is in runs/orphans" in launch.text
        assert list((tmp_path / "runs" / "orphans" / "snapshots").iterdir())


def test_a_closed_terminal_leaves_no_process_of_a_rehearsal_and_keeps_what_it_has_trained(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_tree("orphans", rounds=1000)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "TERM": "xterm"}
    arguments = ["-m", "idletrain", "launch", "job.yaml", "--spot", "--cloud", "sandbox", "--yes"]
    terminal = pexpect.spawn(sys.executable, arguments, cwd=tmp_path, env=environment, encoding="utf-8")
    terminal.expect("accuracy", timeout=PATIENCE_SECONDS)
    assert len(left(tmp_path)) >= 3
    os.close(terminal.child_fd)
    until("the end of what the launch started", lambda: not left(tmp_path), ORPHAN_SECONDS)
    assert list((tmp_path / "runs" / "orphans" / "snapshots").iterdir())
    terminal.wait()


def running(place: Path, word: str) -> int:
    """How many of its processes have a word in their command line, or before it as their name."""
    return sum(f" {word} " in f"{line} " for line in left(place))


def talking(place: Path, module: str) -> list[int]:
    """The ids of its processes that run a module and have connections."""
    pids = [int(line.split()[0]) for line in left(place) if module in line.split()]
    connections = psutil.net_connections("tcp")
    return [pid for pid in pids if any(c.pid == pid and c.status == psutil.CONN_ESTABLISHED for c in connections)]


@pytest.mark.parametrize(
    ("moment", "command"),
    [
        ("its workers' parent imports", "launch"),
        ("its scheduler starts", "launch"),
        ("its workers are in a step", "launch"),
        ("it measures the workers", "fabric"),
        ("its ranks talk", "fabric"),
    ],
)
def test_nothing_outlives_a_killed_command_with_workers_here(
    moment: str,
    command: str,
    make_run: Callable[..., Run],
    control: Control,
    tmp_path: Path,
    started: list[Process],
) -> None:
    run = make_run(rounds=3)
    control.pace(2 * ORPHAN_SECONDS)  # a step takes longer than a worker may take to notice
    arguments = ["--nodes", "2"] if command == "fabric" else [run.file]
    head = Process(
        [sys.executable, "-m", "idletrain", command, *arguments],
        control.environment,
        tmp_path / "head.log",
        tmp_path,
        forked=False,
    )
    started.append(head)
    scheduler = fork_server.title(dask_scheduler.__name__, ())
    if moment == "its scheduler starts":
        until(moment, lambda: running(tmp_path, scheduler) == 1)
    elif moment == "its workers are in a step":
        run.wait(moment, "leased", count=2)
        time.sleep(1)  # from the lease into the step
    elif moment == "its ranks talk":
        until(moment, lambda: len(talking(tmp_path, collective_process.__name__)) == 2)
        time.sleep(1)  # into their operations, which wait for one another
        assert len(talking(tmp_path, collective_process.__name__)) == 2
    elif moment == "it measures the workers":
        until(moment, lambda: running(tmp_path, fork_server.title("idletrain", ["worker"])) == 2)
        time.sleep(2)  # into their start
    else:
        until(moment, lambda: running(tmp_path, warm_parent.__name__) >= 1)
        time.sleep(1)  # into what it imports
    assert head.running, head.text
    assert len(left(tmp_path)) >= (2 if moment == "its workers' parent imports" else 3)
    head.send(signal.SIGKILL)
    until(f"the end of {left(tmp_path)}", lambda: not left(tmp_path), ORPHAN_SECONDS)
