"""When a machine is lent: the decision as a table, the measurement, and a real worker that leaves and comes back."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from distributed.core import rpc
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import PATIENCE_SECONDS, until

from idletrain.worker.idle import JOIN_SECONDS, LEAVE_SECONDS, Sample, others_share, parse_share, should_lend

SHARE = 0.2
BURN = "while True: pass"
SCHEDULER = """
import asyncio, os
from distributed import Scheduler
from idletrain.cluster import dask_settings as settings
from idletrain.cluster.shutdown import when_parent_ends

async def serve():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()

when_parent_ends(lambda: os._exit(0))
settings.apply()
asyncio.run(serve())
"""
# The watcher as the command line starts it, but for what it takes for others: one process that the test chooses by
# writing its id. The machine that runs the tests is busy with who knows what.
WATCHER = """
import pathlib, sys, threading, time, psutil
from idletrain.worker import idle
from idletrain.cluster.shutdown import on_ending

def others(chosen):
    then, before = time.monotonic(), 0.0
    while True:
        now, spent = time.monotonic(), 0.0
        if chosen.exists():
            try:
                spent = sum(psutil.Process(int(chosen.read_text())).cpu_times()[:2])
            except psutil.NoSuchProcess:
                pass
        yield max(spent - before, 0.0) / (now - then)
        then, before = now, spent

stop = threading.Event()
with on_ending(stop.set):
    worker = ["worker", sys.argv[1], "--memory", "1GiB", "--name", "lent"]
    say = lambda text: print(text, flush=True)
    sys.exit(idle.watch(worker, 0.2, stop, others(pathlib.Path(sys.argv[2])), say, join_seconds=2.0))
