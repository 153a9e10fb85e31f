"""`idletrain schedule`: all faults at once and before anything is written, what is installed, what is shown.

`crontab` and `systemctl` are scripts that keep files; what is run is a stand-in for `idletrain`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto import mock_aws
from typer.testing import CliRunner, Result
from waiting import until

from idletrain.cli import schedule
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import eventbridge
from idletrain.cluster import forked_processes
from idletrain.errors import JobError, RunError
from idletrain.schedules.cron import Execution
from idletrain.schedules.execute import utc_now
from idletrain.schedules.store import ScheduleStore

GOOD = """
name: t
model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 16, 10]}}
data: {name: digits}
training: {method: local-sgd, optimizer: {name: sgd, lr: 0.3}}
"""
ON_AWS = """
checkpoint: {to: "s3://idletrain-test/team/"}
cloud: {region: eu-west-1, image: "example.org/idletrain:1", ami: ami-12c6146b}
"""
CRONTAB = """#!/bin/sh
case "$1" in
-l) cat "$FAKE/tab" 2>/dev/null || { echo "no crontab for me" >&2; exit 1; } ;;
-) [ ! -e "$FAKE/refuse" ] || { echo "no room" >&2; exit 1; }; cat >"$FAKE/tab" ;;
esac
"""
SYSTEMCTL = """#!/bin/sh
echo "$@" >>"$FAKE/systemctl"
"""
STAND_IN = """
import pathlib, sys
print(*sys.argv[1:])
sys.exit(int(pathlib.Path("exit").read_text()) if pathlib.Path("exit").exists() else 0)
"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Have what checks a job's model and data start as a fork."""
    forked_processes.warm_up(os.environ)


