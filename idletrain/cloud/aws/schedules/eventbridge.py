"""Run a schedule without a machine of one's own: EventBridge Scheduler starts a starter machine, which starts the run.

Builds request bodies and sends them with a given client. AWS skips a time that the spring skips, where cron (and
idletrain on a machine) runs it when the clock has jumped; in the autumn both run once. See AWS, "Schedule types",
"Using universal targets" and "Adding context attributes" in the EventBridge Scheduler User Guide.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cronsim import CronSim

from idletrain.cloud.aws import requests
from idletrain.cloud.machines import TAG, LaunchSite, Pool
from idletrain.machine_settings import NO_IMAGE
from idletrain.schedules.cron import EPOCH, Schedule, cron_fault

RUN_INSTANCES = "arn:aws:scheduler:::aws-sdk:ec2:runInstances"
SCHEDULED_TIME = "<aws.scheduler.scheduled-time>"  # AWS replaces it by 2026-03-01T02:00:00Z
# No capacity, or throttled: a nightly run may start a quarter of an hour late, and an hourly one comes again anyway.
RETRY_SECONDS = 900
RETRIES = 10
MONTH_DAYS = range(1, 32)
WEEKDAYS = range(1, 8)  # 1 is Sunday
CronItem = int | tuple[int, int]


class NoAwsFormError(Exception):
    """A cron line has no equivalent in EventBridge Scheduler; the message names the part."""


@dataclass(frozen=True, kw_only=True)
class StarterSpec:
    """The starter machine, which starts a schedule's runs.

    Attributes:
        site: Its network and launch template, which holds image and user data.
        pool: Its instance type and zone.
        profile: Its instance profile.
        role_arn: The role that EventBridge Scheduler assumes; it may start such a machine and pass its profile.
        tags: Its tags, without those that are known only when it starts.
    """

    site: LaunchSite
    pool: Pool
    profile: str
    role_arn: str
    tags: Mapping[str, str]


def schedule_expression(cron: str) -> str:
    """Translate a valid five-field cron line to AWS: `cron(minutes hours day-of-month month day-of-week year)`.

    Raises:
        NoAwsFormError: AWS has no equivalent.
    """
    line = CronSim(cron, EPOCH)
    days, weekdays = _days(line)
    minutes, hours = _listed(line.minutes, range(60)), _listed(line.hours, range(24))
    return f"cron({minutes} {hours} {days} {_listed(line.months, range(1, 13))} {weekdays} *)"


def faults(schedule: Schedule, image: str | None) -> list[str]:
    """Return the reasons why AWS cannot start a schedule's runs by itself, one sentence each.

    Args:
        schedule: The schedule.
        image: The container image that machines run, if the job names one.
    """
    reasons = []
    if image is None:
        reasons.append(NO_IMAGE)
    if schedule.cloud != "aws":
        reasons.append(f"--cloud: {schedule.cloud} is not where --on aws starts runs; leave it out")
    if schedule.if_running == "queue":
        reasons.append("--if-running: queue needs a machine that waits; use skip with --on aws")
    if cron_fault(schedule.cron) is None:
        try:
            schedule_expression(schedule.cron)
        except NoAwsFormError as error:
            reasons.append(f"--cron: {schedule.cron!r} has no form on AWS: {error}")
    return reasons


def create_schedule(schedule: Schedule, starter: StarterSpec) -> dict[str, Any]:
    """Return the body of `scheduler.create_schedule`; the same for the same schedule, so that it can be sent again.

    Raises:
        NoAwsFormError: its cron line has no equivalent on AWS.
    """
    body = {
        "Name": _aws_name(schedule.name),
        "Description": f"idletrain: {schedule.job}"[:512],
        "ScheduleExpression": schedule_expression(schedule.cron),
        "ScheduleExpressionTimezone": schedule.tz,
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "State": "ENABLED",
        "ActionAfterCompletion": "NONE",
        "Target": {
            "Arn": RUN_INSTANCES,
            "RoleArn": starter.role_arn,
            "Input": json.dumps(run_instances(schedule, starter)),
            "RetryPolicy": {"MaximumEventAgeInSeconds": RETRY_SECONDS, "MaximumRetryAttempts": RETRIES},
        },
    }
    return body | {"ClientToken": _digest(body, schedule.created)}


def run_instances(schedule: Schedule, starter: StarterSpec) -> dict[str, Any]:
    """Return the RunInstances body that EventBridge sends each time; sent twice, it still starts one machine."""
    body = requests.head(starter.site, starter.pool, starter.profile, starter.tags, 0)
    tags = {**starter.tags, f"{TAG}created": SCHEDULED_TIME}
    return body | {
        # Contains the time and not the attempt: a retry after a lost answer must not start a second machine.
        "ClientToken": f"{schedule_id(schedule)}-{SCHEDULED_TIME}",
        "TagSpecifications": requests.tagged(tags, "instance", "volume"),
    }


def schedule_id(schedule: Schedule) -> str:
    """Return what tells a schedule from others of its name: those that were removed, and those added elsewhere."""
    return _digest(schedule.name, schedule.created)[:32]


def is_own(client: Any, schedule: Schedule) -> bool | None:
    """Return whether the schedule of this name on AWS is this one; None if there is none."""
    try:
        stored = client.get_schedule(Name=_aws_name(schedule.name))
    except client.exceptions.ResourceNotFoundException:
        return None
    return schedule_id(schedule) in stored["Target"].get("Input", "")


def install(client: Any, schedule: Schedule, starter: StarterSpec) -> None:
    """Create a schedule on AWS.

    Args:
        client: A boto3 client for `scheduler`.
        schedule: The schedule.
        starter: The machine that starts its runs.
    """
    client.create_schedule(**create_schedule(schedule, starter))


def remove(client: Any, name: str) -> None:
    """Delete a schedule on AWS; one that is gone is no error."""
    try:
        client.delete_schedule(Name=_aws_name(name))
    except client.exceptions.ResourceNotFoundException:
        return


def _aws_name(name: str) -> str:
    return f"idletrain-{name}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _days(line: CronSim) -> tuple[str, str]:
    """Return the fields day-of-month and day-of-week, one of which is `?` on AWS."""
    weekdays = {_weekday(day) if isinstance(day, int) else (_weekday(day[0]), day[1]) for day in line.weekdays}
    any_day, any_weekday = line.days.issuperset(MONTH_DAYS), weekdays.issuperset(WEEKDAYS)
    if any_weekday and (line.day_and or any_day):
        return _month_days(line.days), "?"
    if any_day and line.day_and:
        return "?", _week_days(weekdays)
    if any_day or any_weekday:  # joined by "or", and one of them always holds
        return "*", "?"
    junction = "and" if line.day_and else "or"
    raise NoAwsFormError(
        f"a day of the month {junction} of the week cannot be asked for together; make a schedule of each"
    )


def _weekday(day: int) -> int:
    return day % len(WEEKDAYS) + 1


def _month_days(days: Collection[int]) -> str:
    if CronSim.LAST_WEEKDAY in days or (CronSim.LAST in days and len(days) > 1):
        raise NoAwsFormError("LW, and L in a list of days, are unknown there; use L alone or days 1-31")
    return "L" if CronSim.LAST in days else _listed(days, MONTH_DAYS)


def _week_days(weekdays: Collection[CronItem]) -> str:
    if all(isinstance(day, int) for day in weekdays):
        return _listed(weekdays, WEEKDAYS)
    if len(weekdays) > 1:
        raise NoAwsFormError("a weekday with # or L must stand alone there; make a schedule of each")
    ((day, nth),) = weekdays  # type: ignore[misc]
    return f"{day}L" if nth == CronSim.LAST else f"{day}#{nth}"


def _listed(values: Collection[CronItem], everything: range) -> str:
    """Format numbers as `*` or as a list with ranges; steps and names are written out as numbers."""
    numbers = sorted(v for v in values if isinstance(v, int))
    if len(numbers) == len(everything):
        return "*"
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
