"""EC2's other actions: prices that mean something, groups that are in use, fleets by tag, consoles that speak."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError
from rehearsal import Sandbox, eventually, ids_of


def prices(cloud: Sandbox, **arguments: Any) -> list[dict[str, Any]]:
    pages = cloud.ec2.get_paginator("describe_spot_price_history").paginate(**arguments)
    return [row for page in pages for row in page["SpotPriceHistory"]]


def test_all_spot_prices_come_at_once(cloud: Sandbox) -> None:
    prices(cloud, InstanceTypes=["m5.large"])  # so that the region's catalogue is read
    began = time.perf_counter()
    rows = prices(cloud, ProductDescriptions=["Linux/UNIX"])
    assert time.perf_counter() - began < 5.0  # 0.5 s on two quiet cores; moto alone takes as many seconds
    assert len({row["InstanceType"] for row in rows}) > 1000
    assert {row["AvailabilityZone"] for row in rows} == {f"eu-west-1{zone}" for zone in "abc"}
    assert all(0 < float(row["SpotPrice"]) < 200 for row in rows)


def test_prices_come_a_thousand_at_a_time_as_on_aws(cloud: Sandbox) -> None:
    page = cloud.ec2.describe_spot_price_history()
    assert len(page["SpotPriceHistory"]) == 1000
    more = cloud.ec2.describe_spot_price_history(MaxResults=5, NextToken=page["NextToken"])["SpotPriceHistory"]
    assert len(more) == 5
    assert more[0] not in page["SpotPriceHistory"]


def test_prices_are_asked_for_by_type_zone_and_system_and_are_of_now(cloud: Sandbox) -> None:
    (row,) = prices(cloud, InstanceTypes=["m5.large"], AvailabilityZone="eu-west-1b")
    assert (row["InstanceType"], row["AvailabilityZone"], row["ProductDescription"]) == (
        "m5.large",
        "eu-west-1b",
        "Linux/UNIX",
    )
    assert 0.03 < float(row["SpotPrice"]) < 0.08
    assert abs(datetime.datetime.now(datetime.UTC) - row["Timestamp"]) < datetime.timedelta(minutes=1)
    wanted = {"instance-type": "m5.large", "availability-zone": "eu-west-1b"}
    filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    assert [price["SpotPrice"] for price in prices(cloud, Filters=filters)] == [row["SpotPrice"]]
    assert prices(cloud, ProductDescriptions=["Windows"]) == []


def test_a_group_in_use_cannot_be_deleted_until_its_instance_is_gone_or_in_another(cloud: Sandbox) -> None:
    vpc = cloud.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    group = cloud.ec2.create_security_group(GroupName="in use", Description="d", VpcId=vpc)["GroupId"]
    first, second = cloud.start("sleep 300", 2, SecurityGroupIds=[group])
    cloud.ec2.terminate_instances(InstanceIds=[first])
    with pytest.raises(ClientError, match="DependencyViolation"):
        cloud.ec2.delete_security_group(GroupId=group)
    named = [{"Name": "group-name", "Values": ["default"]}]
    default = cloud.ec2.describe_security_groups(Filters=named)["SecurityGroups"][0]["GroupId"]
    cloud.ec2.modify_instance_attribute(InstanceId=second, Groups=[default])
    state = cloud.state(second)
    assert [held["GroupId"] for held in state["SecurityGroups"]] == [default]
    assert [held["GroupId"] for held in state["NetworkInterfaces"][0]["Groups"]] == [default]
    cloud.ec2.delete_security_group(GroupId=group)
    assert cloud.inventory()["security_groups"] == []


def test_terminating_is_safe_to_repeat_and_takes_interface_and_disk_along(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300")
    for before in ("running", "terminated"):
        (change,) = cloud.ec2.terminate_instances(InstanceIds=[id_])["TerminatingInstances"]
        assert change["PreviousState"]["Name"] == before
    state = cloud.state(id_)
    assert state["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    attached = [{"Name": "attachment.instance-id", "Values": [id_]}]
    assert cloud.ec2.describe_volumes(Filters=attached)["Volumes"] == []
    assert cloud.ec2.describe_network_interfaces(Filters=attached)["NetworkInterfaces"] == []


def test_an_unknown_instance_among_others_ends_none_of_them(cloud: Sandbox) -> None:
    (id_,) = cloud.start("sleep 300")
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        cloud.ec2.terminate_instances(InstanceIds=[id_, "i-00000000000000000"])
    assert cloud.inventory()["instances"] == [id_]


def test_fleets_are_found_by_id_and_by_tag(cloud: Sandbox) -> None:
    template = cloud.template()
    tags = [{"ResourceType": "fleet", "Tags": [{"Key": "run", "Value": "by tag"}]}]
    fleet = cloud.fleet(template, 1, TagSpecifications=tags)["FleetId"]
    other = cloud.fleet(template, 1)["FleetId"]

    def fleet_ids(**arguments: Any) -> list[str]:
        return [item["FleetId"] for item in cloud.ec2.describe_fleets(**arguments)["Fleets"]]

    assert fleet_ids(Filters=[{"Name": "tag:run", "Values": ["by tag"]}]) == [fleet]
    assert fleet_ids(Filters=[{"Name": "tag:run", "Values": ["another"]}]) == []
    assert fleet_ids(FleetIds=[other]) == [other]
    with pytest.raises(ClientError, match=r"InvalidFleetId\.NotFound"):
        fleet_ids(FleetIds=["fleet-none"])


def test_the_console_says_what_the_machine_said(cloud: Sandbox) -> None:
    (id_,) = cloud.start("echo hello from $HOSTNAME; sleep 300")
    eventually(lambda: "hello from" in cloud.ec2.get_console_output(InstanceId=id_).get("Output", ""))


def test_the_catalogue_is_whole_and_quick_when_asked_again(cloud: Sandbox) -> None:
    query = {"Filters": [{"Name": "instance-type", "Values": ["m5.large", "g4dn.xlarge"]}]}
    first = cloud.ec2.describe_instance_types(**query)["InstanceTypes"]
    began = time.perf_counter()
    again = cloud.ec2.describe_instance_types(**query)["InstanceTypes"]
    assert time.perf_counter() - began < 2.0
    assert first == again
    assert {item["InstanceType"] for item in first} == {"m5.large", "g4dn.xlarge"}


def test_instances_are_found_by_tag_although_there_are_many(cloud: Sandbox) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": f"key{n}", "Value": "x"} for n in range(10)]}]
    ids = ids_of(cloud.fleet(cloud.template(TagSpecifications=tags), 30))
    began = time.perf_counter()
    reservations = cloud.ec2.describe_instances(Filters=[{"Name": "tag:key3", "Values": ["x"]}])["Reservations"]
    assert time.perf_counter() - began < 5.0
    running = [i["InstanceId"] for r in reservations for i in r["Instances"] if i["State"]["Name"] == "running"]
    assert sorted(running) == sorted(ids)
