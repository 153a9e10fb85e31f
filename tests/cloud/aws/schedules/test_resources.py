"""A schedule's things on AWS, in an account in memory: all of them made, found again by tag, and taken away."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from moto import mock_aws
from nightly import a_schedule

from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import resources
from idletrain.cloud.machines import Instance, LaunchSite, Pool
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord
from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.schedules.cron import result, run_name

REGION = "eu-west-1"
BUCKET = "idletrain-test"
CREATED = datetime(2026, 3, 1, tzinfo=UTC)


def a_job(**changes: Any) -> Job:
    tree: dict[str, Any] = {
        "name": "digits",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
        "data": {"name": "digits"},
        "nodes": {"max_duration": "2h"},
        "checkpoint": {"to": f"s3://{BUCKET}/team/"},
        "cloud": {"region": REGION, "image": "example.org/idletrain:1", "ami": "ami-12c6146b"},
    }
    return parse_job(tree | changes)


NIGHTLY = a_schedule(created=CREATED)


RECORD = RunRecord(
    run="",
    job={},
    tags={},
    created=0.0,
    deadline=0.0,
    site=LaunchSite(REGION, "vpc-1", {}, "ami-1"),
    wanted=DesiredFleet(1, "spot", ()),
    heads=(Pool("on-demand", "t3.medium", "eu-west-1a"),),
    prices={},
    on_demand={},
    need_bytes=1,
    most_slots=1,
)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """An account in memory with an empty bucket."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    with mock_aws():
        account = Account(REGION)
        account.s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
        (table,) = account.ec2.describe_route_tables()["RouteTables"]
        gateway = account.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        account.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=table["VpcId"])
        out = {"DestinationCidrBlock": "0.0.0.0/0", "GatewayId": gateway}
        account.ec2.create_route(RouteTableId=table["RouteTableId"], **out)
        yield account


def things(account: Account) -> dict[str, int]:
    """How many of each kind of thing there are that a schedule makes."""
    tagged = [{"Name": "tag-key", "Values": ["idletrain:schedule"]}]
    return {
        "schedules": len(account.client("scheduler").list_schedules()["Schedules"]),
        "templates": len(account.ec2.describe_launch_templates()["LaunchTemplates"]),
        "groups": len(account.ec2.describe_security_groups(Filters=tagged)["SecurityGroups"]),
        "objects": account.s3.list_objects_v2(Bucket=BUCKET)["KeyCount"],
    }


def test_everything_is_made_and_taken_away_again(account: Account) -> None:
    nothing = dict.fromkeys(things(account), 0)
    resources.install(account, NIGHTLY, a_job(), b"code", "1.0")
    assert things(account) == {"schedules": 1, "templates": 1, "groups": 1, "objects": 2}
    resources.install(account, NIGHTLY, a_job(), None, "1.0")  # replaces what an earlier try may have left
    assert things(account) == {"schedules": 1, "templates": 1, "groups": 1, "objects": 1}
    assert account.remnants() == []  # nothing of it is a run's: what clears up after runs leaves it alone
    resources.remove(account, "nightly", a_job())
    assert things(account) == nothing
    resources.remove(account, "nightly", a_job())


def test_a_starter_can_be_started_from_what_was_made(account: Account) -> None:
    resources.install(account, NIGHTLY, a_job(), None, "1.0")
    eventbridge_schedule = account.client("scheduler").get_schedule(Name="idletrain-nightly")
    assert eventbridge_schedule["Target"]["RoleArn"] == "arn:aws:iam::123456789012:role/idletrain-schedule"
    request = json.loads(eventbridge_schedule["Target"]["Input"])
    del request["IamInstanceProfile"]  # there are no profiles in this account
    started = account.ec2.run_instances(**request)["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in started["Tags"]}
    assert tags["idletrain:role"] == "starter"
    assert tags["idletrain:schedule"] == "nightly"
    assert tags["idletrain:prefix"] == f"s3://{BUCKET}/team/schedules/nightly/"
    assert started["InstanceType"] == "t3.medium"
    key = tags["idletrain:prefix"].removeprefix(f"s3://{BUCKET}/") + "job.json"
    sent = account.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert Job.model_validate_json(sent) == a_job()
    versions = account.ec2.describe_launch_template_versions(LaunchTemplateName="idletrain-schedule-nightly")
    data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    commands = [c for c in base64.b64decode(data["UserData"]).decode().splitlines() if not c.startswith("#")]
    assert commands[1].startswith("shutdown -h +")  # whatever happens below, it ends by itself
    assert commands[-2].endswith("example.org/idletrain:1 node")
    assert commands[-1] == "shutdown -h now"


def test_a_bucket_or_an_image_that_is_not_there_is_a_sentence_and_makes_nothing(account: Account) -> None:
    nothing, image = things(account), f"123456789012.dkr.ecr.{REGION}.amazonaws.com/idletrain:9"
    incomplete = a_job(checkpoint={"to": "s3://another/"}, cloud={"image": image})
    with pytest.raises(JobError) as refused:
        resources.install(account, NIGHTLY, incomplete, None, "1.0")
    assert [fault.split(";")[0] for fault in refused.value.faults] == [
        "checkpoint.to: there is no bucket another",
        f"cloud.image: there is no {image}",
    ]
    assert things(account) == nothing


def test_runs_without_a_place_of_their_own_go_into_the_accounts_bucket(account: Account) -> None:
    prefix = resources.prefix_of(account, "nightly", a_job(checkpoint={"to": "runs/"}))
    assert prefix.url == f"s3://idletrain-123456789012-{REGION}/runs/schedules/nightly/"


def test_the_history_tells_what_came_of_each_time(account: Account) -> None:
    runs = resources.runs_of(account, a_job())
    prefix = resources.prefix_of(account, "nightly", a_job())
    met = ((1, "ended", ""), (2, "ended", "no node came"), (3, "running", ""), (5, "ended", ""))
    for (day, state, failure), came_of_it in zip(met, ("completed", "failed", "", "stopped"), strict=True):
        due = CREATED.replace(day=day)
        resources.note(prefix, "nightly", due)
        run = run_name("nightly", due)
        record.claim(runs.below(run), dataclasses.replace(RECORD, run=run, state=state, failure=failure))
        if came_of_it:
            runs.below(run).put(record.SUMMARY_KEY, json.dumps({"status": came_of_it}).encode())
    resources.note(prefix, "nightly", CREATED.replace(day=4), "skipped: still running")
    results = [result(e, running=on) for e, on in resources.history(account, "nightly", a_job(), 5)]
    assert results == ["done", "failed with 1", "running", "skipped: still running", "failed with 1"]
    assert len(resources.history(account, "nightly", a_job(), 3)) == 3


def machine(run: str, role: str) -> Instance:
    tags = {"idletrain:run": run, "idletrain:role": role}
    return Instance("i-1", "running", Pool("on-demand", "t3.medium", "eu-west-1a"), 0.0, "10.0.0.1", tags, "")


def test_only_heads_of_the_schedules_own_runs_keep_it_from_starting() -> None:
    machines = [
        machine("nightly-20260301-0200", "head"),
        machine("nightly-20260302-0200", "worker"),
        machine("nightly-too-20260301-0200", "head"),
        machine("nightly", "head"),
    ]
    assert resources.going_on(machines, "nightly") == ["nightly-20260301-0200"]
    assert resources.going_on(machines[1:], "nightly") == []
