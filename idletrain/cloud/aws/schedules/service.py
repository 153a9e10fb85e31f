"""Start scheduled runs by EventBridge Scheduler; see `idletrain.providers.protocol.CloudSchedules`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from idletrain.cloud.account import CloudMachine
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import eventbridge, resources, starter_node
from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.schedules.cron import Execution, Schedule


class AwsSchedules:
    """Schedules of AWS accounts; each schedule names its account, and each job its region."""

    def faults(self, schedule: Schedule, image: str | None) -> list[str]:
        return eventbridge.faults(schedule, image)

    def resolved(self, schedule: Schedule, job: Job) -> tuple[Schedule, Job]:
        account = Account(job.cloud.region)
        if faults := resources.faults(account, schedule, job):
            raise JobError(faults)
        cloud = job.cloud.model_copy(update={"region": account.region})
        return replace(schedule, account=account.number), job.model_copy(update={"cloud": cloud})

    def install(self, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
        resources.install(_account_of(schedule, job), schedule, job, packed, version)

    def remove(self, schedule: Schedule, job: Job) -> None:
        resources.remove(_account_of(schedule, job), schedule, job)

    def history(self, schedule: Schedule, job: Job, count: int) -> list[tuple[Execution, bool]]:
        return resources.history(_account_of(schedule, job), schedule.name, job, count)

    def start_run(self, machine: CloudMachine, directory: Path) -> None:
        account = machine.account()
        assert isinstance(account, Account)
        starter_node.start_run(machine, account, directory)


def _account_of(schedule: Schedule, job: Job) -> Account:
    """Return the account and region of a schedule.

    Raises:
        RunError: the credentials are another account's, in which the schedule would seem to be gone.
    """
    account = Account(job.cloud.region)
    if schedule.account and schedule.account != account.number:
        raise RunError(
            f"schedule {schedule.name} is in AWS account {schedule.account}, but the credentials are of "
            f"{account.number}; set AWS_PROFILE to a profile of {schedule.account}"
        )
    return account
