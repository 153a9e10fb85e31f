"""Provide machines of AWS EC2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from idletrain.cloud.account import CloudMachine
from idletrain.cloud.aws import doctor, iam, images
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.errors import explained
from idletrain.cloud.aws.metadata import Metadata
from idletrain.cloud.aws.schedules.service import AwsSchedules
from idletrain.job import Job
from idletrain.machine_settings import NO_IMAGE, CloudSettings
from idletrain.observe.records import Record
from idletrain.providers.protocol import CheckResult, CloudSchedules, LaunchRequest


class AwsProvider:
    """Spot and on-demand machines of an AWS account; see `CloudProvider`."""

    costs_money = True
    outlives_command = True
    boot_reason = "for its head to boot and to fetch its image, which takes a minute or two"

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request

    def faults(self, job: Job) -> list[str]:
        faults = [] if job.cloud.image else [NO_IMAGE]
        if self._request.churn_seconds or self._request.trace:
            faults.append("--churn, --trace: take nodes in the rehearsal cloud alone; use `idletrain interrupt` on AWS")
        return faults

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Do nothing: AWS is always there."""
        yield

    @contextlib.contextmanager
    def account(self, region: str | None) -> Iterator[Account]:
        with explained():
            yield Account(region)

    def launch_region(self, job: Job) -> str | None:
        return job.cloud.region

    def image(self, job: Job) -> str:
        return job.cloud.image or ""

    def image_fault(self, account: Account, image: str) -> str | None:
        return doctor.missing_image(account, image)

    def bucket_fault(self, account: Account, bucket: str) -> str | None:
        return doctor.missing_bucket(account, bucket)

    def examine(self, account: Account, settings: CloudSettings, gpu: bool) -> list[CheckResult]:
        return doctor.examine(account, settings, account.bucket, gpu=gpu)

    def launcher_policy(self, account: Account) -> iam.Policy:
        return iam.launcher_policy(iam.Scope(account=account.number, region=account.region, bucket=account.bucket))

    def machine(self) -> CloudMachine:
        return Metadata()

    def schedules(self) -> CloudSchedules | None:
        return AwsSchedules()

    def pinned_image(self, account: Account, image: str) -> str:
        return images.pinned(account, image)

    def interrupted_text(self, run: str, address: str) -> str:
        return f"{run} goes on by itself; end it with: idletrain down {address}"

    def seen_from_here(self, event: Record, _account: Account) -> Record:
        """Name the command that opens a tunnel in place of the dashboard's address, which is the head's loopback."""
        if event["kind"] != "run_started":
            return event
        return {**event, "dashboard": f"`idletrain dashboard {event['run']}`", "dashboard_note": ""}

    def tunnel_command(self, account: Account, head: str, port: str) -> list[str] | None:
        ports = f'{{"portNumber": ["{port}"], "localPortNumber": ["{port}"]}}'
        target = ["aws", "ssm", "start-session", "--region", account.region, "--target", head]
        return [*target, "--document-name", iam.TUNNEL_DOCUMENT, "--parameters", ports]
