"""When a schedule is due and what becomes of it: cron times, catch-up of missed ones, overlap with a run that goes on.

Knows no clock and no files: the time and the history come with the question. Cron lines mean what they mean to Debian's
cron, changes of the clock included: a time that the spring skips is due when the clock has jumped, a time that the
autumn repeats is due once; lines with a `*` in front of minute or hour go by the hours that really pass.
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

# Behind it comes -YYYYMMDD-HHMM, and a run's name is a DNS label of at most 63 characters.
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,47}[a-z0-9])?")
FIELDS = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT",
}
EPOCH = datetime(2026, 1, 1)  # any will do where only the line's syntax is asked about
# Where a due time may be found, the likely places first, so that a line for every minute costs no more than a rare one.
LOOK_BACK = (timedelta(hours=1), timedelta(days=1), timedelta(days=31), timedelta(days=366))
STOPPED_EXITS = (130, 143)  # after a SIGINT, which launches answer every order to end with, and a SIGTERM
ZONE_OFFSETS_MINUTES = (0, 15, 30, 45)  # every zone of today is a multiple of 15 minutes away from every other


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job that is to run again and again.

    Attributes:
        cron: Five fields, in the time zone `tz`.
        job: The job file, absolute.
        directory: Where it is run from.
        cloud: Where its nodes come from: local, sandbox or aws.
        on: What starts it: crontab, systemd, loop or aws.
        if_running: What happens when the run before still goes on: skip or queue.
        created: When it was made; times before it are nobody's.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One time that a schedule was due, and what came of it.

    Attributes:
        due: The scheduled time that it stands for.
        started: None while it waits, or if it was skipped.
        exit_code: That of the run; None while it goes on.
        note: Why it did not run.
    """

    due: datetime
    run: str
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    note: str = ""


class DueDecision(enum.Enum):
    """What to do about a due time."""

    RUN = "run"
    WAIT = "wait"
    SKIP = "skip"


def name_fault(name: str) -> str | None:
    """What is wrong with a schedule's name, as a sentence."""
    if NAME.fullmatch(name):
        return None
    return f"NAME: {name!r} should be lower-case letters, digits and hyphens, at most 49"


def zone_fault(tz: str) -> str | None:
    """What is wrong with a time zone, as a sentence."""
    try:
        zoneinfo.ZoneInfo(tz)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        close = difflib.get_close_matches(tz, zoneinfo.available_timezones(), n=1)
        return f"--tz: {tz!r} is not a time zone; {f'did you mean {close[0]}?' if close else 'try Europe/Paris or UTC'}"
    return None


def cron_fault(cron: str) -> str | None:
    """What is wrong with a cron line, as a sentence."""
    fields = cron.split()
    if len(fields) != len(FIELDS):
        return f"--cron: {cron!r} should be minute hour day-of-month month day-of-week, such as '0 2 * * *' for 02:00"
    try:
        next(CronSim(cron, EPOCH))
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        number = list(FIELDS).index(name)
        if name != "day-of-month" or not _reads(f"* * {fields[number]} * *"):
            return f"--cron: {fields[number]!r} is no {name}; use {FIELDS[name]}, lists 1,3, ranges 1-5 or steps */10"
    except StopIteration:
        pass
    else:
        return None
    return f"--cron: {cron!r} never comes; choose a day that the month has"


def times(cron: str, tz: str, after: datetime) -> Iterator[datetime]:
    """The times (UTC) of a valid cron line after a moment, in order, for fifty years at least."""
    latest = after.astimezone(UTC)
    for found in CronSim(cron, after.astimezone(zoneinfo.ZoneInfo(tz))):
        at = found.astimezone(UTC)
        if at > latest:  # from within the hour that the autumn repeats, the first look may find one that is past
            latest = at
            yield at


def due(schedule: Schedule, history: Sequence[Execution], now: datetime) -> datetime | None:
    """The newest scheduled time that has come and was not attended to; older ones are not made up for."""
    attended = max([schedule.created, *(execution.due for execution in history)])
    for start in (*(now - span for span in LOOK_BACK), attended):
        newest = None
        for at in times(schedule.cron, schedule.tz, max(start, attended)):
            if at > now:
                break
            newest = at
        if newest or start <= attended:
            return newest
    return None


def judge(schedule: Schedule, history: Sequence[Execution], at: datetime, running: bool, waiting: bool) -> DueDecision:
    """What to do about a due time.

    Args:
        running: Whether a run of this schedule goes on now.
        waiting: Whether another one waits for that to end.
    """
    if running and schedule.if_running == "queue":
        return DueDecision.SKIP if waiting else DueDecision.WAIT
    covered = any(e.started and e.ended and e.started <= at < e.ended for e in history)
    if running or (covered and schedule.if_running == "skip"):
        return DueDecision.SKIP
    return DueDecision.RUN


def run_name(name: str, at: datetime) -> str:
    """The name of a schedule's run; in UTC, where no minute comes twice."""
    return f"{name}-{at.astimezone(UTC):%Y%m%d-%H%M}"


def launch_arguments(schedule: Schedule, run: str) -> list[str]:
    """The arguments of `idletrain` that start a run."""
    rented = [] if schedule.cloud == "local" else ["--spot", "--cloud", schedule.cloud, "--yes"]
    return ["launch", schedule.job, "--name", run, *rented]


def result(execution: Execution, *, running: bool) -> str:
    """What came of an execution, in a few words.

    Args:
        running: Whether it goes on, as its lease tells.
    """
    if execution.note:
        return execution.note
    if execution.exit_code is None:
        return "running" if running else "cut off"
    return {0: "done", **dict.fromkeys(STOPPED_EXITS, "stopped")}.get(
        execution.exit_code, f"failed with {execution.exit_code}"
    )


def wake_minutes(cron: str) -> tuple[int, ...]:
    """The minutes of every hour at which to ask whether a schedule is due, in whatever zone the asking clock is set to.

    A crontab goes by the machine's zone, and Debian's cron knows no CRON_TZ; an hourly question is right in every zone,
    also on the days when one of the two clocks changes, and finds what was missed while the machine was off.
    """
    minutes = CronSim(cron, EPOCH).minutes
    return tuple(sorted({(minute + offset) % 60 for minute in minutes for offset in ZONE_OFFSETS_MINUTES}))


def _reads(cron: str) -> bool:
    try:
        CronSim(cron, EPOCH)
    except CronSimError:
        return False
    return True
