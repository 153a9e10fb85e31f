"""What a schedule on AWS consists of: its job below a prefix, a group, a launch template, and EventBridge's schedule.

They outlive every run, so they carry `idletrain:schedule` and no run's name: what clears up after runs leaves them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from datetime import datetime

from idletrain.cloud import record, workdir
from idletrain.cloud.aws import doctor, iam, requests, user_data
from idletrain.cloud.aws.account import Account, Instance, LeftoverResource, explained
from idletrain.cloud.aws.requests import TAG, LaunchSite, Pool
from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.schedules import eventbridge
from idletrain.schedules.cron import Execution, Schedule, run_name
from idletrain.storage import S3Prefix

JOB = "job.json"
EXECUTIONS = "executions/"
STARTER = "starter"
STARTER_SECONDS = 1800.0  # to boot, look at the market and start a head; the machine ends by itself then


def install(account: Account, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
    """Make everything, in place of what an earlier try may have left; EventBridge's part last: no half is started.

    Args:
        account: Where.
        schedule: When.
        job: What; this and no later version of its file.
        packed: The user's own code, for a job with a workdir.
        version: Of idletrain.

    Raises:
        JobError: its bucket or its image is not there.
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
    site = dataclasses.replace(site, group=account.make_group(_resource(schedule.name), site.vpc, tags))
    text = user_data.user_data_for(STARTER_SECONDS, job.cloud.image or "")
    body = requests.launch_template(_resource(schedule.name), site, iam.STARTER, text, tags)
    starter = eventbridge.StarterSpec(
        site=dataclasses.replace(site, template=account.make_template(body)),
        pool=_starter_pool(account, job, site),
        profile=iam.STARTER,
        role_arn=f"arn:{account.owner.split(':')[1]}:iam::{account.number}:role/{iam.SCHEDULE}",
        tags={**tags, f"{TAG}role": STARTER, f"{TAG}prefix": prefix.url},
    )
    with explained():
        eventbridge.install(account.client("scheduler"), schedule, starter)


def _starter_pool(account: Account, job: Job, site: LaunchSite) -> Pool:
    """Where starters come from; EventBridge sends one and the same request each time, so it names one zone."""
    zones = sorted(account.zones_of(job.cloud.head) & site.subnets.keys())
    if not zones:
        raise JobError(
            f"cloud.head: {job.cloud.head} is not offered in {', '.join(sorted(site.subnets))}; name another"
        )
    return Pool("on-demand", job.cloud.head, zones[0])


def remove(account: Account, name: str, job: Job) -> None:
    """Take everything away that `install` made, EventBridge's part first; what is gone is no error."""
    mine = [{"Name": f"tag:{TAG}schedule", "Values": [name]}]
    with explained():
        eventbridge.remove(account.client("scheduler"), name)
        templates = account.ec2.describe_launch_templates(Filters=mine)["LaunchTemplates"]
        groups = account.ec2.describe_security_groups(Filters=mine)["SecurityGroups"]
    for template in templates:
        account.delete(LeftoverResource("template", template["LaunchTemplateId"], {}))
    for group in groups:
        account.delete(LeftoverResource("group", group["GroupId"], {}))
    prefix = prefix_of(account, name, job)
    with explained():
        prefix.delete(prefix.names())


def prefix_of(account: Account, name: str, job: Job) -> S3Prefix:
    """Where a schedule's job is, and what became of its executions."""
    return runs_of(account, job).below("schedules").below(name)


def runs_of(account: Account, job: Job) -> S3Prefix:
    """Where a job's runs go: below `checkpoint.to` if that is in S3, else in the account's own bucket."""
    to = job.checkpoint.to
    return S3Prefix.at(to if to.startswith("s3://") else f"s3://{account.bucket}/runs", account.s3)


def going_on(machines: Collection[Instance], name: str) -> list[str]:
    """The runs of a schedule that have a head.

    Args:
        machines: All machines of runs that are up.
    """
    mine = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{4}}")
    return sorted({m.run for m in machines if m.role == "head" and mine.fullmatch(m.run)})


def note(prefix: S3Prefix, name: str, due: datetime, why: str = "") -> None:
    """Write down that a scheduled time was attended to."""
    run = run_name(name, due)
    prefix.put(f"{EXECUTIONS}{run}", json.dumps({"due": due.isoformat(), "run": run, "note": why}).encode())


def history(account: Account, name: str, job: Job, count: int) -> list[tuple[Execution, bool]]:
    """A schedule's last executions, the oldest first, and whether each still goes on."""
    prefix = prefix_of(account, name, job)
    with explained():
        found = [prefix.get(key) for key in prefix.names(EXECUTIONS)[-count:]]
        noted = [json.loads(item.content) for item in found if item]
        return [_outcome(runs_of(account, job), fields) for fields in noted]


def _outcome(runs: S3Prefix, fields: dict[str, str]) -> tuple[Execution, bool]:
    due = datetime.fromisoformat(fields["due"])
    if fields["note"]:
        return Execution(due=due, run=fields["run"], note=fields["note"]), False
    execution = Execution(due=due, run=fields["run"], started=due)
    try:
        kept = record.read(runs.below(execution.run))
    except RunError:
        return execution, False
    if kept.state != "ended" and not kept.failure:
        return execution, True
    told = runs.below(execution.run).get(record.SUMMARY_KEY)
    well = told is not None and json.loads(told.content)["status"] in ("completed", "reached")
    return dataclasses.replace(execution, exit_code=0 if well and not kept.failure else RunError.exit_code), False


def _resource(name: str) -> str:
    return f"schedule-{name}"
