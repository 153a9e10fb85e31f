"""Run `idletrain node` in the role of a starter: EventBridge starts it at a schedule's times; it starts a run and ends.

It does what `idletrain launch --spot --detach` does on a laptop; the run's head node is another machine.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from idletrain.cloud import launcher
from idletrain.cloud.account import CloudMachine
from idletrain.cloud.aws import images
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import resources
from idletrain.cloud.machines import RUNNING_STATES, TAG
from idletrain.cloud.workdir import unpack
from idletrain.errors import IdletrainError, RunError, reading
from idletrain.job import Job
from idletrain.schedules.cron import run_name
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
WORKDIR_NAME = "workdir"


def start_run(machine: CloudMachine, account: Account, directory: Path) -> None:
    """Start the run that is due, unless the previous one is still running.

    Args:
        machine: This machine.
        account: Its account.
        directory: An empty directory to work in.

    Raises:
        IdletrainError: it cannot be started; the reason is also written below the schedule's prefix.
    """
    tags = machine.tags()
    name, due = tags[TAG + "schedule"], datetime.fromisoformat(tags[TAG + "created"])
    prefix = S3Prefix.at(tags[TAG + "prefix"], account.s3)
    if running := resources.going_on(account.instances(states=RUNNING_STATES), name):
        logger.info("skipped: %s is still running", running[0])
        resources.note(prefix, name, due, "skipped: still running")
        return
    try:
        _start(account, prefix, run_name(name, due), directory)
    except IdletrainError as error:
        resources.note(prefix, name, due, f"not started: {error}")
        raise
    resources.note(prefix, name, due)


def _start(account: Account, prefix: S3Prefix, run: str, directory: Path) -> None:
    stored = prefix.get(resources.JOB)
    if stored is None:
        raise RunError(f"{prefix.url} holds no job; remove the schedule and add it again")
    with reading(prefix.url + resources.JOB, "remove the schedule and add it again"):
        job = Job.model_validate_json(stored.content)
    if job.workdir is not None:
        (directory / WORKDIR_NAME).mkdir()
        unpack(prefix, directory / WORKDIR_NAME)
        job = job.model_copy(update={"workdir": os.fspath(directory / WORKDIR_NAME)})
    job = job.model_copy(update={"name": run})
    plan = launcher.make_spot_plan(job, account, directory)
    image = images.pinned(account, job.cloud.image or "")
    launcher.start(plan, account, resources.runs_of(account, job).below(run), image=image, resume=False)
