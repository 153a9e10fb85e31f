"""A person's shell beside a page of the docs: the page's commands run as they are printed, in a folder of their own.

On a page, JOB and FILE are files in the folder, and RUN is a run of JOB. AWS is a rehearsal cloud. Jobs train two
rounds, and those that are watched go on until the page ends.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
import warm
import yaml
from botocore import xform_name
from code_blocks import ROOT, shortened
from moto import mock_aws
from rehearsal import Sandbox, eventually
from typer.testing import CliRunner

from idletrain.cli.main import app
from idletrain.cluster import access
from idletrain.cluster.forked_processes import ForkedProcess
from idletrain.cluster.identity import OPTIONS
from idletrain.fabric.analysis.samples import Fabric, Point

PATIENCE_SECONDS = 240.0
IDLETRAIN = (sys.executable, "-m", "idletrain")
JOB = {
    "name": "run",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "optimizer": {"name": "sgd", "lr": 0.1}},
    "nodes": {"count": 1},
}
TRACE = "0,add,n1\n0,add,n2\n"
# Programs that the machine may lack, or that would change more than the folder: scripts of the same name.
STAND_INS = {
    "aws": "exit 0",  # called by `idletrain dashboard`, for a tunnel
    "crontab": '[ "$1" = - ] && exec cat >tab; cat tab 2>/dev/null || { echo no crontab for me >&2; exit 1; }',
}
# Commands that do not succeed here, and what they say.
REFUSED = {
    "idletrain launch JOB --spot": "Start it? [y/N]",  # and the answer is no
    "idletrain doctor": "MISSING  image",  # which the page's job names later
    "idletrain doctor JOB": "MISSING  spot role",  # moto gives the one that was made another name
}
NAMED = "CAPABILITY_NAMED_IAM"
rehearsed: set[str] = set()  # launches on spot machines, which take seconds: one of each kind is enough


class Shell:
    """Types the commands of one page.

    Args:
        folder: The working directory, which is the process' own.
        cloud: The AWS account; the process' environment leads to it.
    """

    def __init__(self, folder: Path, cloud: Sandbox) -> None:
        self.folder, self.cloud = folder, cloud
        self.running: dict[str, ForkedProcess | subprocess.Popen[bytes]] = {}
        self.watched = self.scheduler = ""
        (folder / "FILE").write_text(TRACE)
        for name in ("before.json", "after.json"):
            (folder / name).write_text(fabric_of_two_nodes().as_json())
        self.write_job("JOB", JOB)
        (folder / "bin").mkdir()
        for name, script in STAND_INS.items():
            (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / "bin" / name).chmod(0o755)

    def write_job(self, name: str, job: dict[str, Any]) -> None:
        """Write a job that trains for seconds, from an image that the rehearsal cloud has."""
        own = {"name": "run"} if name == "JOB" else {}
        cloud = {**job.get("cloud", {}), "image": "idletrain"}
        (self.folder / name).write_text(yaml.safe_dump({**shortened(job), **own, "cloud": cloud}))

    def type(self, line: str) -> None:
        """Run a command to its end, or start it if it goes on until something else ends.

        Raises:
            AssertionError: it does not do what the page says.
        """
        words = shlex.split(self._here(line))
        if words[0] == "aws":
            aws(words[1:], self.cloud)
        elif words[0] == "curl":
            if shutil.which("curl"):
                done = subprocess.run(["sh", "-c", self._here(line)], capture_output=True, text=True, check=True)
                assert "idletrain_" in done.stdout, line
        elif words[0] == "python":
            with patch.object(sys, "argv", words[1:]):
                runpy.run_path(words[1], run_name="__main__")
        elif words[0] == "dask":
            self._start_scheduler(line, words)
        elif words[1] == "worker":
            self._lend(line, words)
        elif words[1] == "logs":
            self._start(line, words)
            eventually(lambda: self._output(line), PATIENCE_SECONDS)
        elif "--allow-control" in words or "--detach" in words:
            self._start_watched(line, words)
        elif "--spot" in words or (words[1:2] == ["sweep"] and "--cloud" in words):
            self._rehearse(line, words)
        else:
            self._make_run(words)
            done = CliRunner().invoke(app, words[1:])
            self._check(line, done.exit_code, done.output, done.exception)

    def close(self) -> None:
        """End what the page's commands started, the last first; each ends in order."""
        for line, process in reversed(self.running.items()):
            if " logs " not in line:  # which end with their run
                process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) in (0, 130), f"{line}:\n{self._output(line)}"

    def kill(self) -> None:
        """End at once what a page that failed has left."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def _here(self, line: str) -> str:
        """A line with the names and addresses that it has here."""
        if "ADDRESS" in line and not self.scheduler:
            self.type("dask scheduler --host 127.0.0.1")
            self.type("idletrain worker tcp://127.0.0.1:8786")
        if "RUN" in line and ("worker" in line or "curl" in line) and not self.watched:
            self.type("idletrain launch JOB --allow-control")
        names = {"ADDRESS": self.scheduler, "tcp://127.0.0.1:8786": self.scheduler}
        run = self.watched or "run"
        if self.watched and (self.folder / "runs" / run).exists():
            reached = access.find(self.folder / "runs" / run)
            names |= {"tls://head.example.org:8786": reached.scheduler, "http://127.0.0.1:8787": self._page(run)}
            names |= {f"worker/{part}": str(getattr(reached, part.replace("-", "_"))) for part in OPTIONS}
        for printed, name in (names | {"RUN1": run, "RUN2": run, "RUN/": f"runs/{run}/", "RUN": run}).items():
            line = line.replace(printed, name)
        return line

    def _page(self, run: str) -> str:
        """The address of a watched run's dashboard."""
        status = CliRunner().invoke(app, ["status", run]).output
        return status.split("watch it at ")[1].split("/idletrain")[0]

    def _make_run(self, words: list[str]) -> None:
        """Train JOB for a command that needs a run, if the page has not."""
        needed = words[1] in ("evaluate", "report", "status") and "run" in words and "--cloud" not in words
        if needed and not (self.folder / "runs/run").exists():
            self.type("idletrain launch JOB")

    def _check(self, line: str, code: int, output: str, error: object = None) -> None:
        """Assert that a command ends well, or as the table says."""
        assert (code == 0) == (line not in REFUSED), f"{line}: {code} {error!r}\n{output}"
        assert REFUSED.get(line, "") in output, f"{line}:\n{output}"

    def _rehearse(self, line: str, words: list[str]) -> None:
        """Launch on the account's machines, or in a sandbox that the launch itself starts."""
        sandbox = "sandbox" in words
        kind = line.replace("JOB", "job.yaml") if sandbox else line
        if kind in rehearsed:
            return
        rehearsed.add(kind)
        environment = {name: value for name, value in os.environ.items() if not (sandbox and name.startswith("AWS_"))}
        answer = "n\n" if line in REFUSED else "y\n"
        command = [*IDLETRAIN, *words[1:]]
        done = warm.run(command, environment=environment, given=answer)
        self._check(line, done.returncode, done.stdout + done.stderr)

    def _start_watched(self, line: str, words: list[str]) -> None:
        """Start a run that does not end by itself, and wait for its first round."""
        file = self.folder / words[2]
        before = yaml.safe_load(file.read_text())
        detached, default = "--detach" in words, "watched" if words[2] == "JOB" else before["name"]
        self.watched = words[words.index("--name") + 1] if "--name" in words else default
        training = {**before["training"], "rounds": 1_000_000}
        file.write_text(yaml.safe_dump({**before, "name": self.watched, "training": training}))
        self._start(line, words)
        if detached:
            assert self.running[line].wait(PATIENCE_SECONDS) == 0, self._output(line)
        status = ["status", self.watched, "--json", *(("--cloud", "aws") if detached else ())]
        eventually(lambda: re.search(r'"rounds": [1-9]', CliRunner().invoke(app, status).output), PATIENCE_SECONDS)
        file.write_text(yaml.safe_dump(before))

    def _lend(self, line: str, words: list[str]) -> None:
        """Start a worker, and wait until the watched run has it, if that is whose it is."""
        events = self.folder / "runs" / (self.watched or "run") / "events.jsonl"
        before = events.read_text().count("worker_joined") if self.scheduler not in words else 0
        self._start(line, words)
        if self.scheduler not in words:
            eventually(lambda: events.read_text().count("worker_joined") > before, PATIENCE_SECONDS)

    def _start_scheduler(self, line: str, words: list[str]) -> None:
        """Start a Dask scheduler on ports that are free."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._start(line, [*words, "--port", str(port), "--dashboard-address", "127.0.0.1:0"])
        self.scheduler = f"tcp://127.0.0.1:{port}"
        eventually(lambda: "Scheduler at" in self._output(line), PATIENCE_SECONDS)

    def _start(self, line: str, words: list[str]) -> None:
        log = self._log(line)
        log.unlink(missing_ok=True)
        start = (
            warm.execute if words[0] == "dask" else warm.start
        )  # a scheduler has no torch, whose memory a fork would have
        self.running[line] = start([sys.executable, "-m", *words], os.environ, log, Path.cwd())

    def _log(self, line: str) -> Path:
        return self.folder / (re.sub(r"\W+", "-", line) + ".log")

    def _output(self, line: str) -> str:
        return self._log(line).read_text()


def fabric_of_two_nodes() -> Fabric:
    nodes = [{"name": f"n{k}", "host": f"h{k}", "mtu": 1500, "cores": 2, "threads": 1} for k in range(2)]
    points = [Point("one way", "socket", a, 1 - a, (1e7, 1.001e7, 0.999e7)) for a in range(2)]
    return Fabric({"preset": "quick", "version": "1"}, nodes, points)


def aws(words: list[str], cloud: Sandbox) -> None:
    """Make a call of the AWS CLI by boto3, whose names the CLI's are: what a stack makes by moto, others in the cloud.

    Raises:
        AssertionError: the call has no such option.
    """
    service, operation, *rest = words
    options = {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    region = options.pop("region", cloud.region)
    if operation == "deploy":  # which the CLI makes of several calls
        operation = "create-stack"
        options["template-body"] = Path(options.pop("template-file")).read_text()
    if operation == "get-login-password":  # which the CLI makes of another one's answer
        operation = "get-authorization-token"
    if service in {"cloudformation", "ecr"} or "user-name" in options:
        with mock_aws(), patch.dict(os.environ):
            del os.environ["AWS_ENDPOINT_URL"]
            if user := options.get("user-name"):
                _make_user(user, region)
            answer = _call(boto3.client(service, region_name=region), operation, options)  # type: ignore[call-overload]
    else:
        answer = _call(cloud.client(service), operation, options)
    assert answer, words


def _make_user(name: str, region: str) -> None:
    """Make a user and the stack, whose policies it gets."""
    template = (ROOT / "infra/aws/idletrain.yaml").read_text()
    client = boto3.client("cloudformation", region_name=region)
    client.create_stack(StackName="idletrain", TemplateBody=template, Capabilities=[NAMED])
    boto3.client("iam").create_user(UserName=name)


def _call(client: Any, operation: str, options: dict[str, str]) -> Any:
    (name,) = [
        api for method, api in client.meta.method_to_api_mapping.items() if method == operation.replace("-", "_")
    ]
    members = client.meta.service_model.operation_model(name).input_shape.members
    known = {xform_name(member, "-"): member for member in members}
    assert options.keys() <= known.keys(), f"{operation}: {options.keys() - known.keys()}"
    given = {known[option]: value for option, value in options.items()}
    lists = {name: [value] for name, value in given.items() if members[name].type_name == "list"}
    return getattr(client, operation.replace("-", "_"))(**given | lists)
