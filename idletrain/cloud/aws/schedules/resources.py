"""Create and delete a schedule's AWS resources: job file in S3, security group, launch template, EventBridge schedule.

They outlive every run, so they are tagged `idletrain:schedule` without a run's name, and tearing down runs keeps them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from datetime import datetime

from idletrain.cloud import follow, record, workdir
from idletrain.cloud.aws import doctor, iam, requests, run_resources, user_data
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import explained, ignoring
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.aws.schedules import eventbridge
from idletrain.cloud.machines import TAG, Instance, LaunchSite, LeftoverResource, Pool
from idletrain.errors import JobError, RunError, reading
from idletrain.job import Job
from idletrain.observe.records import DONE_STATUSES
from idletrain.schedules.cron import Execution, Schedule, run_name
from idletrain.storage import ConflictError, S3Prefix

CLAIM = "claim"  # the id of the schedule whose job and records the prefix holds
JOB = "job.json"
EXECUTIONS = "executions/"
STARTER_SECONDS = 1800.0  # to boot, read prices and start a head node; then the machine ends by itself


def faults(account: Account, schedule: Schedule, job: Job) -> list[str]:
    """Return why an account cannot run a job by itself, one sentence each: what is missing, or a name that is taken."""
    prefix = prefix_of(account, schedule.name, job)
    with explained():
        bucket = doctor.missing_bucket(account, prefix.bucket)
        image = doctor.missing_image(account, job.cloud.image or "")
        taken = eventbridge.is_own(account.client("scheduler"), schedule) is False
        places = [f"AWS in {account.region}"] if taken else []
        if not bucket and not _may_hold(prefix, schedule):
            places.append(prefix.url)
    return [fault for fault in (bucket, image) if fault] + [_taken(schedule.name, place) for place in places]


def install(account: Account, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
    """Create all resources, replacing those of an earlier try; EventBridge's last, so that it starts no half.

    There must be no `faults`.

    Args:
        account: The AWS account.
        schedule: When the job starts.
        job: The job, in its present version: later changes of its file do not count.
        packed: Archive of the user's code, for a job with a workdir.
        version: Version of idletrain.

    Raises:
        JobError: another schedule took the name meanwhile, or no zone offers the head's type.
        RunError: AWS refuses.
    """
    remove(account, schedule, job)
    prefix = prefix_of(account, schedule.name, job)
    with explained():
        _claim(prefix, schedule)
        prefix.put(JOB, json.dumps(job.as_tree(), indent=1).encode())
        if packed is not None:
            prefix.put(workdir.WORKDIR_KEY, packed)
    tags = {f"{TAG}schedule": schedule.name, f"{TAG}owner": account.owner, f"{TAG}version": version}
    site = account.site(job.cloud.ami, gpu=False)
    site = dataclasses.replace(
        site, group=run_resources.make_group(account, _resource(schedule.name), site.vpc, tags, Patience())
    )
    text = user_data.user_data_for(STARTER_SECONDS, job.cloud.image or "")
    body = requests.launch_template(_resource(schedule.name), site, iam.STARTER, text, tags)
    starter = eventbridge.StarterSpec(
        site=dataclasses.replace(site, template=run_resources.make_template(account, body, Patience())),
        pool=_starter_pool(account, job, site),
        profile=iam.STARTER,
        role_arn=f"arn:{account.owner.split(':')[1]}:iam::{account.number}:role/{iam.SCHEDULE}",
        tags={**tags, f"{TAG}role": "starter", f"{TAG}prefix": prefix.url},
    )
    with explained():
        eventbridge.install(account.client("scheduler"), schedule, starter)


def _starter_pool(account: Account, job: Job, site: LaunchSite) -> Pool:
    """Return the pool of starter machines; EventBridge sends the same request each time, so it names one zone."""
    zones = sorted(account.zones_of(job.cloud.head) & site.subnets.keys())
    if not zones:
        raise JobError(
            f"cloud.head: {job.cloud.head} is not offered in {', '.join(sorted(site.subnets))}; name another"
        )
    return Pool("on-demand", job.cloud.head, zones[0])


def remove(account: Account, schedule: Schedule, job: Job) -> None:
    """Delete everything that `install` created, EventBridge's schedule first; what is gone is no error.

    What belongs to another schedule of this name stays.
    """
    client = account.client("scheduler")
    with explained():
        free = eventbridge.is_own(client, schedule) is not False
        if free:
            eventbridge.remove(client, schedule.name)
    if free:
        _remove_starter(account, schedule.name)
    prefix = prefix_of(account, schedule.name, job)
    with explained(), ignoring(("NoSuchBucket",)):
        if _may_hold(prefix, schedule):
            prefix.delete(prefix.names())


def _remove_starter(account: Account, name: str) -> None:
    """Delete the launch template and the group of starters, which are of the one schedule of this name in a region."""
    own_tag = [{"Name": f"tag:{TAG}schedule", "Values": [name]}]
    with explained():
        templates = account.ec2.describe_launch_templates(Filters=own_tag)["LaunchTemplates"]
        groups = account.ec2.describe_security_groups(Filters=own_tag)["SecurityGroups"]
    for template in templates:
        account.delete(LeftoverResource("template", template["LaunchTemplateId"], {}))
    for group in groups:
        account.delete(LeftoverResource("group", group["GroupId"], {}))


def _may_hold(prefix: S3Prefix, schedule: Schedule) -> bool:
    """Return whether a prefix is a schedule's, or nobody's."""
    claim = prefix.get(CLAIM)
    return claim is None or claim.content == eventbridge.schedule_id(schedule).encode()


def _claim(prefix: S3Prefix, schedule: Schedule) -> None:
    """Take a prefix for a schedule.

    Raises:
        JobError: another schedule has taken it.
    """
    try:
        prefix.put_if(CLAIM, eventbridge.schedule_id(schedule).encode(), None)
    except ConflictError:
        raise JobError(_taken(schedule.name, prefix.url)) from None


def _taken(name: str, place: str) -> str:
    return (
        f"NAME: {place} has a schedule {name} that was not added here; choose another name, or run `idletrain schedule "
        f"remove {name}` where it was added"
    )


def prefix_of(account: Account, name: str, job: Job) -> S3Prefix:
    """Return the S3 prefix of a schedule's job and its execution records."""
    return runs_of(account, job).below("schedules").below(name)


