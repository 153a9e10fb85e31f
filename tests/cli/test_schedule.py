"""`idletrain schedule`: all faults at once and before anything is written, what is installed, what is shown.

`crontab` and `systemctl` are scripts that keep files; what is run is a stand-in for `idletrain`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from moto import mock_aws
from typer.testing import CliRunner, Result

from idletrain.cli import schedule
from idletrain.cloud.aws.account import Account
from idletrain.errors import JobError, RunError
from idletrain.schedules.cron import Execution
from idletrain.schedules.execute import utc_now
from idletrain.schedules.store import ScheduleStore

GOOD = """
name: t
model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 16, 10]}}
data: {name: digits}
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


class Home:
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

    def told(self, *arguments: str) -> str:
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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(schedule, "PROGRAM", (sys.executable, str(script)))


NIGHTLY = ("add", "nightly", "job.yaml", "--cron", "0 2 * * *", "--tz", "Europe/Paris")


def test_a_schedule_goes_into_the_crontab_with_absolute_paths(home: Home) -> None:
    home.has("crontab", CRONTAB)
    (home.path / "tab").write_text("MAILTO=me\n")
    assert ", by crontab" in home.told(*NIGHTLY)
    command = f"{sys.executable} -m idletrain schedule run nightly --if-due --directory {home.book.directory}"
    assert home.tab == f"MAILTO=me\n0,15,30,45 * * * * {command} # idletrain:nightly\n"
    kept = home.book.get("nightly")
    assert (kept.job, kept.directory) == (str(home.path / "job.yaml"), str(home.path))
    assert (kept.cloud, kept.on, kept.if_running) == ("local", "crontab", "skip")
    assert "nightly: removed" in home.told("remove", "nightly")
    assert home.tab == "MAILTO=me\n"
    assert home.book.names() == []


def test_without_cron_it_is_a_timer(home: Home) -> None:
    home.has("systemctl", SYSTEMCTL)
    assert "loginctl enable-linger" in home.told(*NIGHTLY)
    units = home.path / "config" / "systemd" / "user"
    assert (units / "idletrain-nightly.timer").exists()
    home.told("remove", "nightly")
    assert list(units.iterdir()) == []


def test_without_either_there_is_the_loop(home: Home) -> None:
    assert home.faults(*NIGHTLY) == ("--on: there is neither cron nor systemd for you here; use --on loop",)
    assert "keep `idletrain schedule run` running" in home.told(*NIGHTLY, "--on", "loop")


def test_all_faults_are_told_at_once_and_nothing_is_written(home: Home) -> None:
    (home.path / "job.yaml").write_text(GOOD.replace("digits", "digitz"))
    faults = home.faults(
        "add", "Nightly!", "job.yaml", "--cron", "0 2 30 2 *", "--tz", "Europe/Pris", "--on", "systemd"
    )
    assert [fault.split(":")[0] for fault in faults] == ["NAME", "--cron", "--tz", "data.name", "--on"]
    assert not home.book.directory.exists()
    assert sorted(path.name for path in home.path.iterdir()) == ["bin", "job.yaml"]


def test_an_unknown_job_file_and_a_name_that_is_taken_are_sentences(home: Home) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    assert home.faults("add", "nightly", "none.yaml", "--cron", "0 2 * * *", "--on", "loop") == (
        "NAME: there is a schedule nightly; remove it first, or choose another name",
        f"{home.path / 'none.yaml'}: cannot be read (No such file or directory); name an existing job file",
    )


def test_the_machines_zone_is_the_default(home: Home) -> None:
    home.told("add", "nightly", "job.yaml", "--cron", "0 2 * * *", "--on", "loop")
    assert home.book.get("nightly").tz == "Europe/Paris"


def test_what_cannot_be_installed_leaves_no_schedule(home: Home) -> None:
    home.has("crontab", CRONTAB)
    (home.path / "refuse").touch()
    assert isinstance(home.say(*NIGHTLY).exception, RunError)
    assert home.book.names() == []
    assert list(home.book.directory.iterdir()) == []


@pytest.mark.parametrize("command", ["remove", "run"])
def test_an_unknown_schedule_is_a_sentence(command: str, home: Home) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    assert home.faults(command, "weekly") == ("NAME: there is no schedule weekly; there are: nightly",)


def test_a_run_by_hand_is_told_of_and_its_exit_code_passed_on(home: Home, stand_in: None) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    assert home.told("run", "nightly").endswith(": done\n")
    (done,) = home.book.history("nightly")
    sent = f"launch {home.path / 'job.yaml'} --name {done.run}\n"
    assert home.book.path("nightly", "log").read_text() == sent
    (home.path / "exit").write_text("2")
    result = home.say("run", "nightly")
    assert result.exit_code == 2
    assert ": failed with 2\n" in result.output
    assert str(home.book.path("nightly", "log")) in result.output


