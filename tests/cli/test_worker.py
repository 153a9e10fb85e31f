"""`idletrain worker` in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
OTHERS = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}


@pytest.fixture
def silent() -> Iterator[str]:
    """A scheduler's address where nobody answers: a worker waits there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def variables_of(worker: subprocess.Popen[bytes]) -> str:
    """The variables that a worker began with, once it waits for its scheduler; the C library ends settings by zeros."""
    try:
        deadline = time.monotonic() + 60
        while b"socket:" not in b"".join(_open_files(worker.pid)) and worker.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return Path(f"/proc/{worker.pid}/environ").read_text().replace("\0", ":")
    finally:
        worker.kill()
        worker.wait()


def _open_files(pid: int) -> Iterator[bytes]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.fsencode(path.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue


def test_it_begins_with_the_memory_settings_of_a_launch_s_workers(silent: str) -> None:
    worker = subprocess.Popen([sys.executable, "-m", "idletrain", "worker", silent], env=OTHERS)
    assert f":GLIBC_TUNABLES={WORKER_ENVIRONMENT['GLIBC_TUNABLES']}:" in variables_of(worker)


def test_it_keeps_settings_of_its_user(silent: str) -> None:
    own = {**OTHERS, "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    worker = subprocess.Popen([sys.executable, "-m", "idletrain", "worker", silent], env=own)
    variables = variables_of(worker)
    assert ":GLIBC_TUNABLES=glibc.malloc.arena_max=2:" in variables
    assert "hugetlb" not in variables


def test_its_errors_are_told_as_before() -> None:
    command = [Path(sys.executable).with_name("idletrain"), "worker", "127.0.0.1:1://"]
    ended = subprocess.run(command, check=False, env=OTHERS, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == "idletrain: scheduler '127.0.0.1:1://': should be tcp://HOST:PORT or tls://HOST:PORT\n"
