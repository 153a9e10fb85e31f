"""`idletrain worker` in a process of its own."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

import pytest
from distributed import Scheduler

from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT
from idletrain.errors import RunError

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


@pytest.fixture
def answers_once() -> Iterator[str]:
    """The address of a real scheduler that ends after its first conversation."""
    started: Queue[tuple[Scheduler, asyncio.AbstractEventLoop]] = Queue()

    async def schedule() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            started.put((scheduler, asyncio.get_running_loop()))
            await scheduler.finished()

    thread = Thread(target=lambda: asyncio.run(schedule()))
    thread.start()
    scheduler, loop = started.get(timeout=60)
    listener = socket.create_server(("127.0.0.1", 0))
    relay = Thread(target=_relay_one, args=(listener, scheduler.port))
    relay.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    relay.join(60)
    asyncio.run_coroutine_threadsafe(scheduler.close(), loop).result(60)
    thread.join(60)
    assert not relay.is_alive()


def _relay_one(listener: socket.socket, port: int) -> None:
    """Forward the first connection until one side closes it; others are refused."""
    with listener:
        client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        while True:
            for ready in select.select([client, server], [], [])[0]:
                if not (content := ready.recv(1 << 16)):
                    return
                (server if ready is client else client).sendall(content)


def test_a_scheduler_that_is_gone_before_the_worker_has_joined_is_no_bug(answers_once: str) -> None:
    program = "from idletrain.worker import process; process.WORKER_JOIN_SECONDS = 1; import idletrain.__main__"
    command = [sys.executable, "-c", f"{program}; idletrain.__main__.main()", "worker", answers_once]
    own = {**OTHERS, "GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    ended = subprocess.run(command, check=False, env=own, capture_output=True, text=True, timeout=60)
    assert ended.returncode == RunError.exit_code
    assert f"Waiting to connect to:      {answers_once}" in ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        f"idletrain: scheduler {answers_once} cannot be reached (it answered once and not again); check that it runs"
    )