"""


def samples(*shares: float) -> list[Sample]:
    """One sample a second."""
    return [Sample(float(second), share) for second, share in enumerate(shares)]


QUIET, BUSY = 0.05, 0.9


@pytest.mark.parametrize(
    ("lending", "seen", "expected"),
    [
        # Not lent: as long as the pause is long enough, and not before.
        (False, [], False),
        (False, [QUIET] * 9, False),
        (False, [QUIET] * 11, True),
        (False, [BUSY] * 5 + [QUIET] * 6, False),
        (False, [BUSY] + [QUIET] * 10, True),
        # Lent: a moment's work does not matter, two seconds of it do.
        (True, [], True),
        (True, [BUSY], True),
        (True, [QUIET] * 10 + [0.3, QUIET], True),
        (True, [QUIET] * 10 + [BUSY, BUSY], False),
        (True, [QUIET] * 10 + [1.0, QUIET], False),  # half of two seconds is more than a fifth of them
        (True, [SHARE] * 11, True),
    ],
)
def test_a_machine_is_lent_after_a_pause_and_taken_back_at_once(
    lending: bool, seen: list[float], expected: bool
) -> None:
    assert should_lend(samples(*seen), SHARE, lending=lending) is expected


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=30, max_size=120))
def test_a_machine_changes_hands_no_more_often_than_its_windows_allow(shares: Sequence[float]) -> None:
    lending, changes, window = False, [], []
    for sample in samples(*shares):
        window = [*window, sample][-12:]
        if should_lend(window, SHARE, lending=lending) is not lending:
            lending = not lending
            changes.append((sample.at_seconds, lending))
            window = window if lending else []
    joins = [at for at, lent in changes if lent]
    assert all(later - earlier >= JOIN_SECONDS for earlier, later in itertools.pairwise(joins))
    assert LEAVE_SECONDS < JOIN_SECONDS


@pytest.mark.parametrize(("text", "share"), [("20%", 0.2), ("0.2", 0.2), (" 7.5 % ", 0.075), ("100%", 1.0)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["20", "0%", "101%", "-5%", "nan", "a fifth", "", "%"])
def test_what_is_no_share_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="should be a share of the machine such as 20%"):
        parse_share(text)


@pytest.fixture
def burner() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that use a core each; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def burn() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", BURN]))
        return started[-1]

    yield burn
    for process in started:
        process.kill()
        process.wait()


def seconds_of(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def test_ones_own_children_do_not_count_as_others(burner: Callable[[], subprocess.Popen[bytes]]) -> None:
    shares = others_share()
    next(shares)
    child = psutil.Process(burner().pid)
    started = time.monotonic()
    until("the child's work", lambda: seconds_of(child) > 1.0)
    share, elapsed = next(shares), time.monotonic() - started
    cores = psutil.cpu_count() or 1
    ours = seconds_of(child) / (elapsed * cores)
    assert 0 <= share <= 1 - ours + 0.15  # whatever else this machine does, it cannot do it in our time


def test_somebody_elses_work_counts(burner: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Seen from a process that did not start it."""
    program = (
        "import sys, time\n"
        "from idletrain.worker.idle import others_share\n"
        "shares = others_share(); next(shares)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(next(shares), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "ready\n"
        started = time.monotonic()
        process = psutil.Process(burner().pid)
        until("the work", lambda: seconds_of(process) > 1.0)
        theirs = seconds_of(process) / (time.monotonic() - started)
        watcher.stdin.write("now\n")
        watcher.stdin.flush()
        share = float(watcher.stdout.readline())
    assert share >= theirs / (psutil.cpu_count() or 1) - 0.15


def workers(scheduler: str) -> list[str]:
    """The names of the workers that a scheduler has."""

    async def ask() -> list[str]:
        async with rpc(scheduler) as remote:
            identity = await remote.identity()
            return [str(worker["name"]) for worker in identity["workers"].values()]

    return asyncio.run(ask())


@pytest.fixture
def scheduler() -> Iterator[str]:
    """The address of a stock scheduler in a process of its own."""
    command = [sys.executable, "-c", SCHEDULER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        yield address
        process.stdin.close()


@pytest.fixture
def watcher(scheduler: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A watcher beside that scheduler; what it says is in `said`, whom it watches in `other`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, scheduler, str(tmp_path / "other")], stdout=output, env=environment
        )
    yield process
    if process.poll() is None:
        process.terminate()
    process.wait(PATIENCE_SECONDS)


def test_a_real_worker_leaves_when_somebody_works_and_comes_back_after(
    scheduler: str,
    watcher: subprocess.Popen[bytes],
    burner: Callable[[], subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    until("the worker", lambda: workers(scheduler) == ["lent"])
    (lent,) = psutil.Process(watcher.pid).children()
    owner = burner()
    (tmp_path / "other.new").write_text(str(owner.pid))
    (tmp_path / "other.new").rename(tmp_path / "other")
    began = time.monotonic()
    until("it to leave", lambda: workers(scheduler) == [])
    until("its end", lambda: not lent.is_running() or lent.status() == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - began < 20  # two seconds of work, a drain, and whatever this machine does besides
    assert "taking it back" in (tmp_path / "said").read_text()
    owner.kill()
    until("it to come back", lambda: workers(scheduler) == ["lent"])
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(PATIENCE_SECONDS) == 0
    assert workers(scheduler) == []


def test_a_worker_does_not_outlive_its_watcher(scheduler: str, watcher: subprocess.Popen[bytes]) -> None:
    until("the worker", lambda: workers(scheduler) == ["lent"])
    (lent,) = psutil.Process(watcher.pid).children()
    watcher.kill()
    watcher.wait()
    until("the worker's end", lambda: not lent.is_running() or lent.status() == psutil.STATUS_ZOMBIE)
    assert workers(scheduler) == []


def test_a_worker_that_ends_by_itself_ends_its_watcher(tmp_path: Path) -> None:
    """The address is none: the sentence and the exit code are the worker's."""
    command = [sys.executable, "-c", WATCHER, "pigeon://127.0.0.1:9", str(tmp_path / "other")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 2
    assert "should be tcp://HOST:PORT" in result.stderr
