"""Commands about runs in a cloud, from any machine with the account."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from botocore.parsers import ResponseParserError
from rehearsal import RECORD, Sandbox, ids_of
from typer.testing import CliRunner

from idletrain import storage
from idletrain.cli import cloud as cloud_commands
from idletrain.cli.main import app
from idletrain.cloud import record, teardown
from idletrain.cloud.aws import requests
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.aws.provider import AwsProvider
from idletrain.cloud.aws.run_resources import put_identities
from idletrain.cloud.follow import last_events
from idletrain.cloud.machines import run_tags
from idletrain.cloud.sandbox import provider as sandbox
from idletrain.cloud.teardown import Orphan
from idletrain.cluster import certificates
from idletrain.errors import JobError, RunError
from idletrain.providers.protocol import LaunchRequest
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

EVENTS = [
    {"v": 2, "t": 0.0, "s": 0.0, "kind": "waiting", "reason": "for workers"},
    {
        "v": 2,
        "t": 0.0,
        "s": 0.0,
        "kind": "instance_launched",
        "instance": "i-1",
        "role": "worker",
        "type": "m5.large",
        "zone": "a",
        "market": "spot",
        "usd_per_hour": 1.0,
        "on_demand_usd_per_hour": 3.0,
    },
    {"v": 2, "t": 3600.0, "s": 3600.0, "kind": "instance_ended", "instance": "i-1", "reason": "Server.Spot"},
]


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    """What a command prints, with its errors behind."""
    command = [sys.executable, "-m", "idletrain", *arguments]
    done = warm.run(command, environment={**os.environ, **environment}, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def past(account: Account) -> Any:
    """A run that has ended, below the account's own bucket."""
    prefix = S3Prefix(account.s3, account.bucket, "runs/past/")
    record.claim(prefix, RECORD)
    lines = "".join(json.dumps(event) + "\n" for event in EVENTS)
    prefix.put("events.jsonl/000000000000000", lines.encode())
    yield prefix
    prefix.delete(prefix.names())


def test_runs_are_listed_with_what_they_cost(past: Any) -> None:
    listed = json.loads(run("runs", "--cloud", "aws", "--json"))
    (line,) = [line for line in listed if line["name"] == "past"]
    assert line["usd"] > 0


def machine(cloud: Sandbox, of: str, role: str, market: str = "spot") -> str:
    """A machine of a run that does nothing."""
    marked = requests.tag_list({"idletrain:run": of, "idletrain:role": role})
    tags = [{"ResourceType": "instance", "Tags": marked}]
    (id_,) = ids_of(cloud.fleet(cloud.template("#!/bin/bash\nsleep 60\n"), 1, market=market, TagSpecifications=tags))
    return id_


def test_what_a_run_cost_is_known_from_its_records(past: S3Prefix) -> None:
    cost = json.loads(run("cost", "past", "--cloud", "sandbox", "--json"))
    assert cost["spent_usd"] == pytest.approx(1.0, abs=0.01)
    assert cost["on_demand_usd"] == pytest.approx(3.0, abs=0.01)
    assert "on demand it would have been $3.0" in run("cost", past.url, "--cloud", "sandbox")


def test_logs_are_what_happened(past: S3Prefix) -> None:
    printed = run("logs", "past", "--cloud", "sandbox")
    assert "waiting: for workers" in printed
    assert "i-1 ended (Server.Spot)" in printed


