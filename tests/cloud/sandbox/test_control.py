"""The control endpoints: what is there, what there is to get, and what is to go."""

from __future__ import annotations

from typing import Any

import pytest
from rehearsal import Sandbox, eventually


def test_an_empty_cloud_has_an_empty_inventory(cloud: Sandbox) -> None:
    empty: dict[str, list[Any]] = {
        "instances": [],
        "security_groups": [],
        "launch_templates": [],
        "parameters": [],
        "processes": [],
    }
    assert cloud.inventory() == empty


def test_whatever_a_run_could_leave_behind_is_in_the_inventory_in_any_region(cloud: Sandbox) -> None:
    far, ssm = cloud.client("ec2", "us-east-1"), cloud.client("ssm")
    group = far.create_security_group(GroupName="far", Description="d")["GroupId"]
    data = {"ImageId": cloud.image()}
    template = far.create_launch_template(LaunchTemplateName="far", LaunchTemplateData=data)["LaunchTemplate"]
    ssm.put_parameter(Name="/idletrain/run/head/key", Value="secret", Type="SecureString")
    (id_,) = cloud.start("sleep 300")
    (process,) = eventually(lambda: [p for p in cloud.inventory()["processes"] if p["pids"]])
    inventory = cloud.inventory()
    assert process["instance"] == id_
    assert inventory["instances"] == [id_]
    assert inventory["security_groups"] == [group]
    assert template["LaunchTemplateId"] in inventory["launch_templates"]
    assert inventory["parameters"] == ["/idletrain/run/head/key"]
    far.delete_security_group(GroupId=group)
    far.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])
    ssm.delete_parameter(Name="/idletrain/run/head/key")


def test_capacity_is_set_and_lifted_by_pattern(cloud: Sandbox) -> None:
    limit = {"market": "spot", "type": "m5.*", "zone": "*"}
    assert cloud.ask("POST", "capacity", **limit, count=2) == [{**limit, "count": 2}]
    assert cloud.ask("POST", "capacity", **limit, count=1) == [{**limit, "count": 1}]
    assert cloud.ask("POST", "capacity", **limit, count=None) == []


def test_only_running_spot_instances_can_be_taken(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300", market="on-demand")
    for path in ("take", "notice", "rebalance"):
        status, message = cloud.refusal("POST", path, instance=id_, seconds=1)
        assert (status, "no running spot instance" in message) == (400, True)
    assert cloud.refusal("POST", "take", instance="i-none")[0] == 400
    assert cloud.inventory()["instances"] == [id_]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "nothing", {}, 404),
        ("GET", "take", {}, 404),
        ("POST", "capacity", {"market": "spot"}, 400),
        ("POST", "fault", {"action": "X", "colour": "red"}, 400),
        ("POST", "fault", {}, 400),
        ("POST", "notice", {}, 400),
    ],
)
def test_what_makes_no_sense_is_refused(
    cloud: Sandbox, method: str, path: str, body: dict[str, Any], status: int
) -> None:
    assert cloud.refusal(method, path, **body)[0] == status


def test_calls_are_counted_until_they_are_reset(cloud: Sandbox) -> None:
    cloud.ec2.describe_vpcs()
    cloud.ec2.describe_vpcs()
    assert cloud.ask("GET", "calls") == {"ec2": {"DescribeVpcs": 2}}
    cloud.ask("POST", "calls/reset")
    assert cloud.ask("GET", "calls") == {}
