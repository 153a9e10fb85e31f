"""A schedule's things on AWS, in an account in memory: all of them made, found again by tag, and taken away."""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from moto import mock_aws
from nightly import a_schedule

from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import eventbridge, resources
from idletrain.cloud.machines import Instance, LaunchSite, Pool
from idletrain.cloud.reconcile import DesiredFleet
from idletrain.cloud.record import RunRecord
from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.schedules.cron import result, run_name
from idletrain.storage import S3Prefix

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
    assert things(account) == {"schedules": 1, "templates": 1, "groups": 1, "objects": 3}
    assert resources.faults(account, NIGHTLY, a_job()) == []
    resources.install(account, NIGHTLY, a_job(), None, "1.0")  # replaces what an earlier try may have left
    assert things(account) == {"schedules": 1, "templates": 1, "groups": 1, "objects": 2}
    assert account.remnants() == []  # nothing of it is a run's: what clears up after runs leaves it alone
    resources.remove(account, NIGHTLY, a_job())
    assert things(account) == nothing
    resources.remove(account, NIGHTLY, a_job())


def test_a_schedule_without_its_bucket_is_taken_away_all_the_same(account: Account) -> None:
    resources.install(account, NIGHTLY, a_job(), None, "1.0")
    prefix = S3Prefix.at(f"s3://{BUCKET}", account.s3)
    prefix.delete(prefix.names())
    account.s3.delete_bucket(Bucket=BUCKET)
    resources.remove(account, NIGHTLY, a_job())
    assert account.client("scheduler").list_schedules()["Schedules"] == []


OTHERS = a_schedule(created=CREATED.replace(day=2))  # of the same name, added on another machine
ELSEWHERE = {"to": f"s3://{BUCKET}/another-team/"}


@pytest.mark.parametrize(
    ("job", "place"),
    [
        (a_job(), "AWS in eu-west-1"),
        (a_job(checkpoint=ELSEWHERE), "AWS in eu-west-1"),
        (a_job(cloud={"region": "eu-west-2"}), f"s3://{BUCKET}/team/schedules/nightly/"),
    ],
    ids=["same-place", "other-prefix", "other-region"],
)
def test_another_schedule_of_the_same_name_is_neither_replaced_nor_taken_away(
    account: Account, job: Job, place: str
) -> None:
    resources.install(account, OTHERS, a_job(), None, "1.0")
    before = things(account)
    here = Account(job.cloud.region)
    assert resources.faults(here, NIGHTLY, job)[0] == (
        f"NAME: {place} has a schedule nightly that was not added here; choose another name, or run `idletrain "
        "schedule remove nightly` where it was added"
    )
    resources.remove(here, NIGHTLY, job)
    assert things(account) == before
    assert eventbridge.is_own(account.client("scheduler"), OTHERS)


def test_a_name_that_is_taken_between_look_and_install_stays_taken(account: Account) -> None:
    resources.install(account, OTHERS, a_job(), None, "1.0")
    before = things(account)
    with pytest.raises(JobError, match="was not added here"):
        resources.install(account, NIGHTLY, a_job(), None, "1.0")
    assert things(account) == before


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
    assert [fault.split(";")[0] for fault in resources.faults(account, NIGHTLY, incomplete)] == [
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
        written = dataclasses.replace(RECORD, run=run, state=state, failure=failure, created=time.time())
        record.claim(runs.below(run), written)  # just now: the head of the one that runs may appear yet
        if came_of_it:
            runs.below(run).put(record.SUMMARY_KEY, json.dumps({"status": came_of_it}).encode())
    resources.note(prefix, "nightly", CREATED.replace(day=4), "skipped: still running")
    results = [result(e, running=on) for e, on in resources.history(account, "nightly", a_job(), 5)]
    assert results == ["done", "failed with 1", "running", "skipped: still running", "failed with 1"]
    assert len(resources.history(account, "nightly", a_job(), 3)) == 3


def test_a_run_whose_head_is_gone_is_interrupted_and_not_running(account: Account) -> None:
    due, run = CREATED, run_name("nightly", CREATED)
    prefix = resources.runs_of(account, a_job()).below(run)
    tags = {"idletrain:run": run, "idletrain:role": "head", "idletrain:created": "now"}
    resources.note(resources.prefix_of(account, "nightly", a_job()), "nightly", due)
    record.claim(prefix, dataclasses.replace(RECORD, run=run, tags=tags, created=time.time()))
    tagged = [{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}]
    started = account.ec2.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1, TagSpecifications=tagged)

    def shown() -> list[str]:
        return [result(e, running=on) for e, on in resources.history(account, "nightly", a_job(), 1)]

    assert shown() == ["running"]
    account.terminate([started["Instances"][0]["InstanceId"]])
    assert shown() == ["interrupted"]
    prefix.put(record.SUMMARY_KEY, json.dumps({"status": "completed"}).encode())  # it could write this, and no more
    assert shown() == ["done"]


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
