"""Executions with real processes: one at a time, the next one skipped or queued, and the foreground loop.

The program that is started is a stand-in for `idletrain`, so that a test says how long it takes and how it ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from nightly import a_schedule
from waiting import PATIENCE_SECONDS, until

from idletrain.schedules import execute as schedule_run
from idletrain.schedules.cron import Execution
from idletrain.schedules.execute import execute, machine_zone, running, serve_schedules, utc_now
from idletrain.schedules.store import ScheduleStore

STAND_IN = """
import pathlib, signal, sys, time
here = pathlib.Path.cwd()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
print(" ".join(sys.argv[1:]), flush=True)
(here / "started").open("a").write(sys.argv[4] + "\\n")
while (here / "hold").exists():
    time.sleep(0.02)
sys.exit(int((here / "exit").read_text()) if (here / "exit").exists() else 0)
"""
# What crontab would call, with the stand-in in place of `idletrain`.
ONE = """
import json, pathlib, sys
from idletrain.schedules.store import ScheduleStore
from idletrain.schedules.execute import execute, utc_now
store = ScheduleStore(pathlib.Path(sys.argv[1]))
execute(store, sys.argv[2], json.loads(sys.argv[3]), utc_now(), if_due="--if-due" in sys.argv)
"""


class Case:
    """A schedule for every minute, the stand-in, and processes that execute it."""

    def __init__(self, path: Path) -> None:
        self.work = path / "work"
        self.work.mkdir()
        self.book = ScheduleStore(path / "schedules")
        script = path / "stand_in.py"
        script.write_text(STAND_IN)
        self.program = [sys.executable, str(script)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self, *, missed: bool = True, **changes: Any) -> None:
        fields = {"name": "often", "cron": "* * * * *", "tz": "UTC", "cloud": "local", "on": "loop"}
        fields |= {"job": "/job.yaml", "directory": str(self.work)}
        created = utc_now() - timedelta(hours=1 if missed else 0)
        self.book.add(a_schedule(**{**fields, "created": created, **changes}))

    def hold(self) -> Path:
        (self.work / "hold").touch()
        return self.work / "hold"

    @property
    def started(self) -> list[str]:
        file = self.work / "started"
        return file.read_text().split() if file.exists() else []

    @property
    def history(self) -> tuple[Execution, ...]:
        return self.book.history("often")

    def now(self, *, if_due: bool = False) -> Execution | None:
        return execute(self.book, "often", self.program, utc_now(), if_due=if_due)

    def process(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ONE, str(self.book.directory), "often", json.dumps(self.program), *arguments]
        self.processes.append(subprocess.Popen(command, start_new_session=True))
        return self.processes[-1]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    scenario = Case(tmp_path)
    yield scenario
    (scenario.work / "hold").unlink(missing_ok=True)
    for process in scenario.processes:
        if process.poll() is None:
            process.terminate()
        process.wait(PATIENCE_SECONDS)


def test_a_run_is_started_with_a_name_of_its_own_and_its_end_written_down(case: Case) -> None:
    case.add()
    done = case.now()
    assert done is not None
    assert done.run == f"often-{done.due:%Y%m%d-%H%M}"
    assert case.started == [done.run]
    assert case.history == (done,)
    assert done.exit_code == 0
    assert done.started is not None
    assert done.ended is not None
    assert case.book.path("often", "log").read_text() == f"launch /job.yaml --name {done.run}\n"


def test_a_failed_run_is_reported(case: Case) -> None:
    case.add()
    (case.work / "exit").write_text("2")
    done = case.now()
    assert done is not None
    assert done.exit_code == 2
    assert case.history[-1].exit_code == 2


def test_an_hour_of_missed_times_is_made_up_for_once(case: Case) -> None:
    case.add(missed=True)
    first = case.now(if_due=True)
    assert first is not None
    later = case.now(if_due=True)
    assert len(case.started) == (1 if later is None else 2)  # two if a minute has begun meanwhile
    assert later is None or later.due > first.due


def test_nothing_is_started_before_its_time(case: Case) -> None:
    case.add(missed=False, cron="0 0 29 2 *")
    assert case.now(if_due=True) is None
    assert case.started == []
    assert case.history == ()


def test_beside_a_run_that_goes_on_the_next_is_skipped(case: Case) -> None:
    case.add(if_running="skip")
    held = case.hold()
    first = case.process()
    until("the first run", lambda: case.started)
    assert running(case.book, "often")
    second = case.now()
    assert second is not None
    assert (second.note, second.exit_code) == ("skipped: still running", None)
    held.unlink()
    assert first.wait(PATIENCE_SECONDS) == 0
    assert not running(case.book, "often")
    assert len(case.started) == 1
    assert [e.note for e in case.history] == ["", "skipped: still running"]


def test_one_may_queue_behind_a_run_and_no_more(case: Case) -> None:
    case.add(if_running="queue")
    held = case.hold()
    first = case.process()
    until("the first run", lambda: case.started)
    second = case.process()
    until("the second to wait", lambda: [e for e in case.history if e.note == "waiting"])
    third = case.now()
    assert third is not None
    assert third.note == "skipped: still running"
    assert len(case.started) == 1
    held.unlink()
    assert [first.wait(PATIENCE_SECONDS), second.wait(PATIENCE_SECONDS)] == [0, 0]
    assert len(case.started) == 2
    ran = [e for e in case.history if e.exit_code == 0]
    assert len(ran) == 2
    assert ran[0].ended is not None
    assert ran[1].started is not None
    assert ran[0].ended <= ran[1].started
    assert ran[1].note == ""


def test_of_several_who_ask_at_once_one_runs(case: Case) -> None:
    """A crontab, a timer and a loop may all be there."""
    case.add(cron="0 0 1 * *", created=utc_now() - timedelta(days=90))
    askers = [case.process("--if-due") for _ in range(4)]
    assert [asker.wait(PATIENCE_SECONDS) for asker in askers] == [0, 0, 0, 0]
    assert len(case.started) == len(case.history) == 1


def test_a_run_keeps_its_lease_when_the_process_that_started_it_is_killed(case: Case) -> None:
    case.add()
    held = case.hold()
    first = case.process()
    until("the run", lambda: case.started)
    (run,) = psutil.Process(first.pid).children()
    first.kill()
    assert first.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert run.is_running()
    assert running(case.book, "often")
    second = case.now()
    assert second is not None
    assert second.note == "skipped: still running"
    held.unlink()
    until("the run's end", lambda: not running(case.book, "often"))
    assert case.history[0].ended is None


def test_a_stop_reaches_the_run(case: Case) -> None:
    case.add()
    case.hold()
    first = case.process()
    until("the run", lambda: case.started)
    first.terminate()
    assert first.wait(PATIENCE_SECONDS) == 0
    assert case.history[-1].exit_code == 130


def test_a_schedule_that_is_removed_meanwhile_stays_removed(case: Case) -> None:
    case.add()
    held = case.hold()
    first = case.process()
    until("the run", lambda: case.started)
    case.book.remove("often")
    held.unlink()
    assert first.wait(PATIENCE_SECONDS) == 0
    assert case.book.names() == []
    assert not case.book.path("often", "history.jsonl").exists()


def test_a_directory_that_is_gone_is_reported(case: Case) -> None:
    case.add(directory=str(case.work / "gone"))
    done = case.now()
    assert done is not None
    assert done.exit_code == 2
    assert "is gone; remove schedule often and add it again" in case.book.path("often", "log").read_text()


def test_the_loop_runs_what_is_due_once_and_stops_what_it_started(case: Case) -> None:
    case.add()
    case.add(name="never", cron="0 0 29 2 *", created=utc_now())
    case.add(name="on-aws", on="aws")
    (case.book.directory / "broken.json").write_text("{")
    case.hold()

    def command(name: str) -> list[str]:
        return [sys.executable, "-c", ONE, str(case.book.directory), name, json.dumps(case.program), "--if-due"]

    stop = threading.Event()
    loop = threading.Thread(target=serve_schedules, args=(case.book, command, stop))
    loop.start()
    try:
        until("the run", lambda: case.started)
    finally:
        stop.set()
        loop.join(PATIENCE_SECONDS)
    assert not loop.is_alive()
    assert case.history[0].exit_code == 130
    assert len(case.started) == 1
    assert case.book.history("never") == case.book.history("on-aws") == ()


def test_the_machines_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "localtime"
    monkeypatch.setattr(schedule_run, "LOCAL_TIME", link)
    assert machine_zone("") == "UTC"
    link.symlink_to("/usr/share/zoneinfo/Asia/Tokyo")
    assert machine_zone("") == "Asia/Tokyo"
    assert machine_zone(":Europe/Paris") == "Europe/Paris"
    assert machine_zone("CET-1CEST") == "Asia/Tokyo"