class UserMachine:
    """A user's machine: a job file, a configuration directory, and commands that can be put into the path."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.book = ScheduleStore(path / "config" / "idletrain" / "schedules")
        (path / "bin").mkdir()
        (path / "job.yaml").write_text(GOOD)
        monkeypatch.chdir(path)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(path / "config"))
        monkeypatch.setenv("FAKE", str(path))
        monkeypatch.setenv("PATH", f"{path / 'bin'}{os.pathsep}/bin")
        monkeypatch.setenv("TZ", "Europe/Paris")
        monkeypatch.setenv("COLUMNS", "250")

    def has(self, name: str, script: str) -> None:
        command = self.path / "bin" / name
        command.write_text(script)
        command.chmod(0o755)

    def say(self, *arguments: str) -> Result:
        return CliRunner().invoke(schedule.app, arguments)

    def output(self, *arguments: str) -> str:
        result = self.say(*arguments)
        assert result.exit_code == 0, result.exception
        return result.output

    def faults(self, *arguments: str) -> tuple[str, ...]:
        error = self.say(*arguments).exception
        assert isinstance(error, JobError), error
        return error.faults

    @property
    def tab(self) -> str:
        file = self.path / "tab"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserMachine:
    return UserMachine(tmp_path, monkeypatch)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(schedule, "PROGRAM", (sys.executable, str(script)))


NIGHTLY = ("add", "nightly", "job.yaml", "--cron", "0 2 * * *", "--tz", "Europe/Paris")


def test_a_schedule_goes_into_the_crontab_with_absolute_paths(machine: UserMachine) -> None:
    machine.has("crontab", CRONTAB)
    (machine.path / "tab").write_text("MAILTO=me\n")
    assert ", by crontab" in machine.output(*NIGHTLY)
    command = f"{sys.executable} -m idletrain schedule run nightly --if-due --directory {machine.book.directory}"
    assert machine.tab == f"MAILTO=me\n0,15,30,45 * * * * {command} # idletrain:nightly\n"
    stored = machine.book.get("nightly")
    assert (stored.job, stored.directory) == (str(machine.path / "job.yaml"), str(machine.path))
    assert (stored.cloud, stored.on, stored.if_running) == ("local", "crontab", "skip")
    assert "nightly: removed" in machine.output("remove", "nightly")
    assert machine.tab == "MAILTO=me\n"
    assert machine.book.names() == []


def test_without_cron_it_is_a_timer(machine: UserMachine) -> None:
    machine.has("systemctl", SYSTEMCTL)
    assert "loginctl enable-linger" in machine.output(*NIGHTLY)
    units = machine.path / "config" / "systemd" / "user"
    assert (units / "idletrain-nightly.timer").exists()
    machine.output("remove", "nightly")
    assert list(units.iterdir()) == []


def test_without_either_there_is_the_loop(machine: UserMachine) -> None:
    assert machine.faults(*NIGHTLY) == ("--on: there is neither cron nor systemd for you here; use --on loop",)
    assert "keep `idletrain schedule run` running" in machine.output(*NIGHTLY, "--on", "loop")


def test_all_faults_are_reported_at_once_and_nothing_is_written(machine: UserMachine) -> None:
    (machine.path / "job.yaml").write_text(GOOD.replace("digits", "digitz"))
    faults = machine.faults(
        "add", "Nightly!", "job.yaml", "--cron", "0 2 30 2 *", "--tz", "Europe/Pris", "--on", "systemd"
    )
    assert [fault.split(":")[0] for fault in faults] == ["NAME", "--cron", "--tz", "data.name", "--on"]
    assert not machine.book.directory.exists()
    assert sorted(path.name for path in machine.path.iterdir()) == ["bin", "job.yaml"]


SETTINGS = ("--set", "training.optimizer.lr=0.1,0.2", "--set", "training.rounds=1")


def test_a_schedule_trains_with_several_settings(machine: UserMachine, tmp_path: Path) -> None:
    job = yaml.safe_load(GOOD) | {"nodes": {"count": 1, "memory": "1GiB"}}
    job["training"] = {"method": "ist", "subnets": 2, "local_steps": 5, "optimizer": {"name": "sgd", "lr": 0.05}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    machine.output(*NIGHTLY, "--on", "loop", *SETTINGS)
    assert "job.yaml training.optimizer.lr=0.1,0.2 training.rounds=1" in machine.output("list")
    assert re.search(r"nightly: nightly-\d+-\d+: done", machine.output("run", "nightly"))
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(runs) == 2
    assert all(re.fullmatch(r"nightly-\d{8}-\d{4}-\w{6}", name) for name in runs)


@pytest.mark.parametrize("varied", [(), ("--set", "training.optimizer.lr=0.1,0.2")], ids=["job", "trials"])
def test_a_job_whose_model_cannot_be_built_is_refused(machine: UserMachine, varied: tuple[str, ...]) -> None:
    Path("job.yaml").write_text(GOOD.replace("widths: [64", "width: [64"))
    faults = machine.faults(*NIGHTLY, "--on", "loop", *varied)
    assert [fault for fault in faults if fault.startswith("model.") and "width" in fault], faults
    assert "nightly" not in machine.output("list")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--on", "loop", "--set", "training.optimizer.lr"), ["--set"]),
        (("--on", "loop", "--set", "training.subnets=0,2", "--budget", "much"), ["training.subnets"]),
        (("--on", "loop", "--set", "training.subnets=2", "--budget", "much"), ["--budget"]),
        (("--on", "loop", "--cloud", "aws", "--set", "training.subnets=2"), ["cloud.image", "--budget"]),
        (("--on", "aws", "--set", "training.subnets=2"), ["--set", "cloud.image"]),
        (("--on", "loop", "--budget", "5usd"), ["--budget"]),
    ],
)
def test_settings_that_cannot_be_tried_are_refused(
    machine: UserMachine, arguments: tuple[str, ...], fields: list[str]
) -> None:
    assert [fault.split(":")[0] for fault in machine.faults(*NIGHTLY, *arguments)][: len(fields)] == fields
    assert not machine.book.names()


def test_a_name_without_room_for_its_trials_is_refused(machine: UserMachine) -> None:
    name = "n" * 49
    assert machine.faults("add", name, *NIGHTLY[2:], "--on", "loop", *SETTINGS) == (
        f"NAME: {name!r} should be lower-case letters, digits and hyphens, at most 42 with --set",
    )
    assert not machine.book.names()


def test_an_unknown_job_file_and_a_name_that_is_taken_are_sentences(machine: UserMachine) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    assert machine.faults("add", "nightly", "none.yaml", "--cron", "0 2 * * *", "--on", "loop") == (
        "NAME: there is a schedule nightly; remove it first, or choose another name",
        f"{machine.path / 'none.yaml'}: cannot be read (No such file or directory); name an existing job file",
    )


@pytest.mark.parametrize("command", [("list",), ("remove", "night"), ("run", "night")])
def test_a_file_is_no_directory_of_schedules(machine: UserMachine, tmp_path: Path, command: tuple[str, ...]) -> None:
    file = tmp_path / "file"
    file.touch()
    (fault,) = machine.faults(*command, "--directory", str(file))
    assert fault == f"--directory: {file} is a file; name a directory"


def test_the_machines_zone_is_the_default(machine: UserMachine) -> None:
    machine.output("add", "nightly", "job.yaml", "--cron", "0 2 * * *", "--on", "loop")
    assert machine.book.get("nightly").tz == "Europe/Paris"


def test_what_cannot_be_installed_leaves_no_schedule(machine: UserMachine) -> None:
    machine.has("crontab", CRONTAB)
    (machine.path / "refuse").touch()
    assert isinstance(machine.say(*NIGHTLY).exception, RunError)
    assert machine.book.names() == []
    assert list(machine.book.directory.iterdir()) == []


@pytest.mark.parametrize("command", ["remove", "run"])
def test_an_unknown_schedule_is_a_sentence(command: str, machine: UserMachine) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    assert machine.faults(command, "weekly") == ("NAME: there is no schedule weekly; there are: nightly",)


def test_a_run_by_hand_is_reported_and_its_exit_code_passed_on(machine: UserMachine, stand_in: None) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    assert machine.output("run", "nightly").endswith(": done\n")
    (done,) = machine.book.history("nightly")
    sent = f"launch {machine.path / 'job.yaml'} --name {done.run}\n"
    assert machine.book.path("nightly", "log").read_text() == sent
    (machine.path / "exit").write_text("2")
    result = machine.say("run", "nightly")
    assert result.exit_code == 2
    assert ": failed with 2\n" in result.output
    assert str(machine.book.path("nightly", "log")) in result.output


def test_nothing_is_said_when_nothing_is_due(machine: UserMachine, stand_in: None) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    assert machine.output("run", "nightly", "--if-due") == ""


def test_the_list_shows_the_next_run_and_what_came_of_the_last(machine: UserMachine) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    due = datetime(2026, 3, 2, 1, tzinfo=UTC)
    with machine.book.writing("nightly") as write:
        write(
            [
                Execution(due=due, run="a", started=due, ended=due + timedelta(minutes=34), exit_code=0),
                Execution(due=due + timedelta(days=1), run="b", note="skipped: still running"),
                Execution(due=due + timedelta(days=2), run="c", started=due + timedelta(days=2)),
            ]
        )
    shown = machine.output("list")
    for text in ("Europe/Paris", "0 2 * * *", "02:00", "2026-03-02 02:00 done in 34 min", "skipped: still running"):
        assert text in shown
    assert "2026-03-04 02:00 interrupted" in shown
    with machine.book.locked("nightly", "lease"):
        assert "2026-03-04 02:00 running" in machine.output("list")


def test_a_list_is_read_in_a_narrow_terminal(machine: UserMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    machine.output(*NIGHTLY, "--on", "loop")
    lines = machine.output("list").splitlines()
    assert lines[0] == "nightly: 0 2 * * * Europe/Paris, local nodes, started by loop"
    assert lines[1] == f"  job   {machine.path / 'job.yaml'}"
    assert lines[3] == "  last  never"


def test_a_damaged_schedule_hides_no_other_and_can_be_removed(machine: UserMachine) -> None:
    machine.has("crontab", CRONTAB)
    machine.output(*NIGHTLY)
    machine.output("add", "aa", *NIGHTLY[2:])
    machine.book.path("aa", "json").write_text("{}")
    shown = machine.output("list")
    assert "aa: damaged: " in shown
    assert "('created' is missing); `idletrain schedule remove aa`, and add it again" in shown
    assert "nightly: 0 2 * * *" in shown
    assert machine.output("remove", "aa") == "aa: removed\n"
    assert machine.book.names() == ["nightly"]
    assert [line.rpartition(":")[2] for line in machine.tab.splitlines()] == ["nightly"]


def test_a_damaged_schedule_that_a_cloud_starts_is_removed_here_and_said(machine: UserMachine) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    machine.book.path("nightly", "json").write_text("{")
    machine.book.path("nightly", "job").write_text("{}")
    assert "a cloud may still start nightly; the guide" in machine.output("remove", "nightly")
    assert list(machine.book.directory.iterdir()) == []


def test_an_empty_list_says_what_to_do(machine: UserMachine) -> None:
    assert machine.output("list") == "there are no schedules; `idletrain schedule add` makes one\n"


def test_a_run_in_a_cloud_needs_an_image_whoever_starts_it(machine: UserMachine) -> None:
    (fault,) = machine.faults(*NIGHTLY, "--on", "loop", "--cloud", "aws")
    assert fault.startswith("cloud.image: is missing")
    assert machine.book.names() == []


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    with mock_aws():
        account = Account("eu-west-1")
        configuration: Any = {"LocationConstraint": "eu-west-1"}
        account.s3.create_bucket(Bucket="idletrain-test", CreateBucketConfiguration=configuration)
        give_a_way_out(account.ec2)
        yield account


def give_a_way_out(ec2: Any) -> None:
    """Moto's default network has no gateway."""
    (vpc,) = (resource["VpcId"] for resource in ec2.describe_vpcs()["Vpcs"])
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = (resource["RouteTableId"] for resource in ec2.describe_route_tables()["RouteTables"])
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


