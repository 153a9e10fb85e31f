"""Nothing of a machine outlives its program, its supervisor's parent or an order to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import eventually

from idletrain.cloud.sandbox import supervisor

# One process leaves the process group, one is orphaned; both say who they are.
STRAYS = "setsid sleep 300 & (sleep 301 &) ; echo ready > {0}; wait"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "machine"
    folder.mkdir()
    return folder


def start(directory: Path, *command: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", supervisor.__name__, str(directory), *command]
    return subprocess.Popen(arguments, start_new_session=True)


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_on_a_signal_all_descendants_die_and_the_directory_goes(tmp_path: Path, directory: Path) -> None:
    process = start(directory, "bash", "-c", STRAYS.format(tmp_path / "ready"))
    eventually((tmp_path / "ready").exists)
    pids = supervisor.descendants(process.pid, supervisor.family())
    assert len(pids) == 3
    process.terminate()
    process.wait(10)
    assert all(map(has_ended, pids))
    assert not directory.exists()


# What becomes of a machine that is terminated while its program starts.
AT_ITS_START = """
import os, signal, subprocess, sys
from idletrain.cloud.sandbox import supervisor

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
supervisor.main(*sys.argv[1:])
"""


# What becomes of a machine whose program ends before anything else happens.
ENDED_AT_ONCE = """
import os, subprocess, sys
from idletrain.cloud.sandbox import supervisor

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Popen
supervisor.main(*sys.argv[1:])
"""


def test_a_program_that_ends_at_once_ends_the_machine(directory: Path) -> None:
    command = [sys.executable, "-c", ENDED_AT_ONCE, str(directory), "true"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            process.wait(20)
        finally:
            process.kill()
    assert not directory.exists()


def test_a_signal_while_the_program_starts_ends_the_machine_too(directory: Path) -> None:
    command = [sys.executable, "-c", AT_ITS_START, str(directory), "sleep", "300"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            process.wait(20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert not directory.exists()


def test_when_the_program_ends_its_strays_die_too(tmp_path: Path, directory: Path) -> None:
    process = start(directory, "bash", "-c", f"(sleep 300 & echo $! > {tmp_path / 'pid'}); exit 3")
    process.wait(10)
    assert has_ended(int((tmp_path / "pid").read_text()))
    assert not directory.exists()


def test_the_program_runs_in_the_directory_without_input(tmp_path: Path, directory: Path) -> None:
    process = start(directory, "bash", "-c", f"pwd > {tmp_path / 'where'}; cat > {tmp_path / 'input'}")
    process.wait(10)
    assert (tmp_path / "where").read_text().strip() == str(directory)
    assert (tmp_path / "input").read_text() == ""


def test_a_process_without_children_has_no_descendants() -> None:
    with subprocess.Popen(["sleep", "300"]) as process:
        family = supervisor.family()
        assert supervisor.descendants(process.pid, family) == []
        assert process.pid in supervisor.descendants(os.getpid(), family)
        process.kill()
