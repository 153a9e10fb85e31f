"""Running schedules: one execution under its lease, and the foreground loop for machines without cron.

Whether and what to run is decided in `schedule`; this is the doing: locks, child processes, signals, the history.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from idletrain.cluster.shutdown import on_ending
from idletrain.errors import DamageError, JobError
from idletrain.schedules.cron import (
    DueDecision,
    Execution,
    Schedule,
    due,
    judge,
    launch_arguments,
    run_name,
    times,
    zone_fault,
)
from idletrain.schedules.store import ScheduleStore

SCHEDULE_TICK_SECONDS = 20.0  # within a minute, the unit of cron: schedules come and go, and clocks are set
SIGNAL_EXIT = 128  # the shell's way to tell of a process ended by a signal
NO_DIRECTORY_EXIT = 2
LOCAL_TIME = Path("/etc/localtime")


def utc_now() -> datetime:
    """The time; no two executions of a schedule are asked for at the same one."""
    return datetime.now(UTC)


def machine_zone(named: str) -> str:
    """This machine's time zone.

    Args:
        named: What the environment variable TZ says.
    """
    parts = LOCAL_TIME.resolve().parts
    linked = "/".join(parts[parts.index("zoneinfo") + 1 :]) if "zoneinfo" in parts else ""
    return next((zone for zone in (named.removeprefix(":"), linked) if zone and zone_fault(zone) is None), "UTC")


def execute(
    store: ScheduleStore, name: str, program: Sequence[str], now: datetime, *, if_due: bool
) -> Execution | None:
    """Run a schedule once, now; returns when it is over.

    Args:
        program: The command line of `idletrain`, without arguments.
        if_due: Only if a scheduled time has come that nobody attended to.

    Returns:
        What came of it; None if nothing was due.
    """
    schedule = store.get(name)
    with contextlib.ExitStack() as held:
        with store.writing(name) as write:
            history = store.history(name)
            at = due(schedule, history, now) if if_due else now
            if at is None:
                return None
            lease = held.enter_context(store.locked(name, "lease"))
            place = held.enter_context(store.locked(name, "waiting")) if lease is None else None
            verdict = judge(schedule, history, at, running=lease is None, waiting=lease is None and place is None)
            execution = Execution(due=at, run=run_name(name, at), note=_note(verdict, running=lease is None))
            if verdict is DueDecision.RUN:
                execution = replace(execution, started=now)
            write([*history, execution])
        if verdict is DueDecision.SKIP:
            return execution
        if lease is None:
            lease = held.enter_context(store.waited(name))
            execution = _update(store, name, replace(execution, started=utc_now(), note=""))
            if place:
                place.close()
        command = [*program, *launch_arguments(schedule, execution.run)]
        code = _launch(schedule, command, store.path(name, "log"), lease)
        return _update(store, name, replace(execution, ended=utc_now(), exit_code=code))


def running(store: ScheduleStore, name: str) -> bool:
    """Whether a run of a schedule goes on."""
    with store.writing(name), store.locked(name, "lease") as lease:
        return lease is None


def serve(store: ScheduleStore, command: Callable[[str], Sequence[str]], stop: threading.Event) -> None:
    """Start whatever is due, as cron would, until told to stop; then stop what runs and wait for it.

    Args:
        command: What runs one schedule if it is due.
    """
    started: dict[str, datetime] = {}
    children: list[subprocess.Popen[bytes]] = []
    while not stop.is_set():
        now = utc_now()
        wait_seconds = SCHEDULE_TICK_SECONDS
        for name in store.names():
            with contextlib.suppress(JobError, DamageError):  # gone meanwhile, or told of by `schedule list`
                schedule = store.get(name)
                if schedule.on == "aws":
                    continue
                at = due(schedule, store.history(name), now)
                if at and started.get(name) != at:
                    started[name] = at
                    children.append(subprocess.Popen(command(name), stdin=subprocess.DEVNULL, start_new_session=True))
                coming = next(times(schedule.cron, schedule.tz, now))
                wait_seconds = min(wait_seconds, (coming - now).total_seconds())
        children = [child for child in children if child.poll() is None]
        stop.wait(max(wait_seconds, 0.0))
    for child in children:
        child.terminate()
    for child in children:
        child.wait()


def _launch(schedule: Schedule, command: Sequence[str], log: Path, lease: IO[bytes]) -> int:
    """Start a run and wait for it; its exit code. The run holds the lease too: it may outlive this process."""
    if not Path(schedule.directory).is_dir():
        log.write_text(f"{schedule.directory} is gone; remove schedule {schedule.name} and add it again\n")
        return NO_DIRECTORY_EXIT
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=schedule.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lease.fileno(),),
            start_new_session=True,
        )
    with on_ending(process.terminate):
        code = process.wait()
    return code if code >= 0 else SIGNAL_EXIT - code


def _note(verdict: DueDecision, *, running: bool) -> str:
    if verdict is DueDecision.RUN:
        return ""
    if verdict is DueDecision.WAIT:
        return "waiting"
    return "skipped: still running" if running else "skipped: the run before went on until later"


def _update(store: ScheduleStore, name: str, execution: Execution) -> Execution:
    """Write down how an execution stands now; not if its schedule was removed meanwhile."""
    with contextlib.suppress(JobError), store.writing(name) as write:
        history = store.history(name)
        write([execution if e.due == execution.due else e for e in history])
    return execution
