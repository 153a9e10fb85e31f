"""The account holds what a launch expects to find: a network, a bucket, roles for machines, and an image by name."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rehearsal import Sandbox

from idletrain.cloud.aws.network_routes import subnets_with_internet

BUCKET = "idletrain-123456789012-eu-west-1"


def test_there_is_a_default_network_in_three_zones(cloud: Sandbox) -> None:
    (vpc,) = cloud.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    subnets = cloud.ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc["VpcId"]]}])["Subnets"]
    assert {subnet["AvailabilityZone"] for subnet in subnets} == {f"eu-west-1{zone}" for zone in "abc"}


def test_machines_of_the_default_network_reach_the_outside(cloud: Sandbox) -> None:
    (vpc,) = cloud.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    within = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    tables = cloud.ec2.describe_route_tables(Filters=within)["RouteTables"]
    assert len(subnets_with_internet(cloud.ec2.describe_subnets(Filters=within)["Subnets"], tables)) == 3


def test_there_is_a_bucket_in_the_region(cloud: Sandbox) -> None:
    s3 = cloud.client("s3")
    assert s3.get_bucket_location(Bucket=BUCKET)["LocationConstraint"] == "eu-west-1"
    key = f"account-{time.monotonic_ns()}"
    s3.put_object(Bucket=BUCKET, Key=key, Body=b"1", IfNoneMatch="*")
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"2", IfNoneMatch="*")
    s3.delete_object(Bucket=BUCKET, Key=key)


def test_of_many_who_put_the_same_object_at_once_one_succeeds(cloud: Sandbox) -> None:
    """A run's lease and its record rest on this."""
    key, clients = f"account-{time.monotonic_ns()}", [cloud.client("s3") for _ in range(8)]

    def put(client: Any) -> str:
        try:
            client.put_object(Bucket=BUCKET, Key=key, Body=b"1", IfNoneMatch="*")
        except client.exceptions.ClientError as error:
            return str(error.response["Error"]["Code"])
        return "done"

    with ThreadPoolExecutor(len(clients)) as pool:
        assert Counter(pool.map(put, clients)) == {"done": 1, "PreconditionFailed": 7}
    clients[0].delete_object(Bucket=BUCKET, Key=key)


@pytest.mark.parametrize("role", ["idletrain-head", "idletrain-node", "idletrain-starter"])
def test_machines_have_roles(cloud: Sandbox, role: str) -> None:
    profile = cloud.client("iam").get_instance_profile(InstanceProfileName=role)["InstanceProfile"]
    assert [held["RoleName"] for held in profile["Roles"]] == [role]


@pytest.mark.parametrize("kind", ["", "gpu/"])
def test_the_image_that_a_parameter_names_is_there(cloud: Sandbox, kind: str) -> None:
    name = f"/aws/service/ecs/optimized-ami/amazon-linux-2023/{kind}recommended/image_id"
    image = cloud.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    assert len(cloud.ec2.describe_images(ImageIds=[image])["Images"]) == 1
