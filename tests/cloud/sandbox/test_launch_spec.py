"""A launch template and a request become what EC2 would make of them."""

from __future__ import annotations

import base64

import pytest

from idletrain.cloud.sandbox.launch_spec import launch_spec, overlaid, tags_of

TEMPLATE = {
    "ImageId": "ami-1",
    "InstanceType": "m5.large",
    "SecurityGroupIds": ["sg-1"],
    "IamInstanceProfile": {"Name": "node"},
    "UserData": base64.b64encode(b"#!/bin/bash\n").decode(),
    "InstanceInitiatedShutdownBehavior": "terminate",
    "MetadataOptions": {"HttpTokens": "required"},
    "TagSpecifications": [
        {"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "1"}, {"Key": "b", "Value": "1"}]}
    ],
}


def test_a_template_alone_says_it_all() -> None:
    plan = launch_spec(TEMPLATE, {})
    assert (plan.image, plan.type, plan.groups, plan.market) == ("ami-1", "m5.large", ("sg-1",), "on-demand")
    assert (plan.profile, plan.on_shutdown) == ({"Name": "node"}, "terminate")
    assert plan.metadata_options == {"HttpTokens": "required"}
    assert plan.program == b"#!/bin/bash\n"


def test_what_a_request_says_wins_and_what_it_leaves_out_does_not() -> None:
    more = [{"ResourceType": "instance", "Tags": [{"Key": "b", "Value": "2"}]}]
    request = {"InstanceType": "c5.large", "SubnetId": "subnet-1", "ImageId": None, "TagSpecifications": more}
    plan = launch_spec(TEMPLATE, request)
    assert (plan.image, plan.type, plan.subnet) == ("ami-1", "c5.large", "subnet-1")
    assert plan.tags == {"instance": {"a": "1", "b": "2"}}


def test_without_a_word_an_instance_is_what_ec2_gives() -> None:
    plan = launch_spec({}, {})
    assert (plan.type, plan.on_shutdown, plan.market, plan.program) == ("m1.small", "stop", "on-demand", b"")
    assert plan.max_usd_per_hour is None


@pytest.mark.parametrize(
    ("data", "zone"),
    [
        ({"Placement": {"AvailabilityZone": "eu-west-1b"}}, "eu-west-1b"),
        ({"AvailabilityZone": "eu-west-1c"}, "eu-west-1c"),
    ],
)
def test_a_zone_may_be_named_in_either_way(data: dict[str, object], zone: str) -> None:
    assert launch_spec({}, data).zone == zone


def test_groups_and_subnet_may_be_the_network_interfaces() -> None:
    plan = launch_spec({"NetworkInterfaces": [{"Groups": ["sg-2"], "SubnetId": "subnet-2"}]}, {})
    assert (plan.groups, plan.subnet) == (("sg-2",), "subnet-2")


def test_a_spot_price_may_be_the_templates_or_the_overrides() -> None:
    market = {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.05"}}}
    assert (launch_spec(market, {}).market, launch_spec(market, {}).max_usd_per_hour) == ("spot", 0.05)
    assert launch_spec(market, {"MaxPrice": "0.04"}).max_usd_per_hour == 0.04
    assert launch_spec(market, {}, "on-demand").market == "on-demand"


def test_a_disk_goes_with_its_instance_unless_it_says_otherwise() -> None:
    (disk,) = launch_spec({"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30}}]}, {}).disks
    assert disk == {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 30, "DeleteOnTermination": True}}


def test_tags_are_kept_by_type_of_resource() -> None:
    specifications = [{"ResourceType": kind, "Tags": [{"Key": "k", "Value": kind}]} for kind in ("instance", "volume")]
    tags = tags_of(specifications)
    assert tags == {"instance": {"k": "instance"}, "volume": {"k": "volume"}}
    assert overlaid(tags, {"volume": {"k": "2"}, "fleet": {"f": "3"}}) == {
        "instance": {"k": "instance"},
        "volume": {"k": "2"},
        "fleet": {"f": "3"},
    }
    assert tags_of(None) == {}
