"""Create and delete a schedule's AWS resources: job file in S3, security group, launch template, EventBridge schedule.

They outlive every run, so they are tagged `idletrain:schedule` without a run's name, and tearing down runs keeps them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from datetime import datetime

from idletrain.cloud import record, workdir
from idletrain.cloud.aws import doctor, iam, requests, run_resources, user_data
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import explained
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.aws.schedules import eventbridge
from idletrain.cloud.machines import TAG, Instance, LaunchSite, LeftoverResource, Pool
from idletrain.errors import JobError, RunError, reading
from idletrain.job import Job
from idletrain.observe.records import DONE_STATUSES
from idletrain.schedules.cron import Execution, Schedule, run_name
from idletrain.storage import S3Prefix

JOB = "job.json"
EXECUTIONS = "executions/"
STARTER_SECONDS = 1800.0  # to boot, read prices and start a head node; then the machine ends by itself


def install(account: Account, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
    """Create all resources, replacing those of an earlier try; EventBridge's last, so that it starts no half.

    Args:
        account: The AWS account.
        schedule: When the job starts.
        job: The job, in its present version: later changes of its file do not count.
        packed: Archive of the user's code, for a job with a workdir.
        version: Version of idletrain.

    Raises:
        JobError: the job's bucket or image does not exist.
        RunError: AWS refuses.
    """
    with explained():
        missing = (
            doctor.missing_bucket(account, runs_of(account, job).bucket),
            doctor.missing_image(account, job.cloud.image or ""),
        )
    if faults := [fault for fault in missing if fault]:
        raise JobError(faults)
    remove(account, schedule.name, job)
    prefix = prefix_of(account, schedule.name, job)
    with explained():
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


def remove(account: Account, name: str, job: Job) -> None:
    """Delete everything that `install` created, EventBridge's schedule first; what is gone is no error."""
    own_tag = [{"Name": f"tag:{TAG}schedule", "Values": [name]}]
    with explained():
        eventbridge.remove(account.client("scheduler"), name)
        templates = account.ec2.describe_launch_templates(Filters=own_tag)["LaunchTemplates"]
        groups = account.ec2.describe_security_groups(Filters=own_tag)["SecurityGroups"]
    for template in templates:
        account.delete(LeftoverResource("template", template["LaunchTemplateId"], {}))
    for group in groups:
        account.delete(LeftoverResource("group", group["GroupId"], {}))
    prefix = prefix_of(account, name, job)
    with explained():
        prefix.delete(prefix.names())


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
        return [_outcome(runs_of(account, job), fields) for fields in records]


def _outcome(runs: S3Prefix, fields: dict[str, str]) -> tuple[Execution, bool]:
    due = datetime.fromisoformat(fields["due"])
    if fields["note"]:
        return Execution(due=due, run=fields["run"], note=fields["note"]), False
    execution = Execution(due=due, run=fields["run"], started=due)
    try:
        run_record = record.read(runs.below(execution.run))
    except RunError:
        return execution, False
    if run_record.state != "ended" and not run_record.failure:
        return execution, True
    summary = runs.below(execution.run).get(record.SUMMARY_KEY)
    completed = summary is not None and json.loads(summary.content)["status"] in DONE_STATUSES
    exit_code = 0 if completed and not run_record.failure else RunError.exit_code
    return dataclasses.replace(execution, exit_code=exit_code), False


def _resource(name: str) -> str:
    return f"schedule-{name}"
