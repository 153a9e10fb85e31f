"""RunInstances and CreateFleet launch what there is, with everything a template says, and refuse what AWS would."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from botocore.exceptions import ClientError
from rehearsal import Sandbox, ids_of

ZONES = [f"eu-west-1{zone}" for zone in "abc"]
PER_ZONE = [{"InstanceType": "m5.large", "AvailabilityZone": zone} for zone in ZONES]


def tag(kind: str, **tags: str) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def run(cloud: Sandbox, template: str, least: int = 1, most: int = 1, **more: Any) -> list[dict[str, Any]]:
    request = {"LaunchTemplate": {"LaunchTemplateId": template}, "InstanceType": "m5.large"}
    launched = cloud.ec2.run_instances(MinCount=least, MaxCount=most, **{**request, **more})["Instances"]
    return list(launched)


def code(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    answer = error.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_a_fleet_is_spread_over_zones_and_its_instances_are_spot(cloud: Sandbox) -> None:
    answer = cloud.fleet(cloud.template(), 3, *PER_ZONE)
    assert answer["Errors"] == []
    assert {item["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] for item in answer["Instances"]} == {
        *ZONES
    }
    states = [cloud.state(id_) for id_ in ids_of(answer)]
    assert {state["Placement"]["AvailabilityZone"] for state in states} == {*ZONES}
    assert {state["InstanceLifecycle"] for state in states} == {"spot"}
    assert all(state["SpotInstanceRequestId"].startswith("sir-") for state in states)


def test_a_fleet_of_on_demand_instances_has_no_spot_in_it(cloud: Sandbox) -> None:
    answer = cloud.fleet(
        cloud.template(), 2, market="on-demand", OnDemandOptions={"AllocationStrategy": "lowest-price"}
    )
    assert [item["Lifecycle"] for item in answer["Instances"]] == ["on-demand"]
    assert all("InstanceLifecycle" not in cloud.state(id_) for id_ in ids_of(answer))


def test_partial_capacity_gives_instances_and_errors_in_one_answer(cloud: Sandbox) -> None:
    for zone, count in zip(ZONES, (2, 0, 0), strict=True):
        cloud.ask("POST", "capacity", market="spot", zone=zone, count=count)
    answer = cloud.fleet(cloud.template(), 5, *PER_ZONE)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert len(ids_of(answer)) == 2
    assert {error["ErrorCode"] for error in answer["Errors"]} == {"InsufficientInstanceCapacity"}
    assert {error["Lifecycle"] for error in answer["Errors"]} == {"spot"}
    failed = [error["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"] for error in answer["Errors"]]
    assert sorted(failed) == ZONES


def test_a_dry_market_gives_errors_alone_and_the_other_market_still_gives(cloud: Sandbox) -> None:
    cloud.ask("POST", "capacity", market="spot", count=0)
    answer = cloud.fleet(cloud.template(), 2)
    assert (ids_of(answer), len(answer["Errors"])) == ([], 1)
    assert len(ids_of(cloud.fleet(cloud.template(), 2, market="on-demand"))) == 2


def test_capacity_comes_back_with_what_was_terminated(cloud: Sandbox) -> None:
    cloud.ask("POST", "capacity", market="spot", count=1)
    template = cloud.template()
    (first,) = ids_of(cloud.fleet(template, 1))
    assert ids_of(cloud.fleet(template, 1)) == []
    cloud.ec2.terminate_instances(InstanceIds=[first])
    assert len(ids_of(cloud.fleet(template, 1))) == 1


def test_a_fleet_may_be_part_spot_part_on_demand(cloud: Sandbox) -> None:
    target = {"TotalTargetCapacity": 3, "OnDemandTargetCapacity": 1, "DefaultTargetCapacityType": "spot"}
    answer = cloud.fleet(cloud.template(), 3, TargetCapacitySpecification=target)
    given = {item["Lifecycle"]: len(item["InstanceIds"]) for item in answer["Instances"]}
    assert given == {"on-demand": 1, "spot": 2}


def test_a_price_cap_below_the_market_gives_nothing(cloud: Sandbox) -> None:
    answer = cloud.fleet(cloud.template(), 1, {**PER_ZONE[0], "MaxPrice": "0.001"}, PER_ZONE[1])
    assert [error["ErrorCode"] for error in answer["Errors"]] == ["SpotMaxPriceTooLow"]
    assert len(ids_of(answer)) == 1


def test_a_type_that_a_zone_does_not_have_is_an_error_of_its_pool(cloud: Sandbox) -> None:
    answer = cloud.fleet(cloud.template(), 1, {"InstanceType": "p6-b200.48xlarge", "AvailabilityZone": ZONES[0]})
    assert ([error["ErrorCode"] for error in answer["Errors"]], ids_of(answer)) == (["Unsupported"], [])


def test_everything_in_a_template_reaches_the_instance(cloud: Sandbox) -> None:
    subnet = cloud.ec2.describe_subnets()["Subnets"][0]
    group = cloud.ec2.create_security_group(GroupName="fields", Description="d", VpcId=subnet["VpcId"])["GroupId"]
    template = cloud.template(
        "#!/bin/bash\nsleep 300\n",
        SecurityGroupIds=[group],
        IamInstanceProfile={"Name": "idletrain-node"},
        MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        TagSpecifications=[
            tag("instance", run="demo"),
            tag("volume", run="demo"),
            tag("network-interface", run="demo"),
        ],
        BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30, "VolumeType": "gp3"}}],
    )
    override = {"InstanceType": "c5.large", "SubnetId": subnet["SubnetId"]}
    (id_,) = ids_of(cloud.fleet(template, 1, override, TagSpecifications=[tag("instance", role="worker")]))
    state = cloud.state(id_)
    assert [held["GroupId"] for held in state["SecurityGroups"]] == [group]
    assert [held["GroupId"] for held in state["NetworkInterfaces"][0]["Groups"]] == [group]
    assert state["IamInstanceProfile"]["Arn"].endswith(":instance-profile/idletrain-node")
    assert state["MetadataOptions"]["HttpTokens"] == "required"
    assert state["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    tags = {item["Key"]: item["Value"] for item in state["Tags"]}
    assert {"run", "role"} < tags.keys()
    assert tags["aws:ec2:fleet-id"].startswith("fleet-")
    described = cloud.ec2.describe_instance_attribute(InstanceId=id_, Attribute="userData")["UserData"]["Value"]
    assert base64.b64decode(described) == b"#!/bin/bash\nsleep 300\n"
    behaviour = cloud.ec2.describe_instance_attribute(InstanceId=id_, Attribute="instanceInitiatedShutdownBehavior")
    assert behaviour["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    volumes = cloud.ec2.describe_volumes(Filters=[{"Name": "attachment.instance-id", "Values": [id_]}])["Volumes"]
    assert [(disk["Size"], disk["Tags"]) for disk in volumes] == [(30, [{"Key": "run", "Value": "demo"}])]


def test_a_request_adds_to_its_template(cloud: Sandbox) -> None:
    template = cloud.template(TagSpecifications=[tag("instance", a="1", b="1")])
    (launched,) = run(
        cloud, template, TagSpecifications=[tag("instance", b="2")], IamInstanceProfile={"Name": "idletrain-head"}
    )
    state = cloud.state(launched["InstanceId"])
    tags = {item["Key"]: item["Value"] for item in state["Tags"]}
    assert (tags["a"], tags["b"]) == ("1", "2")
    assert state["IamInstanceProfile"]["Arn"].endswith("/idletrain-head")


def test_without_capacity_run_instances_is_a_servers_error(cloud: Sandbox) -> None:
    cloud.ask("POST", "capacity", market="on-demand", count=1)
    template = cloud.template()
    with pytest.raises(ClientError) as caught:
        run(cloud, template, least=2, most=2)
    assert code(caught) == (500, "InsufficientInstanceCapacity")
    assert len(run(cloud, template, least=1, most=2)) == 1


def test_run_instances_goes_to_another_zone_if_none_is_named(cloud: Sandbox) -> None:
    cloud.ask("POST", "capacity", market="on-demand", zone=ZONES[0], count=0)
    (launched,) = run(cloud, cloud.template())
    assert cloud.state(launched["InstanceId"])["Placement"]["AvailabilityZone"] == ZONES[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"InstanceType": "x9.huge"}, "InvalidParameterValue"),
        ({"ImageId": "ami-00000000000000000"}, "InvalidAMIID.NotFound"),
        ({"SecurityGroupIds": ["sg-00000000000000000"]}, "InvalidGroup.NotFound"),
        ({"SubnetId": "subnet-00000000000000000"}, "InvalidSubnetID.NotFound"),
        ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue"),
        ({"Placement": {"AvailabilityZone": "eu-west-1z"}}, "InvalidParameterValue"),
        ({"UserData": "x" * 16385}, "InvalidParameterValue"),
        ({"DryRun": True}, "DryRunOperation"),
    ],
)
def test_what_aws_would_not_launch_is_refused(cloud: Sandbox, arguments: dict[str, Any], expected: str) -> None:
    template = cloud.template()
    with pytest.raises(ClientError) as caught:
        run(cloud, template, **arguments)
    assert caught.value.response["Error"]["Code"] == expected
    assert cloud.inventory()["instances"] == []


def test_user_data_of_16_kb_is_taken_and_no_byte_more(cloud: Sandbox) -> None:
    cloud.template("x" * 16384)
    with pytest.raises(ClientError) as caught:
        cloud.template("x" * 16385)
    assert code(caught) == (400, "InvalidParameterValue")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"InstanceType": "x9.huge"}, "InvalidParameterValue"),
        ({**PER_ZONE[0], "WeightedCapacity": 4}, "UnsupportedOperation"),
    ],
)
def test_a_fleet_is_refused_as_a_whole_for_what_is_wrong_in_it(
    cloud: Sandbox, override: dict[str, Any], expected: str
) -> None:
    template = cloud.template()
    with pytest.raises(ClientError) as caught:
        cloud.fleet(template, 1, PER_ZONE[0], override)
    assert code(caught) == (400, expected)
    assert cloud.inventory()["instances"] == []


def test_fleets_that_would_relaunch_by_themselves_are_refused(cloud: Sandbox) -> None:
    template = cloud.template()
    with pytest.raises(ClientError) as caught:
        cloud.fleet(template, 1, Type="maintain")
    assert code(caught) == (400, "UnsupportedOperation")