def test_a_report_names_every_machine_and_why_it_ended(past: S3Prefix, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    printed = run("report", past.url, "--to", str(file))
    assert "Server.Spot" in file.read_text()
    printed = run("report", "past", "--cloud", "sandbox", "--to", str(file))
    assert "i-1  worker  spot m5.large in a  3600 s  $1.0" in printed
    assert "Server.Spot" in printed


def test_a_run_s_status_is_read_from_its_prefix(past: S3Prefix) -> None:
    record.update(past, created=time.time(), events_after=last_events(past))
    assert json.loads(run("status", "past", "--cloud", "sandbox", "--json"))["status"] == "starting"
    record.update(past, state="ended")
    output = run("status", "past", "--cloud", "sandbox")
    assert "night: taken down\n" in output
    assert past.url in output
    record.update(past, failure="the data is gone; bring it back")
    assert "night: failed: the data is gone; bring it back\n" in run("status", "past", "--cloud", "sandbox")


def test_in_another_region_a_run_is_neither_ended_nor_lost(cloud: Sandbox, account: Account, past: S3Prefix) -> None:
    record.update(past, created=time.time() - 300)
    head = machine(cloud, "night", "head", market="on-demand")
    elsewhere = ("--cloud", "aws", "--region", "us-east-1")
    assert "is in eu-west-1, not in us-east-1; add --region eu-west-1" in run("down", past.url, *elsewhere, code=1)
    assert record.read(past).state == "running"
    assert [m.id for m in account.instances("night")] == [head]
    assert "interrupted" not in run("status", past.url, *elsewhere)


def test_a_lost_run_s_bill_ends_soon_after_its_head(account: Account, past: S3Prefix) -> None:
    past.put("events.jsonl/000000000000000", "".join(json.dumps(e) + "\n" for e in EVENTS[:2]).encode())
    said = {"v": 2, "t": 3600.0, "s": 3600.0, "kind": "waiting", "reason": "for workers"}
    s3_mirror.append_events(past, [said])
    cost = json.loads(run("cost", "past", "--cloud", "aws", "--json"))
    assert cost["spent_usd"] == pytest.approx((3600 + 60) / 3600, rel=0.1)
    assert cost["usd_per_hour"] == 0


def test_a_run_whose_head_was_terminated_by_hand_is_interrupted_with_the_reason(
    cloud: Sandbox, account: Account, past: S3Prefix
) -> None:
    record.update(past, created=time.time() - 1)
    head = machine(cloud, "night", "head", market="on-demand")
    assert "night: starting\n" in run("status", "past", "--cloud", "sandbox")
    cloud.ec2.terminate_instances(InstanceIds=[head])
    why = f"night: interrupted: its head {head} is gone (Client.UserInitiatedShutdown); go on with --resume\n"
    assert why in run("status", "past", "--cloud", "sandbox")


def test_the_status_of_a_run_that_trains_says_where_to_watch_it(
    cloud: Sandbox, account: Account, past: S3Prefix
) -> None:
    now = time.time()
    record.update(past, created=now - 1)
    machine(cloud, "night", "head", market="on-demand")
    assert "watch it" not in run("status", "past", "--cloud", "sandbox")
    began = {
        "v": 2, "t": now, "s": 3601.0, "kind": "run_started", "run": "night", "version": "1", "subnets": 2, "rounds": 3,
        "target": None, "parameters": 1000, "groups": {"1": 8}, "resumed_at": 0, "run_dir": "runs/night",
        "dashboard": "http://127.0.0.1:1/idletrain",
    }  # fmt: skip
    s3_mirror.append_events(past, [began])
    assert "watch it at http://127.0.0.1:1/idletrain" in run("status", "past", "--cloud", "sandbox")
    assert "watch it at `idletrain dashboard night`" in run("status", "past", "--cloud", "aws")


def test_the_network_of_a_run_that_was_taken_down_is_exported_from_its_copy(past: S3Prefix, tmp_path: Path) -> None:
    own = {"name": "past", "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 8, 10]}}}
    training = {"method": "ist", "subnets": 2, "rounds": 1, "local_steps": 2}
    (tmp_path / "job.yaml").write_text(json.dumps({**own, "data": {"name": "digits"}, "training": training}))
    warm.run([sys.executable, "-m", "idletrain", "launch", "job.yaml"], folder=tmp_path, timeout=120)
    s3_mirror.Mirror(tmp_path / "runs" / "past", past).copy()
    assert "stay in" in run("down", "past", "--cloud", "aws")
    file = tmp_path / "model.safetensors"
    run("export", "past", "--cloud", "aws", "--to", str(file))
    assert file.stat().st_size > 4 * 64 * 8


@pytest.mark.parametrize("command", ["cost", "logs", "dashboard", "report"])
def test_a_run_that_is_not_there_is_a_sentence(command: str, account: Account) -> None:
    assert "holds no run" in run(command, "nobody", "--cloud", "sandbox", code=1)


def test_a_node_can_be_asked_to_go(cloud: Sandbox, account: Account) -> None:
    node = machine(cloud, "night", "worker")
    assert f"{node}: asked to go" in run("interrupt", "night", "--cloud", "sandbox")
    (instance,) = account.instances("night")
    assert instance.tags["idletrain:interrupt"] == "asked"
    assert f"there are: {node}" in run("interrupt", "night", "--node", "i-0", "--cloud", "sandbox", code=1)


def test_a_dashboard_is_reached_through_a_tunnel_to_its_port(
    cloud: Sandbox, account: Account, past: S3Prefix, tmp_path: Path
) -> None:
    started = {"kind": "run_started", "t": 1.0, "s": 0.0, "run": "past", "subnets": 1, "rounds": 1, "target": None}
    started |= {"parameters": 1, "resumed_at": 0, "run_dir": "", "dashboard": "http://127.0.0.1:8791/idletrain"}
    s3_mirror.append_events(past, [started])
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    identities = certificates.issue("past", ("head", "worker"), soon)
    tags = run_tags("past", past.url, "arn:me", "0", time.time(), time.time() + 60)
    put_identities(account, "past", identities, tags, Patience())
    head = machine(cloud, "past", "head", market="on-demand")
    page = f"http://127.0.0.1:8791/idletrain?token={identities['head'].dashboard_token}"
    aws = tmp_path / "aws"
    aws.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/asked\nexit $(cat {tmp_path}/code)\n')
    aws.chmod(0o755)
    (tmp_path / "code").write_text("0")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert f"{page} while this command runs" in run("dashboard", "past", PATH=path)
    arguments = (tmp_path / "asked").read_text().splitlines()
    assert arguments[:6] == ["ssm", "start-session", "--region", "eu-west-1", "--target", head]
    assert arguments[6:8] == ["--document-name", "AWS-StartPortForwardingSession"]
    assert json.loads(arguments[9]) == {"portNumber": ["8791"], "localPortNumber": ["8791"]}
    (tmp_path / "code").write_text("7")
    assert "the tunnel ended with exit code 7" in run("dashboard", "past", code=1, PATH=path)
    assert "install both" in run("dashboard", "past", code=1, PATH=str(tmp_path / "bin"))


def test_offers_are_a_table_of_the_market(account: Account, tmp_path: Path) -> None:
    printed = run("offers", "--memory", "4GiB", "--cloud", "sandbox", HOME=str(tmp_path))
    assert "spot machines in eu-west-1" in printed


@pytest.mark.parametrize("command", ["offers", "doctor"])
def test_a_job_is_looked_at_in_the_region_that_it_launches_in(
    command: str, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, regions = tmp_path / "job.yaml", []

    class Noting(AwsProvider):
        @contextlib.contextmanager
        def account(self, region: str | None) -> Iterator[Account]:
            regions.append(region)
            yield account

    monkeypatch.setattr(cloud_commands, "cloud_named", lambda _name: Noting(LaunchRequest()))
    monkeypatch.setattr(storage, "cache_folder", lambda: tmp_path)
    job.write_text('name: t\nmodel: {factory: "a.b:c"}\ndata: {name: digits}\ncloud: {region: us-east-1}\n')
    for arguments in ([str(job)], [str(job), "--region", "eu-west-2"], []):
        CliRunner().invoke(app, [command, *arguments])
    assert regions == ["us-east-1", "eu-west-2", None]


def test_the_doctor_names_what_is_missing_and_prints_the_least_policy(account: Account) -> None:
    assert "MISSING  spot role" in run("doctor", "--cloud", "sandbox", code=1)
    policy = json.loads(run("doctor", "--policy", "--cloud", "sandbox"))
    assert {statement["Effect"] for statement in policy["Statement"]} == {"Allow"}


def test_what_nobody_expected_is_a_sentence_in_the_end(cloud: Sandbox, account: Account) -> None:
    cloud.ask("POST", "fault", action="DescribeInstances", mode="html", status=500, times=20)
    assert "AWS is not what answers: Unable to parse response" in run("reap", "--cloud", "sandbox", code=1)
    while cloud.ask("GET", "faults"):
        with pytest.raises(ResponseParserError):
            cloud.ec2.describe_instances()


def test_what_is_left_over_in_another_region_is_found_and_ended(cloud: Sandbox, account: Account) -> None:
    elsewhere = cloud.client("ec2", "us-east-1")
    (vpc,) = elsewhere.describe_vpcs()["Vpcs"]
    tags = run_tags("lost", f"s3://{account.bucket}/runs/lost/", "arn:me", "0", created=0.0, deadline=3600.0)
    elsewhere.create_security_group(**requests.security_group("lost", vpc["VpcId"], tags))
    assert "nothing is left over" in run("reap", "--cloud", "sandbox")
    output = run("reap", "--all-regions", "--yes", "--cloud", "sandbox")
    assert "us-east-1: lost: its deadline has passed" in output
    assert "eu-west-1: nothing is left over" in output
    assert [g["GroupName"] for g in elsewhere.describe_security_groups()["SecurityGroups"]] == ["default"]


def test_a_region_that_may_not_be_looked_in_hides_nothing_in_the_others(cloud: Sandbox, account: Account) -> None:
    cloud.ask("POST", "fault", action="DescribeInstances", code="UnauthorizedOperation", status=403)
    output = run("reap", "--region", "us-east-1", "--region", "eu-west-1", "--cloud", "sandbox", code=1)
    assert "us-east-1: AWS refuses DescribeInstances: UnauthorizedOperation" in output
    assert "eu-west-1: nothing is left over" in output


def test_a_run_that_went_on_while_others_were_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Orphan(name, f"s3://b/{name}/", "it has no head") for name in ("a", "b", "c")]
    looks = iter((found, found[:1] + found[2:], found[2:]))
    ended: list[str] = []
    monkeypatch.setattr(cloud_commands, "_orphans", lambda _account, _grace: next(looks))
    monkeypatch.setattr(teardown, "take_down", lambda _account, run, _prefix: ended.append(run))
    account = SimpleNamespace(region="eu-west-1", s3=None)
    assert cloud_commands._reap(account, 600.0, yes=True) == []
    assert ended == ["a", "c"]
    assert "b: goes on again, and is left alone" in capsys.readouterr().out


def test_without_an_account_nothing_is_tried(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    arguments = run(
        "reap", "--region", "eu-west-1", code=2, HOME=str(tmp_path), AWS_EC2_METADATA_DISABLED="true", **nothing
    )
    assert "there are no credentials" in arguments


def test_without_a_region_nothing_is_tried(tmp_path: Path) -> None:
    nowhere = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    (tmp_path / "job.yaml").write_text(
        'name: t\nmodel: {factory: "idletrain.nn.models:mlp"}\ndata: {name: digits}\ncloud: {image: "idletrain:1"}\n'
    )
    for arguments in (["offers"], ["launch", "job.yaml", "--spot", "--yes"]):
        done = subprocess.run(
            [sys.executable, "-m", "idletrain", *arguments],
            env={**nowhere, "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.endswith("cloud.region: no region is set; name one, such as region: eu-west-1\n")


@pytest.mark.parametrize(
    ("error", "remains"),
    [(None, False), (KeyboardInterrupt, False), (JobError("no"), False), (RunError("the head gave up"), True)],
)
def test_a_sandbox_leaves_nothing_but_what_explains_a_failure(
    error: Any, remains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "sandboxes", lambda: tmp_path)
    mine = tmp_path / str(os.getpid())
    (tmp_path / "999999999").mkdir()  # of a launch that was killed: no process has this number

    def rehearse() -> Any:
        with sandbox.sandbox_process([]) as process:
            (mine / "address.json").write_text("{}")
            (mine / "i-1.log").write_text("why")
            if error:
                raise error
        return process

    if error:
        with pytest.raises(error if isinstance(error, type) else type(error)):
            rehearse()
    else:
        assert rehearse().returncode is not None
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert left == ([mine.name, f"{mine.name}/i-1.log", f"{mine.name}/sandbox.log"] if remains else [])


def test_without_moto_the_rehearsal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.importlib.util, "find_spec", lambda _name: None)
    with (
        pytest.raises(RunError, match=r"needs moto; pip install 'moto\[ec2,iam,s3,server,ssm\]"),
        sandbox.sandbox_process([]),
    ):
        pass
    needed = next(line for line in importlib.metadata.requires("idletrain") or () if line.startswith("moto"))
    assert set(re.split(r"[\[\],]", sandbox.MOTO)[1:6]) <= set(re.split(r"[\[\],]", needed))


def test_the_sandbox_is_there_only_while_a_run_of_it_is(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-m", "idletrain", "reap", "--cloud", "sandbox"],
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no rehearsal is going on" in done.stderr


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), "cloud.image: is missing"),
        (("--churn", "5s"), "--churn, --trace: take nodes in the rehearsal cloud alone"),
        (("--cloud", "sandbox", "--detach"), "--detach: the rehearsal cloud ends with this command"),
        (("--cloud", "sandbox", "--trace", "none.csv"), "--trace: none.csv is not a file"),
        (("--cloud", "sandbox", "--trace", "odd.csv"), "--trace: line 2 is 'oops,a,b'; write lines such as"),
        (
            ("--cloud", "sandbox", "--resume"),
            "--resume: the rehearsal cloud ends with its launch",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    options: tuple[str, ...], arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.csv").write_text("0,add,a\noops,a,b\n")
    job = tmp_path / "job.yaml"
    job.write_text('name: t\nmodel: {factory: "idletrain.nn.models:mlp"}\ndata: {name: digits}\n')
    assert arguments in run("launch", str(job), "--spot", *options, code=2)


def test_the_sandbox_is_reached_past_any_proxy(account: Account) -> None:
    dead = "http://127.0.0.1:9"  # nobody listens there
    proxies = {
        "HTTP_PROXY": dead,
        "http_proxy": dead,
        "HTTPS_PROXY": dead,
        "ALL_PROXY": dead,
        "NO_PROXY": "example.org",
    }
    assert "nothing is left over" in run("reap", "--cloud", "sandbox", **proxies)