def runs_of(account: Account, job: Job) -> S3Prefix:
    """Return the S3 prefix of a job's runs: `checkpoint.to` if that is in S3, else in the account's own bucket."""
    to = job.checkpoint.to
    return S3Prefix.at(to if to.startswith("s3://") else f"s3://{account.bucket}/runs", account.s3)


def going_on(machines: Collection[Instance], name: str) -> list[str]:
    """Return the names of a schedule's runs that have a head node.

    Args:
        machines: All running machines of all runs.
        name: The schedule's name.
    """
    own_run = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{4}}")
    return sorted({m.run for m in machines if m.role == "head" and own_run.fullmatch(m.run)})


def note(prefix: S3Prefix, name: str, due: datetime, why: str = "") -> None:
    """Record that a scheduled time was handled, and why no run was started, if none was."""
    run = run_name(name, due)
    prefix.put(f"{EXECUTIONS}{run}", json.dumps({"due": due.isoformat(), "run": run, "note": why}).encode())


def history(account: Account, name: str, job: Job, count: int) -> list[tuple[Execution, bool]]:
    """Return a schedule's last executions, the oldest first, each with whether its run is still running.

    Raises:
        DamageError: an execution's record is not what was written.
    """
    prefix = prefix_of(account, name, job)
    with reading(f"a record in {prefix.url}", "take it away"), explained():
        stored = [prefix.get(key) for key in prefix.names(EXECUTIONS)[-count:]]
        records = [json.loads(item.content) for item in stored if item]
        return [_outcome(account, runs_of(account, job), fields) for fields in records]


def _outcome(account: Account, runs: S3Prefix, fields: dict[str, str]) -> tuple[Execution, bool]:
    due = datetime.fromisoformat(fields["due"])
    if fields["note"]:
        return Execution(due=due, run=fields["run"], note=fields["note"]), False
    execution = Execution(due=due, run=fields["run"], started=due)
    try:
        run_record = record.read(runs.below(execution.run))
    except RunError:
        return execution, False
    unended = run_record.state != "ended" and not run_record.failure
    if unended and not follow.head_is_lost(account, run_record):
        return execution, True
    summary = runs.below(execution.run).get(record.SUMMARY_KEY)
    completed = summary is not None and json.loads(summary.content)["status"] in DONE_STATUSES
    if unended and not completed:  # a head that is lost has no exit code
        return execution, False
    exit_code = 0 if completed and not run_record.failure else RunError.exit_code
    return dataclasses.replace(execution, exit_code=exit_code), False


def _resource(name: str) -> str:
    return f"schedule-{name}"
