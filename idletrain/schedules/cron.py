"""Decide when a schedule is due and what to do: cron times, catch-up of missed ones, overlap with a running run.

Pure: the time and the history are arguments. Cron lines mean what they mean to Debian's cron, clock changes included:
a time that the spring skips is due when the clock has jumped, a time that the autumn repeats is due once; lines whose
minute or hour field begins with `*` follow the hours that really pass.
"""

from __future__ import annotations

import difflib
import enum
import re
import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cronsim import CronSim, CronSimError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
LONGEST_NAME = 49  # a run's adds -YYYYMMDD-HHMM, and is a DNS label of at most 63 characters
LONGEST_OF_SWEEP = 42  # a trial's adds a hyphen and 6 letters to its run's
RANGES = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT",
}
EPOCH = datetime(2026, 1, 1)  # any start will do to parse a line
# Spans searched for the last due time, shortest first, so that a line for every minute costs no more than a rare one.
LOOK_BACK = (timedelta(hours=1), timedelta(days=1), timedelta(days=31), timedelta(days=366))
STOPPED_EXITS = (130, 143)  # after a SIGINT (a launch turns every request to end into one) and after a SIGTERM
ZONE_OFFSETS_MINUTES = (0, 15, 30, 45)  # all of today's zones differ by multiples of 15 minutes


class LocalTrigger(enum.StrEnum):
    """A program on this machine that starts scheduled runs; any other trigger is a cloud's name."""

    crontab = "crontab"
    systemd = "systemd"
    loop = "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job that runs at the times of a cron line.

    Attributes:
        cron: Five fields, in the time zone `tz`.
        job: Absolute path of the job file.
        directory: Working directory of its runs.
        cloud: Name of the provider of its nodes: local, sandbox, aws, ...
        on: What starts it: a `LocalTrigger`, or a cloud's name.
        if_running: What to do while the previous run is still running: skip or queue.
        created: When it was created; earlier times are never due.
        varied: Settings and their values (`PATH=A,B`), if the job is trained with each by `idletrain sweep`.
        budget: What such a sweep may cost each time, as `--budget` takes it, or empty.
        account: The account of the cloud that starts it, or empty.
    """

    name: str
    cron: str
    tz: str
    job: str
    directory: str
    cloud: str
    on: str
    if_running: str
    created: datetime
    varied: tuple[str, ...] = ()
    budget: str = ""
    account: str = ""

    @property
    def starts_in_cloud(self) -> bool:
        """Return True if a cloud starts its runs, False if this machine does."""
        return self.on not in set(LocalTrigger)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One scheduled time and its result.

    Attributes:
        due: The scheduled time.
        started: When the run started; None while it waits, or if it was skipped.
        exit_code: Exit code of the run; None while it is running.
        note: Why it did not run, or empty.
    """

    due: datetime
    run: str
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    note: str = ""


class DueDecision(enum.Enum):
    """Action at a due time."""

    RUN = "run"
    WAIT = "wait"
    SKIP = "skip"


def name_fault(name: str, varied: Sequence[str] = ()) -> str | None:
    """Return what is wrong with the name of a schedule that varies such settings, as a sentence, or None."""
    most = LONGEST_OF_SWEEP if varied else LONGEST_NAME
    if NAME.fullmatch(name) and len(name) <= most:
        return None
    of_sweep = " with --set" if varied else ""
    return f"NAME: {name!r} should be lower-case letters, digits and hyphens, at most {most}{of_sweep}"


def zone_fault(tz: str) -> str | None:
    """Return what is wrong with a time zone, as a sentence, or None."""
    try:
        zoneinfo.ZoneInfo(tz)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        close = difflib.get_close_matches(tz, zoneinfo.available_timezones(), n=1)
        return f"--tz: {tz!r} is not a time zone; {f'did you mean {close[0]}?' if close else 'try Europe/Paris or UTC'}"
    return None


