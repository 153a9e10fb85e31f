"""Provide the rehearsal cloud: a process on this machine that answers as AWS does, and machines that are processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from idletrain import storage
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.provider import AwsProvider
from idletrain.cluster import owned_process
from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.observe.records import Record
from idletrain.providers.protocol import CloudSchedules
from idletrain.simulation.trace import read_trace

MOTO = "'moto[ec2,iam,s3,server,ssm]>=5.2'"  # the extra `sandbox`, for those who have no index with the package
IMAGE = "idletrain"  # any name: the sandbox runs the installed package
NOTICE = "5s"  # AWS gives two minutes; a rehearsal shows the same in less


class SandboxProvider(AwsProvider):
    """AWS' interfaces, answered by a process that a launch starts and that ends with it; see `CloudProvider`."""

    costs_money = False
    outlives_command = False
    boot_reason = "for its head to boot, which takes some seconds"

    def faults(self, job: Job) -> list[str]:
        faults, trace = [], self._request.trace
        if not _in_sandbox() and any(path.startswith("s3://") for path in job.data.paths):
            faults.append("data: the rehearsal cloud begins with an empty bucket; name files of this machine")
        elif self._request.detach:
            faults.append("--detach: the rehearsal cloud ends with this command; leave it out")
        if self._request.resume and not _in_sandbox():
            faults.append(
                "--resume: the rehearsal cloud ends with its launch, and its run is below runs/; go on with it there, "
                "by --name and --resume without --spot and --cloud"
            )
        if trace and not trace.is_file():
            faults.append(f"--trace: {trace} is not a file; name one with lines `milliseconds,add|remove,node`")
        elif trace:
            try:
                read_trace(trace.read_text(errors="replace"))
            except JobError as error:
                faults += error.faults
        return faults

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Start a sandbox and make it this process' cloud, unless the environment names one already."""
        if _in_sandbox():
            yield
            return
        with sandbox_process(self._reclaim_arguments()) as process:
            _await_address(process)
            yield

    @contextlib.contextmanager
    def account(self, region: str | None) -> Iterator[Account]:
        """Yield the account of this process' sandbox, else of the requested one, else of the newest that is open."""
        if _in_sandbox():
            with super().account(region) as account:
                yield account
            return
        before = dict(os.environ)
        _enter_sandbox(json.loads(_open_sandbox(self._request.rehearsal).read_text()))
        try:
            with super().account(None) as account:
                yield account
        finally:
            os.environ.clear()
            os.environ.update(before)

    def launch_region(self, _job: Job) -> str | None:
        """Return None: a sandbox has one region, whatever its name."""

    def image(self, job: Job) -> str:
        return job.cloud.image or IMAGE

    def image_fault(self, _account: Account, _image: str) -> str | None:
        """Return None: a rehearsal runs the installed package."""

    def pinned_image(self, _account: Account, image: str) -> str:
        """Return the name as it is: a rehearsal runs the installed package."""
        return image

    def schedules(self) -> CloudSchedules | None:
        """Return None: the sandbox is gone when a schedule would be due."""

    def interrupted_text(self, run: str, address: str) -> str:
        kept = f"what {run} has trained is in {address}" if address else f"{run} had not trained yet"
        return f"idletrain: stopped; no machine is left of the rehearsal, and {kept}"

    def seen_from_here(self, event: Record, account: Account) -> Record:
        """Add the token to the link of the dashboard: the head is a process of this machine."""
        if event["kind"] != "run_started":
            return event
        with contextlib.suppress(RunError):  # the run has ended, and its secrets with it
            return {**event, "dashboard": f"{event['dashboard']}?token={account.dashboard_token(event['run'])}"}
        return event

    def tunnel_command(self, _account: Account, _head: str, _port: str) -> list[str] | None:
        """Return None: the head is a process of this machine."""

    def _reclaim_arguments(self) -> list[str]:
        """Return how the sandbox takes nodes back, as arguments of its process."""
        request, arguments = self._request, ["--notice", NOTICE]
        if request.churn_seconds:
            arguments += ["--churn", f"{request.churn_seconds}s"]
        if request.trace:
            arguments += ["--trace", str(request.trace), "--speed", str(request.speed)]
        return arguments


@contextlib.contextmanager
def sandbox_process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a sandbox while the context lasts; it prints its address once it answers.

    Its logs are deleted behind the context, except after a failure: then they stay until the next one opens.
    """
    if importlib.util.find_spec("moto") is None:
        raise RunError(f"the rehearsal cloud needs moto; pip install {MOTO}")
    folder = sandboxes()
    logs = folder / str(os.getpid())
    for old in folder.glob("[0-9]*"):
        if old == logs or not psutil.pid_exists(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.mkdir(mode=0o700)
    failed = False
    try:
        with (logs / "sandbox.log").open("w") as log, _process(logs, arguments, log) as process:
            yield process
    except Exception as error:
        failed = not isinstance(error, JobError)  # a job that is refused has started no machine
        raise
    finally:
        if failed:
            (logs / "address.json").unlink(missing_ok=True)
            sys.stderr.write(f"idletrain: the machines' logs are in {logs}, until the next rehearsal\n")
        else:
            shutil.rmtree(logs)


@contextlib.contextmanager
def _process(logs: Path, arguments: list[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    command = owned_process.command("idletrain.cloud.sandbox", "--logs", str(logs), *arguments, number=signal.SIGTERM)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()  # for one that still starts and does not read its input yet
            process.wait()  # which leaving the context does not after a Ctrl-C


def _await_address(process: subprocess.Popen[str]) -> None:
    """Wait until a sandbox answers and make it this process' cloud.

    Raises:
        RunError: it does not start.
    """
    assert process.stdout is not None
    line, own = process.stdout.readline(), sandboxes() / str(os.getpid())
    if not line:
        said = (own / "sandbox.log").read_text().strip().rpartition("\n")[2].removeprefix("idletrain: ")
        raise RunError(f"the rehearsal cloud did not start: {said or 'it said nothing'}")
    _keep_private(own / "address.json", line)
    _enter_sandbox(json.loads(line))


def _enter_sandbox(address: dict[str, str]) -> None:
    """Point AWS' own configuration at a sandbox, for this process and those that it starts."""
    os.environ |= {
        "AWS_ENDPOINT_URL": address["endpoint"],
        "AWS_DEFAULT_REGION": address["region"],
        "AWS_ACCESS_KEY_ID": address["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": address["secret_access_key"],
    }
    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        os.environ.pop(variable, None)


def _keep_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, from its first moment on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _in_sandbox() -> bool:
    """Return True if a sandbox is this process' cloud already."""
    return "AWS_ENDPOINT_URL" in os.environ


def sandboxes() -> Path:
    """Return the folder with one for each sandbox, named by its process: its address while it is open, and its logs."""
    return storage.cache_folder() / "sandboxes"


def _open_sandbox(process: int | None) -> Path:
    """Return the address of the sandbox of a process, or of the newest one.

    Raises:
        RunError: it is not open.
    """
    addresses = [
        path
        for path in sandboxes().glob(f"{process or '[0-9]*'}/address.json")
        if psutil.pid_exists(int(path.parent.name))
    ]
    if not addresses:
        raise RunError("no rehearsal is going on; `idletrain launch JOB --spot --cloud sandbox` is one while it runs")
    return max(addresses, key=lambda path: path.stat().st_mtime)
