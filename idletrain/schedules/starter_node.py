"""`idletrain node` in the role of a starter: what EventBridge starts at a schedule's times, to start a run and end.

It does what `idletrain launch --spot --detach` does on a laptop; the run's head is a machine of its own.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from idletrain.cloud import launcher
from idletrain.cloud.aws.account import RUNNING_STATES, Account
from idletrain.cloud.aws.metadata import Metadata
from idletrain.cloud.aws.requests import TAG
from idletrain.cloud.workdir import unpack
from idletrain.errors import IdletrainError, RunError
from idletrain.job import Job
from idletrain.schedules import aws_resources
from idletrain.schedules.cron import run_name
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
WORKDIR_NAME = "workdir"


def start_run(metadata: Metadata, place: Path) -> None:
    """Start the run that is due, unless the one before still goes on.

    Args:
        metadata: What the machine knows of itself.
        place: An empty directory to work in.

    Raises:
        IdletrainError: it cannot be started; the reason is below the schedule's prefix, too.
    """
    tags = metadata.tags()
    name, due = tags[TAG + "schedule"], datetime.fromisoformat(tags[TAG + "created"])
    account = Account(metadata.region())
    prefix = S3Prefix.at(tags[TAG + "prefix"], account.s3)
    if going_on := aws_resources.going_on(account.instances(states=RUNNING_STATES), name):
        logger.info("skipped: %s is still running", going_on[0])
        aws_resources.note(prefix, name, due, "skipped: still running")
        return
    try:
        _start(account, prefix, run_name(name, due), place)
    except IdletrainError as error:
        aws_resources.note(prefix, name, due, f"not started: {error}")
        raise
    aws_resources.note(prefix, name, due)


def _start(account: Account, prefix: S3Prefix, run: str, place: Path) -> None:
    kept = prefix.get(aws_resources.JOB)
    if kept is None:
        raise RunError(f"{prefix.url} holds no job; remove the schedule and add it again")
    job = Job.model_validate_json(kept.content)
    if job.workdir is not None:
        (place / WORKDIR_NAME).mkdir()
        unpack(prefix, place / WORKDIR_NAME)
        job = job.model_copy(update={"workdir": os.fspath(place / WORKDIR_NAME)})
    job = job.model_copy(update={"name": run})
    plan = launcher.make_spot_plan(job, account, place)
    launcher.start(
        plan, account, aws_resources.runs_of(account, job).below(run), image=job.cloud.image or "", resume=False
    )
