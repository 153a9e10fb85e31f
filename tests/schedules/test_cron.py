"""Cron times over changes of the clock, catch-up and overlap, as tables; no clock and no files."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import a_schedule

from idletrain.schedules.cron import (
    DueDecision,
    Execution,
    Schedule,
    cron_fault,
    due,
    judge,
    launch_arguments,
    name_fault,
    result,
    run_name,
    times,
    wake_minutes,
    zone_fault,
)
from idletrain.sweeps.grid import parse_varied, trials

PARIS = "Europe/Paris"
FIVE = "should be minute hour day-of-month month day-of-week, such as '0 2 * * *' for 02:00"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def nightly(**changes: Any) -> Schedule:
    fields = {"tz": "UTC", "cloud": "local", "on": "crontab", "created": at("2026-03-01T12:00")}
    return a_schedule(**{**fields, **changes})


def execution(due_at: str, started: str | None = None, ended: str | None = None) -> Execution:
    moments = {"started": at(started) if started else None, "ended": at(ended) if ended else None}
    return Execution(due=at(due_at), run="r", **moments)


# The night of 29 March 2026 has no 02:00 to 03:00 in Paris; that of 25 October has it twice.
SPRING, AUTUMN = "2026-03-28T12:00", "2026-10-24T12:00"


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        # Before the change +01:00 and then +02:00: what the night skips is due when the clock has jumped, once.
        ("30 2 * * *", SPRING, ["2026-03-29T01:00", "2026-03-30T00:30", "2026-03-31T00:30"]),
        ("0,30 2 * * *", SPRING, ["2026-03-29T01:00", "2026-03-30T00:00", "2026-03-30T00:30"]),
        ("0 3 * * *", SPRING, ["2026-03-29T01:00", "2026-03-30T01:00", "2026-03-31T01:00"]),
        # What repeats itself within the hour has nothing to make up for.
        ("*/30 2 * * *", SPRING, ["2026-03-30T00:00", "2026-03-30T00:30", "2026-03-31T00:00"]),
        # In autumn 02:30 comes twice and the night's run once, at the first.
        ("30 2 * * *", AUTUMN, ["2026-10-25T00:30", "2026-10-26T01:30", "2026-10-27T01:30"]),
        # Asked in between the two: today's has been.
        ("30 2 * * *", "2026-10-25T01:10", ["2026-10-26T01:30", "2026-10-27T01:30", "2026-10-28T01:30"]),
        # Every hour means every hour, also the repeated one.
        ("30 * * * *", "2026-10-24T23:45", ["2026-10-25T00:30", "2026-10-25T01:30", "2026-10-25T02:30"]),
        ("30 * * * *", "2026-03-29T00:00", ["2026-03-29T00:30", "2026-03-29T01:30", "2026-03-29T02:30"]),
    ],
)
def test_clock_changes_lose_and_double_nothing(cron: str, after: str, expected: list[str]) -> None:
    assert list(itertools.islice(times(cron, PARIS, at(after)), 3)) == [at(text) for text in expected]


@settings(deadline=None)
@given(
    minute=st.integers(0, 59),
    hour=st.integers(0, 23),
    zone=st.sampled_from([PARIS, "America/St_Johns", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC"]),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
)
def test_a_daily_time_comes_once_a_calendar_day_whatever_the_clock_does(
    minute: int, hour: int, zone: str, start: datetime
) -> None:
    due_times = list(itertools.islice(times(f"{minute} {hour} * * *", zone, start.replace(tzinfo=UTC)), 400))
    days = [moment.astimezone(ZoneInfo(zone)).date() for moment in due_times]
    assert all(later - earlier == timedelta(days=1) for earlier, later in itertools.pairwise(days))
    assert all(earlier < later for earlier, later in itertools.pairwise(due_times))


@pytest.mark.parametrize(
    ("now", "history", "expected"),
    [
        ("2026-03-02T01:59", [], None),
        ("2026-03-02T02:00", [], "2026-03-02T02:00"),
        # Started, and whatever became of it: not again.
        ("2026-03-02T02:15", ["2026-03-02T02:00"], None),
        # The machine was off for three nights: one of them is made up for, the last.
        ("2026-03-05T08:00", ["2026-03-02T02:00"], "2026-03-05T02:00"),
        ("2026-03-05T08:15", ["2026-03-02T02:00", "2026-03-05T02:00"], None),
        # What was before the schedule is nobody's.
        ("2026-03-01T12:01", [], None),
        # By hand at eight: that made up for the night.
        ("2026-03-02T09:00", ["2026-03-02T08:00"], None),
    ],
)
def test_a_time_is_due_once_and_missed_ones_are_made_up_for_at_most_once(
    now: str, history: list[str], expected: str | None
) -> None:
    assert due(nightly(), [execution(text) for text in history], at(now)) == (at(expected) if expected else None)


@settings(deadline=None)
@given(
    cron=st.sampled_from(["* * * * *", "*/7 3 * * *", "0 2 * * *", "30 2 * * SUN", "0 0 1 * *", "0 0 29 2 *"]),
    created=st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)),
    off=st.timedeltas(timedelta(0), timedelta(days=3)),
)
def test_what_is_due_is_the_last_of_all_times_since(cron: str, created: datetime, off: timedelta) -> None:
    since = created.replace(tzinfo=UTC)
    passed = list(itertools.takewhile(lambda t: t <= since + off, times(cron, PARIS, since)))
    assert due(nightly(cron=cron, tz=PARIS, created=since), [], since + off) == (passed[-1] if passed else None)


def test_a_leap_day_long_ago_is_still_found() -> None:
    schedule = nightly(cron="0 0 29 2 *", created=at("2026-01-01"))
    assert due(schedule, [], at("2031-01-01")) == at("2028-02-29")


@pytest.mark.parametrize(
    ("if_running", "running", "waiting", "expected"),
    [
        ("skip", False, False, DueDecision.RUN),
        ("skip", True, False, DueDecision.SKIP),
        ("queue", False, False, DueDecision.RUN),
        ("queue", True, False, DueDecision.WAIT),
        ("queue", True, True, DueDecision.SKIP),
    ],
)
def test_overlap(if_running: str, running: bool, waiting: bool, expected: DueDecision) -> None:
    schedule = nightly(if_running=if_running)
    assert judge(schedule, [], at("2026-03-02T02:00"), running=running, waiting=waiting) is expected


@pytest.mark.parametrize(("if_running", "expected"), [("skip", DueDecision.SKIP), ("queue", DueDecision.RUN)])
def test_a_time_that_passed_during_a_run_is_judged_as_if_asked_then(if_running: str, expected: DueDecision) -> None:
    """systemd starts no second service beside one that runs, so the question comes when that has ended."""
    history = [execution("2026-03-02T02:00", "2026-03-02T02:00", "2026-03-03T05:00")]
    schedule = nightly(if_running=if_running)
    assert judge(schedule, history, at("2026-03-03T02:00"), running=False, waiting=False) is expected
    assert judge(schedule, history, at("2026-03-04T02:00"), running=False, waiting=False) is DueDecision.RUN


@pytest.mark.parametrize(
    ("cron", "sentence"),
    [
        ("61 2 * * *", "--cron: '61' is no minute; use 0-59, lists 1,3, ranges 1-5 or steps */10"),
        ("0 2 * * MOO", "--cron: 'MOO' is no day-of-week; use 0-7 or SUN-SAT, lists 1,3, ranges 1-5 or steps */10"),
        ("0 2 32 * *", "--cron: '32' is no day-of-month; use 1-31, lists 1,3, ranges 1-5 or steps */10"),
        ("0 2 30 2 *", "--cron: '0 2 30 2 *' never comes; choose a day that the month has"),
        ("0 2 31 4,6 *", "--cron: '0 2 31 4,6 *' never comes; choose a day that the month has"),
        ("0 2 * * MON#5 *", f"--cron: '0 2 * * MON#5 *' {FIVE}"),
        ("@daily", f"--cron: '@daily' {FIVE}"),
    ],
)
def test_a_bad_cron_line_is_a_sentence(cron: str, sentence: str) -> None:
    assert cron_fault(cron) == sentence


@pytest.mark.parametrize("cron", ["0 2 * * *", "*/15 8-18 * * mon-fri", "0 0 29 2 *", "0 0 L * *", "0 0 30 2 MON"])
def test_good_cron_lines_pass(cron: str) -> None:
    assert cron_fault(cron) is None


def test_a_bad_zone_is_a_sentence_with_its_neighbour() -> None:
    assert zone_fault("Europ/Paris") == "--tz: 'Europ/Paris' is not a time zone; did you mean Europe/Paris?"
    for tz in ("Europe", "../etc/passwd", ""):
        fault = zone_fault(tz)
        assert fault is not None
        assert fault.startswith(f"--tz: {tz!r} is not a time zone; ")
    assert zone_fault(PARIS) is None


def test_a_name_leaves_room_for_the_time_in_its_runs() -> None:
    longest = "n" * 49
    assert name_fault(longest) is None
    assert len(run_name(longest, at("2026-03-02T02:00"))) == 63
    for bad in (longest + "n", "Nightly", "-n", "", "../n", "a.b"):
        assert name_fault(bad) == f"NAME: {bad!r} should be lower-case letters, digits and hyphens, at most 49"


def test_the_name_of_a_sweep_leaves_room_for_its_trials() -> None:
    longest, varied = "n" * 42, ["training.seed=1,2"]
    assert name_fault(longest, varied) is None
    run = run_name(longest, at("2026-03-02T02:00"))
    job = {"name": run, "model": {"factory": "m:f"}, "data": {"name": "digits"}}
    assert [len(trial.job.name) for trial in trials(job, [parse_varied(*varied)])] == [63, 63]
    assert name_fault(longest + "n", varied) == (
        f"NAME: {longest + 'n'!r} should be lower-case letters, digits and hyphens, at most 42 with --set"
    )


def test_run_names_are_of_utc_where_no_minute_comes_twice() -> None:
    twice = [t.astimezone(ZoneInfo(PARIS)) for t in itertools.islice(times("*/30 2 * * *", PARIS, at(AUTUMN)), 4)]
    assert [f"{t:%H:%M}" for t in twice] == ["02:00", "02:30", "02:00", "02:30"]
    assert len({run_name("n", t) for t in twice}) == 4
    assert run_name("nightly", at("2026-03-02T02:00")) == "nightly-20260302-0200"


def test_what_a_run_is_started_with() -> None:
    assert launch_arguments(nightly(), "r") == ["launch", "/home/me/job.yaml", "--name", "r"]
    assert launch_arguments(nightly(cloud="aws"), "r")[4:] == ["--spot", "--cloud", "aws", "--yes"]


def test_what_a_sweep_is_started_with() -> None:
    both = nightly(varied=("a=1,2", "b=3"), cloud="local")
    sets = ["--set", "a=1,2", "--set", "b=3"]
    assert launch_arguments(both, "r") == ["sweep", "/home/me/job.yaml", "--name", "r", *sets]
    on_aws = launch_arguments(nightly(varied=("a=1",), budget="5usd", cloud="aws"), "r")
    assert on_aws[6:] == ["--budget", "5usd", "--cloud", "aws", "--yes"]


@settings(deadline=None)
@given(
    minute=st.integers(0, 59),
    zone=st.sampled_from([PARIS, "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Chatham"]),
    machine=st.sampled_from(["UTC", "America/St_Johns", "Australia/Eucla"]),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),
)
def test_a_machine_of_any_zone_asks_at_the_minute_when_a_time_comes(
    minute: int, zone: str, machine: str, start: datetime
) -> None:
    cron = f"{minute} 5 * * *"  # no change of the clock falls between four and six
    coming = next(times(cron, zone, start.replace(tzinfo=UTC)))
    assert coming.astimezone(ZoneInfo(machine)).minute in wake_minutes(cron)
    assert len(wake_minutes(cron)) == 4


def test_results_in_words() -> None:
    done = execution("2026-03-02T02:00", "2026-03-02T02:00", "2026-03-02T03:00")
    open_ = execution("2026-03-02T02:00", "2026-03-02T02:00")
    assert result(Execution(due=done.due, run="r", exit_code=0), running=False) == "done"
    assert result(Execution(due=done.due, run="r", exit_code=2), running=False) == "failed with 2"
    assert result(Execution(due=done.due, run="r", exit_code=130), running=False) == "stopped"
    assert result(Execution(due=done.due, run="r", note="waiting"), running=True) == "waiting"
    assert (result(open_, running=True), result(open_, running=False)) == ("running", "interrupted")