def test_nothing_is_said_when_nothing_is_due(home: Home, stand_in: None) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    assert home.told("run", "nightly", "--if-due") == ""


def test_the_list_shows_the_next_run_and_what_came_of_the_last(home: Home) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    due = datetime(2026, 3, 2, 1, tzinfo=UTC)
    with home.book.writing("nightly") as write:
        write(
            [
                Execution(due=due, run="a", started=due, ended=due + timedelta(minutes=34), exit_code=0),
                Execution(due=due + timedelta(days=1), run="b", note="skipped: still running"),
                Execution(due=due + timedelta(days=2), run="c", started=due + timedelta(days=2)),
            ]
        )
    shown = home.told("list")
    for words in ("Europe/Paris", "0 2 * * *", "02:00", "2026-03-02 02:00 done in 34 min", "skipped: still running"):
        assert words in shown
    assert "2026-03-04 02:00 cut off" in shown
    with home.book.locked("nightly", "lease"):
        assert "2026-03-04 02:00 running" in home.told("list")


def test_a_list_is_read_in_a_narrow_terminal(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    home.told(*NIGHTLY, "--on", "loop")
    lines = home.told("list").splitlines()
    assert lines[0] == "nightly: 0 2 * * * Europe/Paris, local nodes, started by loop"
    assert lines[1] == f"  job   {home.path / 'job.yaml'}"
    assert lines[3] == "  last  never"


def test_an_empty_list_says_what_to_do(home: Home) -> None:
    assert home.told("list") == "there are no schedules; `idletrain schedule add` makes one\n"


def test_a_run_in_a_cloud_needs_an_image_whoever_starts_it(home: Home) -> None:
    (fault,) = home.faults(*NIGHTLY, "--on", "loop", "--cloud", "aws")
    assert fault.startswith("cloud.image: is missing")
    assert home.book.names() == []


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
    (vpc,) = (found["VpcId"] for found in ec2.describe_vpcs()["Vpcs"])
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    (table,) = (found["RouteTableId"] for found in ec2.describe_route_tables()["RouteTables"])
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


def test_a_schedule_on_aws_needs_no_machine_of_ours(home: Home, account: Account) -> None:
    (home.path / "job.yaml").write_text(GOOD + ON_AWS)
    assert ", by aws" in home.told(*NIGHTLY, "--on", "aws")
    assert home.book.get("nightly").cloud == "aws"
    client = account.client("scheduler")
    assert [s["Name"] for s in client.list_schedules()["Schedules"]] == ["idletrain-nightly"]
    (home.path / "job.yaml").unlink()
    home.told("remove", "nightly")
    assert client.list_schedules()["Schedules"] == []
    assert list(home.book.directory.iterdir()) == []


def test_an_account_out_of_reach_hides_no_other_schedule(
    home: Home, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.told(*NIGHTLY, "--on", "loop")
    (home.path / "job.yaml").write_text(GOOD + ON_AWS)
    home.told("add", "away", *NIGHTLY[2:], "--on", "aws")
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    shown = home.told("list")
    assert "last  unknown: AWS: there are no credentials" in shown
    assert "nightly: 0 2 * * *" in shown


def test_what_aws_cannot_do_is_refused_with_all_reasons(home: Home) -> None:
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
    faults = home.faults(*arguments)
    assert [fault.split(":")[0] for fault in faults] == [
        "cloud.image",
        "--cloud",
        "--if-running",
        "--cron",
    ]
    assert faults[-1].endswith(
        "a day of the month or of the week cannot be asked for together; make a schedule of each"
    )


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.02)
    return value


def test_the_loop_ends_in_order_when_told_to(home: Home, tmp_path: Path) -> None:
    """The real command line, in a process: one schedule whose job is gone, so that its run fails at once."""
    home.told("add", "often", "job.yaml", "--cron", "* * * * *", "--tz", "UTC", "--on", "loop")
    kept = home.book.get("often")
    home.book.remove("often")
    home.book.add(replace(kept, created=utc_now() - timedelta(hours=1)))
    (home.path / "job.yaml").unlink()
    with subprocess.Popen(
        [sys.executable, "-m", "idletrain", "schedule", "run"], stdout=subprocess.PIPE, text=True
    ) as loop:
        try:
            (done,) = until("the run's end", lambda: [e for e in home.book.history("often") if e.exit_code is not None])
        finally:
            loop.send_signal(signal.SIGTERM)
        assert loop.wait(30) == 0
    assert done.exit_code == 2
    assert "cannot be read" in home.book.path("often", "log").read_text()
