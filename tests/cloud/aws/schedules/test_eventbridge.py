"""Request bodies for EventBridge Scheduler, checked against the services' own models and an account in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.session import Session
from botocore.validate import validate_parameters
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st
from moto import mock_aws
from nightly import a_schedule

from idletrain.cloud.aws.schedules import eventbridge
from idletrain.cloud.aws.schedules.eventbridge import SCHEDULED_TIME, NoAwsFormError, StarterSpec, schedule_expression
from idletrain.cloud.machines import LaunchSite, Pool
from idletrain.schedules.cron import Schedule, cron_fault

REGION = "eu-west-1"
SITE = LaunchSite(REGION, "vpc-1", {"eu-west-1b": "subnet-2", "eu-west-1a": "subnet-1"}, "ami-1", "sg-1", "lt-0123")
STARTER = StarterSpec(
    site=SITE,
    pool=Pool("on-demand", "t3.medium", "eu-west-1a"),
    profile="idletrain-starter",
    role_arn="arn:aws:iam::123456789012:role/idletrain-schedule",
    tags={"idletrain:schedule": "nightly", "idletrain:role": "starter", "idletrain:prefix": "s3://b/p/"},
)


def nightly(**changes: Any) -> Schedule:
    return a_schedule(**{"cron": "0 2 * * MON-FRI", **changes})


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty account in memory."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    with mock_aws():
        yield


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 2 * * *", "cron(0 2 * * ? *)"),
        ("*/15 * * * *", "cron(0,15,30,45 * * * ? *)"),
        ("30 8-18 * * 1-5", "cron(30 8-18 ? * 2-6 *)"),
        ("0 0 * * 0", "cron(0 0 ? * 1 *)"),
        ("0 0 * * 7", "cron(0 0 ? * 1 *)"),
        ("0 0 * * sat,sun", "cron(0 0 ? * 1,7 *)"),
        ("0 0 1,15 * *", "cron(0 0 1,15 * ? *)"),
        ("0 0 */10 jan-mar *", "cron(0 0 1,11,21,31 1-3 ? *)"),
        ("0 0 L * *", "cron(0 0 L * ? *)"),
        ("0 0 * * MON#2", "cron(0 0 ? * 2#2 *)"),
        ("0 0 * * 5L", "cron(0 0 ? * 6L *)"),
        ("0 0 * * 7L", "cron(0 0 ? * 1L *)"),
        ("0 0 1-31 * MON", "cron(0 0 * * ? *)"),  # any day of the month or a Monday: every day
        ("0 0 13 * 0-6", "cron(0 0 * * ? *)"),
        ("0-59 0-23 * * *", "cron(* * * * ? *)"),
    ],
)
def test_cron_lines_in_the_form_of_aws(cron: str, expected: str) -> None:
    assert schedule_expression(cron) == expected


@pytest.mark.parametrize(
    ("cron", "why"),
    [
        ("0 0 13 * FRI", "a day of the month or of the week cannot be asked for together"),
        ("0 0 */2 * FRI", "a day of the month and of the week cannot be asked for together"),
        ("0 0 LW * *", "LW, and L in a list of days, are unknown there"),
        ("0 0 1,L * *", "LW, and L in a list of days, are unknown there"),
        ("0 0 * * MON#1,MON#3", "a weekday with # or L must stand alone there"),
    ],
)
def test_what_aws_has_no_words_for_is_refused(cron: str, why: str) -> None:
    assert cron_fault(cron) is None
    with pytest.raises(NoAwsFormError, match=why):
        schedule_expression(cron)


def field(limits: range) -> st.SearchStrategy[str]:
    """One field of a cron line: a star, a step, or a list of numbers and ranges."""
    numbers = st.integers(limits[0], limits[-1])
    ranges = st.tuples(numbers, numbers).map(lambda ends: f"{min(ends)}-{max(ends)}")
    lists = st.lists(st.one_of(numbers.map(str), ranges), min_size=1, max_size=3).map(",".join)
    return st.one_of(st.just("*"), st.integers(1, 9).map(lambda step: f"*/{step}"), lists)


class AwsReading:
    """What an AWS expression means, read independently of how it was written."""

    def __init__(self, expression: str) -> None:
        fields = expression.removeprefix("cron(").removesuffix(")").split()
        self.minutes, self.hours, self.days, self.months, self.weekdays, self.years = fields

    def matches(self, at: datetime) -> bool:
        weekday = (at.weekday() + 1) % 7 + 1  # 1 is Sunday
        pairs = (
            (self.minutes, at.minute),
            (self.hours, at.hour),
            (self.days, at.day),
            (self.months, at.month),
            (self.weekdays, weekday),
        )
        return all(_in(text, number) for text, number in pairs)


def _in(text: str, number: int) -> bool:
    if text in ("*", "?"):
        return True
    spans = [part.split("-") for part in text.split(",")]
    return any(int(span[0]) <= number <= int(span[-1]) for span in spans)


@settings(deadline=None)
@given(
    fields=st.tuples(
        field(range(60)), field(range(24)), field(range(1, 32)), field(range(1, 13)), field(range(8)), st.booleans()
    ),
    start=st.datetimes(datetime(2026, 1, 1), datetime(2029, 1, 1)),
)
def test_aws_and_cron_agree_on_every_minute(fields: tuple[str, str, str, str, str, bool], start: datetime) -> None:
    minutes, hours, days, months, weekdays, by_week = fields
    cron = f"{minutes} {hours} {'*' if by_week else days} {months} {weekdays if by_week else '*'}"
    if cron_fault(cron):
        return
    expression = schedule_expression(cron)
    reading = AwsReading(expression)
    assert (reading.days == "?") != (reading.weekdays == "?")
    assert reading.years == "*"
    assert len(expression) <= 256
    coming = next(CronSim(cron, start))
    assert reading.matches(coming)
    probe = start.replace(second=0, microsecond=0) + timedelta(minutes=1)
    for minute in (probe + timedelta(minutes=97 * k) for k in range(200)):
        if minute >= coming:
            break
        assert not reading.matches(minute)


def test_sunday_is_aws_first_day() -> None:
    sunday = datetime(2026, 3, 1)
    assert sunday.isoweekday() == 7
    assert AwsReading(schedule_expression("0 0 * * SUN")).matches(sunday)


def test_the_bodies_are_what_the_services_take() -> None:
    session = Session()
    body = eventbridge.create_schedule(nightly(), STARTER)
    scheduler = session.get_service_model("scheduler", "2021-06-30")
    validate_parameters(body, scheduler.operation_model("CreateSchedule").input_shape)
    started = json.loads(body["Target"]["Input"])
    ec2 = session.get_service_model("ec2", "2016-11-15")
    validate_parameters(started, ec2.operation_model("RunInstances").input_shape)


def test_a_schedule_starts_one_machine_a_time_however_often_it_is_tried() -> None:
    body = eventbridge.create_schedule(nightly(), STARTER)
    assert body["ScheduleExpression"] == "cron(0 2 ? * 2-6 *)"
    assert body["ScheduleExpressionTimezone"] == "Europe/Paris"
    assert body["Target"]["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:runInstances"
    assert body["Target"]["RetryPolicy"] == {"MaximumEventAgeInSeconds": 900, "MaximumRetryAttempts": 10}
    started = json.loads(body["Target"]["Input"])
    assert (started["MinCount"], started["MaxCount"]) == (1, 1)
    assert started["LaunchTemplate"] == {"LaunchTemplateId": "lt-0123", "Version": "$Default"}
    token = started["ClientToken"]
    assert token.endswith(f"-{SCHEDULED_TIME}")
    assert len(token.replace(SCHEDULED_TIME, "2026-03-22T18:59:43Z")) <= 64
    assert "execution-id" not in token
    assert "attempt" not in token


def test_a_starter_learns_from_its_tags_what_it_is_and_for_when() -> None:
    started = json.loads(eventbridge.create_schedule(nightly(), STARTER)["Target"]["Input"])
    for group in started["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in group["Tags"]}
        assert tags["idletrain:role"] == "starter"
        assert "idletrain:run" not in tags  # what clears up after runs has nothing to do with it
        assert tags["idletrain:schedule"] == "nightly"
        assert tags["idletrain:created"] == SCHEDULED_TIME
        assert tags["idletrain:prefix"] == "s3://b/p/"
    assert {group["ResourceType"] for group in started["TagSpecifications"]} == {"instance", "volume"}


def test_the_same_schedule_has_the_same_token_and_another_one_another() -> None:
    tokens = [eventbridge.create_schedule(s, STARTER)["ClientToken"] for s in (nightly(), nightly(), nightly(tz="UTC"))]
    assert tokens[0] == tokens[1] != tokens[2]
    again = nightly(created=datetime(2026, 3, 2, tzinfo=UTC))
    assert eventbridge.create_schedule(again, STARTER)["ClientToken"] != tokens[0]


def test_an_account_takes_it_and_gives_it_back(account: None) -> None:
    client = boto3.client("scheduler", region_name=REGION)
    eventbridge.install(client, nightly(), STARTER)
    stored = client.get_schedule(Name="idletrain-nightly")
    assert stored["State"] == "ENABLED"
    assert stored["ActionAfterCompletion"] == "NONE"
    eventbridge.remove(client, "nightly")
    eventbridge.remove(client, "nightly")
    with pytest.raises(ClientError, match="ResourceNotFound"):
        client.get_schedule(Name="idletrain-nightly")


def test_what_aws_cannot_do_is_reported_all_at_once() -> None:
    assert eventbridge.faults(nightly(), "image") == []
    wanted = nightly(cron="0 0 13 * FRI", cloud="local", if_running="queue")
    faults = eventbridge.faults(wanted, None)
    assert [fault.split(":")[0] for fault in faults] == ["cloud.image", "--cloud", "--if-running", "--cron"]
    assert eventbridge.faults(nightly(cron="61 * * * *"), "image") == []  # told of where cron lines are read