def test_a_schedule_on_aws_needs_no_machine_of_ours(machine: UserMachine, account: Account) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    assert ", by aws" in machine.output(*NIGHTLY, "--on", "aws")
    assert machine.book.get("nightly").cloud == "aws"
    client = account.client("scheduler")
    assert [s["Name"] for s in client.list_schedules()["Schedules"]] == ["idletrain-nightly"]
    (machine.path / "job.yaml").unlink()
    machine.output("remove", "nightly")
    assert client.list_schedules()["Schedules"] == []
    assert list(machine.book.directory.iterdir()) == []


def refuse(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Have AWS refuse the requests of a function of `eventbridge`."""

    def refused(*_: Any) -> None:
        raise RunError("AWS refuses; ask again")

    monkeypatch.setattr(eventbridge, function, refused)


def on_aws(account: Account) -> list[str]:
    return [schedule["Name"] for schedule in account.client("scheduler").list_schedules()["Schedules"]]


@pytest.mark.parametrize("directory", [(), ("--directory", "other place")], ids=["usual", "another"])
def test_what_a_failed_add_may_have_left_is_kept_until_it_is_removed(
    machine: UserMachine, account: Account, monkeypatch: pytest.MonkeyPatch, directory: tuple[str, ...]
) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    install = eventbridge.install
    with monkeypatch.context() as faulty:

        def unanswered(*arguments: Any) -> None:
            install(*arguments)
            refuse(faulty, "remove")
            raise RunError("AWS cannot be reached; check the network")

        faulty.setattr(eventbridge, "install", unanswered)
        result = machine.say(*NIGHTLY, "--on", "aws", *directory)
    assert str(result.exception) == "AWS cannot be reached; check the network"
    option = f" --directory '{machine.path}/other place'" if directory else ""
    repeat = f"repeat `idletrain schedule remove nightly{option}`"
    assert f"idletrain: something that starts nightly may be left (AWS refuses; ask again); {repeat}\n" in result.stderr
    assert on_aws(account) == ["idletrain-nightly"]
    assert "nightly: 0 2 * * *" in machine.output("list", *directory)
    machine.output("remove", "nightly", *directory)
    assert on_aws(account) == []
    machine.output(*NIGHTLY, "--on", "aws", *directory)
    assert on_aws(account) == ["idletrain-nightly"]


def test_a_failed_add_that_leaves_nothing_can_be_repeated(
    machine: UserMachine, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    with monkeypatch.context() as refusing:
        refuse(refusing, "install")
        assert isinstance(machine.say(*NIGHTLY, "--on", "aws").exception, RunError)
    assert list(machine.book.directory.iterdir()) == []
    machine.output(*NIGHTLY, "--on", "aws")
    assert on_aws(account) == ["idletrain-nightly"]


def test_a_name_that_another_machine_has_taken_is_refused(machine: UserMachine, account: Account) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    machine.output(*NIGHTLY, "--on", "aws", "--directory", "another-machine")
    (first, second) = machine.faults(*NIGHTLY, "--on", "aws")
    assert first.startswith("NAME: AWS in eu-west-1 has a schedule nightly that was not added here; choose another")
    assert second.startswith("NAME: s3://idletrain-test/team/schedules/nightly/ has a schedule nightly")
    assert not machine.book.directory.exists()
    assert "last  never" in machine.output("list", "--directory", "another-machine")
    machine.output("remove", "nightly", "--directory", "another-machine")
    assert on_aws(account) == []
    machine.output(*NIGHTLY, "--on", "aws")


def test_a_schedule_stays_in_the_region_in_which_it_was_added(
    machine: UserMachine, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS.replace("region: eu-west-1, ", ""))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    machine.output(*NIGHTLY, "--on", "aws")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert "last  never" in machine.output("list")
    machine.output("remove", "nightly")
    assert on_aws(account) == []


def test_a_schedule_of_another_account_is_not_taken_for_gone(
    machine: UserMachine, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    machine.output(*NIGHTLY, "--on", "aws")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Account, "number", "999999999999")
        error = machine.say("remove", "nightly").exception
    assert str(error) == (
        "schedule nightly is in AWS account 123456789012, but the credentials are of 999999999999; set AWS_PROFILE to "
        "a profile of 123456789012"
    )
    assert machine.book.names() == ["nightly"]
    machine.output("remove", "nightly")
    assert on_aws(account) == []


def test_an_account_out_of_reach_hides_no_other_schedule(
    machine: UserMachine, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.output(*NIGHTLY, "--on", "loop")
    (machine.path / "job.yaml").write_text(GOOD + ON_AWS)
    machine.output("add", "away", *NIGHTLY[2:], "--on", "aws")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    shown = machine.output("list")
    assert "last  unknown: AWS: there are no credentials" in shown
    assert "nightly: 0 2 * * *" in shown


def test_what_aws_cannot_do_is_refused_with_all_reasons(machine: UserMachine) -> None:
    arguments = (
        "add",
        "n",
        "job.yaml",
        "--cron",
        "0 2 13 * FRI",
        "--on",
        "aws",
        "--cloud",
        "local",
        "--if-running",
        "queue",
    )
    faults = machine.faults(*arguments)
    assert [fault.split(":")[0] for fault in faults] == [
        "cloud.image",
        "--cloud",
        "--if-running",
        "--cron",
    ]
    assert faults[-1].endswith(
        "a day of the month or of the week cannot be asked for together; make a schedule of each"
    )


def test_the_loop_ends_in_order_when_told_to(machine: UserMachine, tmp_path: Path) -> None:
    """The real command line, in a process: one schedule whose job is gone, so that its run fails at once."""
    machine.output("add", "often", "job.yaml", "--cron", "* * * * *", "--tz", "UTC", "--on", "loop")
    stored = machine.book.get("often")
    machine.book.remove("often")
    machine.book.add(replace(stored, created=utc_now() - timedelta(hours=1)))
    (machine.path / "job.yaml").unlink()
    with subprocess.Popen(
        [sys.executable, "-m", "idletrain", "schedule", "run"], stdout=subprocess.PIPE, text=True
    ) as loop:
        try:
            (done,) = until(
                "the run's end", lambda: [e for e in machine.book.history("often") if e.exit_code is not None]
            )
        finally:
            loop.send_signal(signal.SIGTERM)
        assert loop.wait(30) == 0
    assert done.exit_code == 2
    assert "cannot be read" in machine.book.path("often", "log").read_text()


@pytest.mark.parametrize("name", ["azure", "local", "sandbox"])
def test_what_starts_no_runs_is_refused_by_name(machine: UserMachine, name: str) -> None:
    fault = f"--on: {name} starts no runs; use crontab, systemd, loop, or a cloud such as aws"
    assert machine.faults(*NIGHTLY, "--on", name) == (fault,)
    assert machine.book.names() == []
