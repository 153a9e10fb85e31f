"""Run schedules: one execution under its lease, and the foreground loop for machines without cron.

`schedules.cron` decides whether and what to run; here are locks, child processes, signals and the history.
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
SIGNAL_EXIT = 128  # added to the signal's number, as shells do for a process ended by one
NO_DIRECTORY_EXIT = 2
LOCAL_TIME = Path("/etc/localtime")


def utc_now() -> datetime:
    """Return the current time (UTC), to the microsecond: no two executions of a schedule get the same one."""
    return datetime.now(UTC)


def machine_zone(named: str) -> str:
    """Return this machine's time zone, UTC if unknown.

    Args:
        named: Value of the environment variable TZ.
    """
    parts = LOCAL_TIME.resolve().parts
    linked = "/".join(parts[parts.index("zoneinfo") + 1 :]) if "zoneinfo" in parts else ""
    return next((zone for zone in (named.removeprefix(":"), linked) if zone and zone_fault(zone) is None), "UTC")


def execute(
    store: ScheduleStore, name: str, program: Sequence[str], now: datetime, *, if_due: bool
) -> Execution | None:
    """Run a schedule once, now, and wait until the run has ended.

    Args:
        store: The stored schedules.
        name: The schedule's name.
        program: The command line of `idletrain`, without arguments.
        now: The current time.
        if_due: Run only if a scheduled time has passed that was not handled yet.

    Returns:
        The execution; None if nothing was due.
    """
    schedule = store.get(name)
    with contextlib.ExitStack() as locks:
        with store.writing(name) as write:
            history = store.history(name)
            at = due(schedule, history, now) if if_due else now
            if at is None:
                return None
            lease = locks.enter_context(store.locked(name, "lease"))
            queue_lock = locks.enter_context(store.locked(name, "waiting")) if lease is None else None
            decision = judge(schedule, history, at, running=lease is None, waiting=lease is None and queue_lock is None)
            execution = Execution(due=at, run=run_name(name, at), note=_note(decision, running=lease is None))
            if decision is DueDecision.RUN:
                execution = replace(execution, started=now)
            write([*history, execution])
        if decision is DueDecision.SKIP:
            return execution
        if lease is None:
            lease = locks.enter_context(store.waited(name))
            execution = _update(store, name, replace(execution, started=utc_now(), note=""))
            if queue_lock:
                queue_lock.close()
        command = [*program, *launch_arguments(schedule, execution.run)]
        code = _launch(schedule, command, store.path(name, "log"), lease)
        return _update(store, name, replace(execution, ended=utc_now(), exit_code=code))


def running(store: ScheduleStore, name: str) -> bool:
    """Return whether a run of a schedule is running."""
    with store.writing(name), store.locked(name, "lease") as lease:
        return lease is None


def serve_schedules(store: ScheduleStore, command: Callable[[str], Sequence[str]], stop: threading.Event) -> None:
    """Start due schedules, as cron would, until `stop` is set; then terminate running ones and wait for them.

    Args:
        store: The stored schedules.
        command: Returns the command that runs one schedule, by name, if it is due.
        stop: Ends the loop once set.
    """
    started: dict[str, datetime] = {}
    children: list[subprocess.Popen[bytes]] = []
    while not stop.is_set():
        now = utc_now()
        wait_seconds = SCHEDULE_TICK_SECONDS
        for name in store.names():
            with contextlib.suppress(JobError, DamageError):  # removed meanwhile, or shown by `schedule list`
                schedule = store.get(name)
                if schedule.starts_in_cloud:
                    continue
                at = due(schedule, store.history(name), now)
                if at and started.get(name) != at:
                    started[name] = at
                    children.append(subprocess.Popen(command(name), stdin=subprocess.DEVNULL, start_new_session=True))
                next_time = next(times(schedule.cron, schedule.tz, now))
                wait_seconds = min(wait_seconds, (next_time - now).total_seconds())
        children = [child for child in children if child.poll() is None]
        stop.wait(max(wait_seconds, 0.0))
    for child in children:
        child.terminate()
    for child in children:
        child.wait()


def _launch(schedule: Schedule, command: Sequence[str], log: Path, lease: IO[bytes]) -> int:
    """Start a run, wait for it and return its exit code. The run holds the lease too: it may outlive this process."""
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


def _note(decision: DueDecision, *, running: bool) -> str:
    if decision is DueDecision.RUN:
        return ""
    if decision is DueDecision.WAIT:
        return "waiting"
    return "skipped: still running" if running else "skipped: the previous run ended later"


def _update(store: ScheduleStore, name: str, execution: Execution) -> Execution:
    """Replace an execution in the history, unless its schedule was removed meanwhile; return it."""
    with contextlib.suppress(JobError), store.writing(name) as write:
        history = store.history(name)
        write([execution if e.due == execution.due else e for e in history])
    return execution
