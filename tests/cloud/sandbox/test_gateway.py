"""The layer in front of moto: tokens make calls safe to repeat, faults are met once, calls are counted."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from botocore.parsers import ResponseParserError
from rehearsal import Sandbox, ids_of


def test_the_same_token_and_words_give_the_same_answer(cloud: Sandbox) -> None:
    template = cloud.template()
    first = cloud.fleet(template, 2, ClientToken="once")
    again = cloud.fleet(template, 2, ClientToken="once")
    assert ids_of(first) == ids_of(again)
    assert sorted(cloud.inventory()["instances"]) == sorted(ids_of(first))


def test_a_token_with_other_words_is_refused(cloud: Sandbox) -> None:
    template = cloud.template()
    cloud.fleet(template, 1, ClientToken="mine")
    with pytest.raises(ClientError) as caught:
        cloud.fleet(template, 2, ClientToken="mine")
    assert caught.value.response["Error"]["Code"] == "IdempotentParameterMismatch"
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert len(cloud.inventory()["instances"]) == 1


def test_tokens_belong_to_an_action_in_a_region(cloud: Sandbox) -> None:
    request: dict[str, Any] = {"MinCount": 1, "MaxCount": 1, "InstanceType": "m5.large", "ClientToken": "shared"}
    cloud.fleet(cloud.template(), 1, ClientToken="shared")
    for _ in range(2):
        cloud.ec2.run_instances(ImageId=cloud.image(), **request)
    assert len(cloud.inventory()["instances"]) == 2


def test_a_token_is_not_used_up_by_a_call_that_failed(cloud: Sandbox) -> None:
    request: dict[str, Any] = {"MinCount": 1, "MaxCount": 1, "InstanceType": "m5.large", "ClientToken": "again"}
    cloud.ask("POST", "capacity", market="on-demand", count=0)
    with pytest.raises(ClientError, match="InsufficientInstanceCapacity"):
        cloud.ec2.run_instances(ImageId=cloud.image(), **request)
    cloud.ask("POST", "capacity", market="on-demand", count=1)
    assert len(cloud.ec2.run_instances(ImageId=cloud.image(), **request)["Instances"]) == 1


def test_a_lost_reply_launches_nothing_twice(cloud: Sandbox) -> None:
    template = cloud.template()
    cloud.ask("POST", "fault", action="CreateFleet", mode="drop-reply")
    with pytest.raises(ConnectionClosedError):
        cloud.fleet(template, 2, ClientToken="lost")
    launched = cloud.inventory()["instances"]
    assert len(launched) == 2
    assert sorted(ids_of(cloud.fleet(template, 2, ClientToken="lost"))) == sorted(launched)
    assert sorted(cloud.inventory()["instances"]) == sorted(launched)
    assert cloud.ask("GET", "calls")["ec2"]["CreateFleet"] == 2
    assert cloud.ask("GET", "faults") == []


def test_a_fault_is_met_as_often_as_asked_and_then_no_more(cloud: Sandbox) -> None:
    fault = {"code": "RequestLimitExceeded", "message": "slowly", "status": 503, "times": 2}
    cloud.ask("POST", "fault", action="DescribeInstances", **fault)
    for _ in range(2):
        with pytest.raises(ClientError, match="slowly") as caught:
            cloud.ec2.describe_instances()
        assert caught.value.response["Error"]["Code"] == "RequestLimitExceeded"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
    cloud.ec2.describe_instances()


def test_a_page_in_place_of_an_answer_is_no_answer(cloud: Sandbox) -> None:
    cloud.ask("POST", "fault", action="DescribeVpcs", mode="html", status=500)
    with pytest.raises(ResponseParserError):
        cloud.ec2.describe_vpcs()
    cloud.ec2.describe_vpcs()


@pytest.mark.parametrize(
    ("service", "method", "arguments", "action"),
    [
        ("s3", "put_object", {"Bucket": "idletrain-123456789012-eu-west-1", "Key": "a"}, "PutObject"),
        ("s3", "list_objects_v2", {"Bucket": "idletrain-123456789012-eu-west-1"}, "ListObjectsV2"),
        ("ssm", "describe_parameters", {}, "DescribeParameters"),
        ("iam", "list_roles", {}, "ListRoles"),
        ("sts", "get_caller_identity", {}, "GetCallerIdentity"),
        ("scheduler", "list_schedules", {}, "ListSchedules"),
    ],
)
def test_other_services_meet_faults_in_their_own_words_and_are_counted(
    cloud: Sandbox, service: str, method: str, arguments: dict[str, Any], action: str
) -> None:
    call = getattr(cloud.client(service), method)
    cloud.ask("POST", "fault", action=action, code="Throttled", message="not now")
    with pytest.raises(ClientError, match="not now") as caught:
        call(**arguments)
    assert caught.value.response["Error"]["Code"] == "Throttled"
    call(**arguments)
    assert cloud.ask("GET", "calls") == {service: {action: 2}}


def test_a_lost_reply_of_s3_leaves_the_object(cloud: Sandbox) -> None:
    s3, name = cloud.client("s3"), {"Bucket": "idletrain-123456789012-eu-west-1", "Key": "lost"}
    cloud.ask("POST", "fault", action="PutObject", mode="drop-reply")
    with pytest.raises(ConnectionClosedError):
        s3.put_object(**name, Body=b"kept")
    assert s3.get_object(**name)["Body"].read() == b"kept"
    s3.delete_object(**name)


def test_large_objects_pass_unharmed(cloud: Sandbox) -> None:
    s3, name = cloud.client("s3"), {"Bucket": "idletrain-123456789012-eu-west-1", "Key": "large"}
    content = bytes(range(256)) * 4096 * 4
    s3.put_object(**name, Body=content, Metadata={"with_underscore": "1"})
    stored = s3.get_object(**name)
    assert (stored["Body"].read(), stored["Metadata"]) == (content, {"with_underscore": "1"})
    s3.delete_object(**name)
