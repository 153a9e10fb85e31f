"""A process that was started by another ends with it, whatever either of them is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from idletrain.cluster import owned_process

GONE_SECONDS = 3.0
STARTER = """
import subprocess, sys, time
from idletrain.cluster import owned_process
child = subprocess.Popen(owned_process.command({module!r}, "one", "two", number={number}))
print(child.pid, flush=True)
time.sleep(600)
"""
BUSY = "import pathlib, sys\npathlib.Path('ready').write_text(' '.join(sys.argv[1:]))\nsum(range(10**13))\n"
TIDY = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path("tidied").touch(), sys.exit()))
pathlib.Path("ready").touch()
time.sleep(600)
"""
ELSEWHERE = """
import os, sys, time
sys.platform = "another"  # which has no PR_SET_PDEATHSIG
from idletrain.cluster import owned_process
owned_process.end_with_parent(os.getppid(), 9)
open("ready", "w").close()
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], psutil.Process]]]:
    """Starts a process that starts an owned one from a file; returns both once the file's program is at work."""
    processes: list[Any] = []

    def started(source: str, number: int = signal.SIGKILL) -> tuple[subprocess.Popen[str], psutil.Process]:
        (tmp_path / "program.py").write_text(source)
        program = STARTER.format(module="program", number=f"signal.Signals({number})")
        starter = subprocess.Popen(
            [sys.executable, "-c", f"import signal\n{program}"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        processes.append(starter)
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        processes.append(child)
        eventually((tmp_path / "ready").exists, 30)
        return starter, child

    yield started
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
        process.wait()
        if process.stdout if isinstance(process, subprocess.Popen) else None:
            process.stdout.close()


def eventually(check: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_ends_even_if_no_python_can_run_in_it(start: Any, tmp_path: Path) -> None:
    starter, child = start(BUSY)
    assert (tmp_path / "ready").read_text() == "one two"
    assert not ended(child)
    starter.kill()
    eventually(lambda: ended(child), GONE_SECONDS)


def test_it_can_clean_up_first(start: Any, tmp_path: Path) -> None:
    starter, child = start(TIDY, signal.SIGTERM)
    starter.kill()
    eventually((tmp_path / "tidied").exists, GONE_SECONDS)
    eventually(lambda: ended(child), GONE_SECONDS)


def test_a_parent_that_is_gone_before_it_begins_ends_it_at_once() -> None:
    stranger = os.getppid()  # any process that is not its parent
    command = owned_process.command("this")
    command[command.index(str(os.getpid()))] = str(stranger)
    assert subprocess.run(command, timeout=30, check=False, capture_output=True).returncode == -signal.SIGKILL


def test_where_the_system_does_not_say_so_a_thread_notices(tmp_path: Path) -> None:
    program = f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {ELSEWHERE!r}])\nprint(p.pid)\n"
    program += "import os, time\nwhile not os.path.exists('ready'): time.sleep(0.02)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    eventually(lambda: not psutil.pid_exists(pid) or ended(psutil.Process(pid)), GONE_SECONDS)