def cron_fault(cron: str) -> str | None:
    """Return what is wrong with a cron line, as a sentence, or None."""
    fields = cron.split()
    if len(fields) != len(RANGES):
        return f"--cron: {cron!r} should be minute hour day-of-month month day-of-week, such as '0 2 * * *' for 02:00"
    try:
        next(CronSim(cron, EPOCH))
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        number = list(RANGES).index(name)
        if name != "day-of-month" or not _parses(f"* * {fields[number]} * *"):
            return f"--cron: {fields[number]!r} is no {name}; use {RANGES[name]}, lists 1,3, ranges 1-5 or steps */10"
    except StopIteration:
        pass
    else:
        return None
    return f"--cron: {cron!r} never comes; choose a day that the month has"


def times(cron: str, tz: str, after: datetime) -> Iterator[datetime]:
    """Yield the times (UTC) of a valid cron line after a moment, in order, for fifty years at least."""
    latest = after.astimezone(UTC)
    for local in CronSim(cron, after.astimezone(zoneinfo.ZoneInfo(tz))):
        at = local.astimezone(UTC)
        if at > latest:  # within the hour that the autumn repeats, the first one may be in the past
            latest = at
            yield at


def due(schedule: Schedule, history: Sequence[Execution], now: datetime) -> datetime | None:
    """Return the newest scheduled time until now that was not handled, or None; older missed ones are dropped."""
    handled = max([schedule.created, *(execution.due for execution in history)])
    for start in (*(now - span for span in LOOK_BACK), handled):
        newest = None
        for at in times(schedule.cron, schedule.tz, max(start, handled)):
            if at > now:
                break
            newest = at
        if newest or start <= handled:
            return newest
    return None


def judge(schedule: Schedule, history: Sequence[Execution], at: datetime, running: bool, waiting: bool) -> DueDecision:
    """Decide whether to run, wait or skip at a due time.

    Args:
        schedule: The schedule.
        history: Its executions so far.
        at: The due time.
        running: Whether a run of this schedule is running now.
        waiting: Whether another execution waits for that run to end.
    """
    if running and schedule.if_running == "queue":
        return DueDecision.SKIP if waiting else DueDecision.WAIT
    overlaps = any(e.started and e.ended and e.started <= at < e.ended for e in history)
    if running or (overlaps and schedule.if_running == "skip"):
        return DueDecision.SKIP
    return DueDecision.RUN


def run_name(name: str, at: datetime) -> str:
    """Return the name of a schedule's run; its time is in UTC, where no minute comes twice."""
    return f"{name}-{at.astimezone(UTC):%Y%m%d-%H%M}"


def launch_arguments(schedule: Schedule, run: str) -> list[str]:
    """Return the arguments of `idletrain` that start a run, or a sweep of several."""
    if schedule.varied:
        options = [argument for text in schedule.varied for argument in ("--set", text)]
        options += ["--budget", schedule.budget] if schedule.budget else []
        options += [] if schedule.cloud == "local" else ["--cloud", schedule.cloud, "--yes"]
        return ["sweep", schedule.job, "--name", run, *options]
    cloud_options = [] if schedule.cloud == "local" else ["--spot", "--cloud", schedule.cloud, "--yes"]
    return ["launch", schedule.job, "--name", run, *cloud_options]


def result(execution: Execution, *, running: bool) -> str:
    """Describe the result of an execution in a few words.

    Args:
        execution: The execution.
        running: Whether it is still running, as its lease shows.
    """
    if execution.note:
        return execution.note
    if execution.exit_code is None:
        return "running" if running else "interrupted"
    return {0: "done", **dict.fromkeys(STOPPED_EXITS, "stopped")}.get(
        execution.exit_code, f"failed with {execution.exit_code}"
    )


def wake_minutes(cron: str) -> tuple[int, ...]:
    """Return the minutes of every hour at which to check whether a schedule is due, right in every time zone.

    A crontab uses the machine's time zone, and Debian's cron does not support CRON_TZ; an hourly check is right in
    every zone, also on days with a clock change, and finds what was missed while the machine was off.
    """
    minutes = CronSim(cron, EPOCH).minutes
    return tuple(sorted({(minute + offset) % 60 for minute in minutes for offset in ZONE_OFFSETS_MINUTES}))


def _parses(cron: str) -> bool:
    try:
        CronSim(cron, EPOCH)
    except CronSimError:
        return False
    return True
