"""Workers are forks of one warm parent, and yet processes of their own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from distributed.core import Server

from idletrain.cluster import dask_scheduler, fork_server, forked_processes
from idletrain.cluster.forked_processes import ForkedProcess

Start = Callable[..., ForkedProcess]
# Starts a worker of nobody, and tells of its parent and it.
LEADS = """
import json, os, pathlib, time, psutil
from idletrain.cluster import forked_processes
log = pathlib.Path("worker.log")
log.touch()
worker = forked_processes.start(("worker", "tcp://127.0.0.1:9"), log, os.environ)
print(json.dumps({"pids": [psutil.Process(worker.pid).ppid(), worker.pid]}), flush=True)
time.sleep(600)
"""
# Frees what a step of a convolutional network holds, in a thread as a worker's; prints the bytes that it maps again.
STEPS = """
import resource, threading, torch

def step():
    held = [torch.ones(200_000) for _ in range(60)]
    while held:
        held.pop()

def steps():
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a worker of a scheduler, by default of one that never answers: it waits. No parent was there before."""
    numbers, parents = itertools.count(), dict[Any, Any]()
    monkeypatch.setattr(forked_processes, "_parents", parents)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        def started(scheduler: str = nowhere, *options: str, **variables: str) -> ForkedProcess:
            log = tmp_path / f"{next(numbers)}.log"
            log.touch()
            worker = forked_processes.start(("worker", scheduler, *options), log, {**os.environ, **variables})
            assert isinstance(worker, ForkedProcess)
            return worker

        yield started
        for parent in parents.values():
            parent.close()


def eventually(check: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parent_of(worker: ForkedProcess) -> psutil.Process:
    parent = psutil.Process(worker.pid).parent()
    assert parent is not None
    return parent


def about() -> tuple[Any, ...]:
    """What a worker says of its process."""
    import random

    own = os.getpid()
    return os.getcwd(), os.environ["MARK"], "somewhere" in sys.path, os.getsid(0) == own, random.random()  # noqa: PTH109


def test_each_has_its_own_session_environment_folder_path_and_chance(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("somewhere")

    async def ask() -> dict[str, Any]:
        async with dask_scheduler.started(tmp_path) as address:
            (tmp_path / "numpy.py").write_text("raise RuntimeError('a stranger')")  # the parent imports none from here
            workers = [start(address, "--name", mark, MARK=mark) for mark in ("one", "two")]
            async with Client(address, asynchronous=True) as client:
                await client.wait_for_workers(2, timeout=60)
                said = await client.run(about)
            assert {psutil.Process(worker.pid).name() for worker in workers} == {"idletrain-work"}
            assert parent_of(workers[0]) == parent_of(workers[1])
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            assert [worker.wait() for worker in workers] == [0, 0]
            return dict(said)

    (one, two) = sorted(asyncio.run(ask()).values(), key=lambda said: said[1])
    assert one[:4] == (str(tmp_path), "one", True, True)
    assert two[:4] == (str(tmp_path), "two", True, True)
    assert one[4] != two[4]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_that_a_step_frees_stays_for_the_next_one() -> None:
    def mapped(**variables: str) -> int:
        environment = {**os.environ, **forked_processes.WORKER_ENVIRONMENT, **variables}
        return int(
            subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, check=True).stdout
        )

    without = forked_processes.WORKER_ENVIRONMENT["GLIBC_TUNABLES"].rpartition(":")[0]
    assert mapped() < mapped(GLIBC_TUNABLES=without) / 10


def test_a_second_one_starts_without_imports(start: Start) -> None:
    first = start()
    eventually(lambda: first.pid)
    imported = parent_of(first).cpu_times()
    second = start()
    spent = psutil.Process(second.pid).cpu_times()
    assert spent.user + spent.system < (imported.user + imported.system) / 10


def test_how_one_ended_is_known(start: Start, tmp_path: Path) -> None:
    killed, wrong = start(), start("nowhere", "--no-such-option")
    assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    assert (killed.wait(), wrong.wait()) == (-signal.SIGKILL, 2)
    killed.send_signal(signal.SIGKILL)  # no error
    assert (
        tmp_path / "1.log"
    ).read_text() == "idletrain: No such option: --no-such-option; see idletrain worker --help\n"


def test_they_end_with_their_parent_and_another_takes_its_place(start: Start) -> None:
    first, second = start(), start()
    parent = parent_of(first)
    parent.kill()
    assert (first.wait(), second.wait()) == (-signal.SIGKILL, -signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(second.pid))
    assert parent_of(start()).pid != parent.pid


def test_a_parent_ends_some_time_after_the_last_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_processes, "IDLE_SECONDS", 0.3)
    first, second = start(), start()
    parent = parent_of(first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(0.6)
    assert parent.is_running()
    second.send_signal(signal.SIGKILL)
    second.wait()
    third = start()  # soon enough
    assert parent_of(third) == parent
    third.send_signal(signal.SIGKILL)
    eventually(lambda: not parent.is_running())
    assert parent_of(start()) != parent


def test_what_is_read_on_import_makes_another_parent(start: Start) -> None:
    first, other = start(), start(DASK_LOGGING__DISTRIBUTED="error")
    assert parent_of(first) != parent_of(other)
    assert parent_of(start(MARK="which nothing reads")) == parent_of(first)


def test_a_store_s_scratch_folder_makes_no_other_parent_and_a_folder_of_modules_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def beside_a_server() -> tuple[str, ...]:
        server = Server({})
        assert server.local_directory in sys.path
        imported = fork_server.imported_under(os.environ)
        await server.close()
        return imported

    before = fork_server.imported_under(os.environ)
    assert asyncio.run(beside_a_server()) == before
    monkeypatch.syspath_prepend(tmp_path)
    assert fork_server.imported_under(os.environ) != before


def test_a_parent_that_cannot_run_leaves_its_words_in_the_log(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 9\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert [start().wait(), start().wait()] == [9, 9]
    assert [(tmp_path / f"{n}.log").read_text() for n in (0, 1)] == ["no such library\n"] * 2


def test_a_fork_of_the_head_has_no_part_in_its_workers(start: Start) -> None:
    start()
    assert forked_processes._parents
    if not (child := os.fork()):
        os._exit(len(forked_processes._parents))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_system_that_forbids_forks_gets_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    (tmp_path / "log").touch()
    worker = forked_processes.start(("worker", "nowhere", "--no-such-option"), tmp_path / "log", os.environ)
    assert isinstance(worker, subprocess.Popen)
    assert worker.wait() == 2
    assert "--no-such-option" in (tmp_path / "log").read_text()


def test_a_parent_that_cannot_import_a_module_ends_its_forks_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    parent = forked_processes.start_parent(os.environ, ("no_such_module",), lasting=True)
    fork = parent.start(("--version",), tmp_path / "log", os.environ)
    assert fork.wait(30) == 1
    assert "No module named 'no_such_module'" in (tmp_path / "log").read_text()
    assert not parent.can_start


def test_modules_are_found_in_the_working_directory_only_if_idletrain_is_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(Path(fork_server.__file__).parents[2])
    for folder in (own, str(tmp_path)):
        monkeypatch.syspath_prepend(folder)
        monkeypatch.chdir(folder)
        assert (folder in fork_server.importable()) == (folder == own)


def test_a_fork_that_starts_workers_has_imported_all_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "leads.py").write_text(LEADS)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    log = tmp_path / "log"
    parent = forked_processes.start_parent(os.environ)
    try:
        path = ["the name of an editable install", *fork_server.importable()]
        monkeypatch.syspath_prepend(path[0])
        assert fork_server.importable() == path[1:]
        environment = dict(os.environ)
        head = parent.start((), log, environment, module="leads", folder=tmp_path, path=path, has_forks=True)
        eventually(lambda: "pids" in log.read_text())
        pids = json.loads(log.read_text().splitlines()[-1])["pids"]
        spare, worker = (psutil.Process(pid) for pid in pids)
        assert [spare.ppid(), worker.ppid()] == [head.pid, spare.pid]
        spent = [sum(process.cpu_times()[:2]) for process in (spare, worker)]
        assert sum(spent) < sum(parent_of(head).cpu_times()[:2]) / 10
        head.send_signal(signal.SIGKILL)
        eventually(lambda: not spare.is_running() and not worker.is_running())
    finally:
        parent.close()
