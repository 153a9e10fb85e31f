"""Start scheduled runs by EventBridge Scheduler; see `idletrain.providers.protocol.CloudSchedules`."""

from __future__ import annotations

from pathlib import Path

from idletrain.cloud.account import CloudMachine
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import eventbridge, resources, starter_node
from idletrain.job import Job
from idletrain.schedules.cron import Execution, Schedule


class AwsSchedules:
    """Schedules of AWS accounts; each job names its region."""

    def faults(self, schedule: Schedule, image: str | None) -> list[str]:
        return eventbridge.faults(schedule, image)

    def install(self, schedule: Schedule, job: Job, packed: bytes | None, version: str) -> None:
        resources.install(Account(job.cloud.region), schedule, job, packed, version)

    def remove(self, name: str, job: Job) -> None:
        resources.remove(Account(job.cloud.region), name, job)

    def history(self, name: str, job: Job, count: int) -> list[tuple[Execution, bool]]:
        return resources.history(Account(job.cloud.region), name, job, count)

    def start_run(self, machine: CloudMachine, directory: Path) -> None:
        account = machine.account()
        assert isinstance(account, Account)
        starter_node.start_run(machine, account, directory)
