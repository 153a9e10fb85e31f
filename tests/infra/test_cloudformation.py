"""The template passes cfn-lint, deploys, and gives roles what `cloud/aws/iam.py` says and not a permission more.

The cloud is moto's, in this process. It makes no bucket policies, and leaves out what a bucket's properties say of
public access and lifecycle, and a subnet's of public addresses: these are read from the template that was deployed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

from idletrain.cloud.aws import iam
from idletrain.cloud.aws.account import Account

TEMPLATE = Path(__file__).parents[2] / "infra" / "aws" / "idletrain.yaml"
REGION, ACCOUNT, STACK = "us-east-1", "123456789012", "idletrain"
ANYWHERE = {"0.0.0.0/0", "::/0"}
ALL = {"Network": "true", "ExpireRunsAfterDays": "30"}
pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse AWS..S3..BucketPolicy")


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms, as the values that they are given."""


_Loader.add_multi_constructor("!", lambda _loader, _tag, node: getattr(node, "value", None))


@pytest.fixture(scope="module")
def properties() -> dict[str, dict[str, Any]]:
    """The properties of the template's resources."""
    resources = yaml.load(TEMPLATE.read_text(), _Loader)["Resources"]
    return {name: resource["Properties"] for name, resource in resources.items() if "Properties" in resource}


@pytest.fixture(scope="module", params=[ALL], ids=["all"])
def aws(request: pytest.FixtureRequest) -> Iterator[boto3.Session]:
    """An account in which the template is deployed, with all that it can make unless told otherwise."""
    with mock_aws():
        session = boto3.Session(region_name=REGION)
        stacks = session.client("cloudformation")
        stacks.create_stack(
            StackName=STACK,
            TemplateBody=TEMPLATE.read_text(),
            Capabilities=["CAPABILITY_NAMED_IAM"],
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in request.param.items()],
        )
        assert stacks.describe_stacks(StackName=STACK)["Stacks"][0]["StackStatus"] == "CREATE_COMPLETE"
        yield session


def physical_ids(aws: boto3.Session, type_: str) -> list[str]:
    """The physical ids of the stack's resources of a type."""
    resources = aws.client("cloudformation").describe_stack_resources(StackName=STACK)["StackResources"]
    return [r["PhysicalResourceId"] for r in resources if r.get("ResourceType") == type_]


def scope(aws: boto3.Session) -> iam.Scope:
    (bucket,) = physical_ids(aws, "AWS::S3::Bucket")
    return iam.Scope(account=ACCOUNT, region=REGION, bucket=bucket)


def plain(statements: list[dict[str, Any]]) -> list[str]:
    """Statements in one order and with lists wherever IAM takes a list or a value."""

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: listed(item) for key, item in value.items()}
        return sorted(value) if isinstance(value, list) else [value]

    return sorted(json.dumps(listed(statement), sort_keys=True) for statement in statements)


def granted(aws: boto3.Session, role: str) -> list[dict[str, Any]]:
    """All statements of a role's policies."""
    iam = aws.client("iam")
    statements = []
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        statements += ast.literal_eval(document)["Statement"]  # moto makes a role's own policies Python, not JSON
    for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        statements += managed(aws, attached["PolicyArn"])
    return statements


def managed(aws: boto3.Session, arn: str) -> list[dict[str, Any]]:
    document = aws.client("iam").get_policy_version(PolicyArn=arn, VersionId="v1")["PolicyVersion"]["Document"]
    statements: list[dict[str, Any]] = document["Statement"]
    return statements


def test_cfn_lint_has_nothing_to_say() -> None:
    command = [sys.executable, "-c", "from cfnlint.runner import main; main()"]
    command += ["--include-checks", "I", "--", str(TEMPLATE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("role", "wanted"),
    [
        (iam.HEAD, iam.head_policy),
        (iam.NODE, iam.node_policy),
        (iam.STARTER, iam.starter_policy),
        (iam.SCHEDULE, iam.schedule_policy),
    ],
)
def test_a_role_may_do_what_its_policy_in_the_code_says(aws: boto3.Session, role: str, wanted: Any) -> None:
    assert plain(granted(aws, role)) == plain(wanted(scope(aws))["Statement"])


def test_the_two_managed_policies_together_are_the_launchers(aws: boto3.Session) -> None:
    statements = [s for arn in physical_ids(aws, "AWS::IAM::ManagedPolicy") for s in managed(aws, arn)]
    assert plain(statements) == plain(iam.launcher_policy(scope(aws))["Statement"])


def test_each_role_is_taken_by_one_service_alone(aws: boto3.Session) -> None:
    expected = {iam.HEAD: "ec2", iam.NODE: "ec2", iam.STARTER: "ec2", iam.SCHEDULE: "scheduler"}
    roles = {role["RoleName"]: role["AssumeRolePolicyDocument"] for role in aws.client("iam").list_roles()["Roles"]}
    assert roles.keys() == expected.keys()
    for name, service in expected.items():
        (trust,) = roles[name]["Statement"]
        assert trust["Principal"] == {"Service": f"{service}.amazonaws.com"}
    # Other accounts' schedules reach the same service: it acts for this account's only.
    assert roles[iam.SCHEDULE]["Statement"][0]["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


def test_machines_get_their_roles_by_profiles_of_the_same_names(aws: boto3.Session) -> None:
    profiles = aws.client("iam").list_instance_profiles()["InstanceProfiles"]
    assert {p["InstanceProfileName"]: [r["RoleName"] for r in p["Roles"]] for p in profiles} == {
        iam.HEAD: [iam.HEAD],
        iam.NODE: [iam.NODE],
        iam.STARTER: [iam.STARTER],
    }


def test_the_bucket_is_encrypted_and_its_name_is_put_out_as_a_jobs_prefix(aws: boto3.Session) -> None:
    bucket = scope(aws).bucket
    rules = aws.client("s3").get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rules[0]["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    assert "Status" not in aws.client("s3").get_bucket_versioning(Bucket=bucket)
    outputs = aws.client("cloudformation").describe_stacks(StackName=STACK)["Stacks"][0]["Outputs"]
    assert {o["OutputKey"]: o["OutputValue"] for o in outputs}["Runs"] == f"s3://{bucket}/runs/"
    assert bucket == Account(REGION).bucket  # where it is looked for unless told otherwise


def test_the_bucket_blocks_all_public_access_and_plain_connections(properties: dict[str, Any]) -> None:
    blocked = properties["Bucket"]["PublicAccessBlockConfiguration"]
    assert blocked == dict.fromkeys(
        ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
    )
    assert properties["Bucket"]["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
    (statement,) = properties["BucketPolicy"]["PolicyDocument"]["Statement"]
    assert (statement["Effect"], statement["Action"]) == ("Deny", "s3:*")
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_the_bucket_outlives_the_stack_but_not_everything_in_it_stays(properties: dict[str, Any]) -> None:
    bucket = yaml.load(TEMPLATE.read_text(), _Loader)["Resources"]["Bucket"]
    assert (bucket["DeletionPolicy"], bucket["UpdateReplacePolicy"]) == ("Retain", "Retain")
    abort, versions, _expire = properties["Bucket"]["LifecycleConfiguration"]["Rules"]
    assert abort["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert versions["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}
    assert versions["ExpiredObjectDeleteMarker"] is True


def test_the_network_has_a_subnet_in_each_of_three_zones_and_a_way_out(
    aws: boto3.Session, properties: dict[str, Any]
) -> None:
    ec2 = aws.client("ec2")
    (vpc,) = physical_ids(aws, "AWS::EC2::VPC")
    mine = [{"Name": "vpc-id", "Values": [vpc]}]
    subnets = ec2.describe_subnets(Filters=mine)["Subnets"]
    assert len({subnet["AvailabilityZone"] for subnet in subnets}) == len(subnets) == 3
    assert all(properties[f"Subnet{n}"]["MapPublicIpOnLaunch"] for n in ("One", "Two", "Three"))
    (routes,) = physical_ids(aws, "AWS::EC2::RouteTable")
    (table,) = ec2.describe_route_tables(RouteTableIds=[routes])["RouteTables"]
    ways = {route.get("DestinationCidrBlock"): route.get("GatewayId") for route in table["Routes"]}
    assert [ways["0.0.0.0/0"]] == physical_ids(aws, "AWS::EC2::InternetGateway")
    assert physical_ids(aws, "AWS::EC2::SubnetRouteTableAssociation") == [routes] * 3  # moto names them by their table
    (endpoint,) = ec2.describe_vpc_endpoints(Filters=mine)["VpcEndpoints"]
    assert (endpoint["VpcEndpointType"], endpoint["ServiceName"]) == ("Gateway", f"com.amazonaws.{REGION}.s3")
    assert endpoint["RouteTableIds"] == [routes]


def test_no_security_group_lets_the_world_in(aws: boto3.Session) -> None:
    (vpc,) = physical_ids(aws, "AWS::EC2::VPC")
    groups = aws.client("ec2").describe_security_groups()["SecurityGroups"]
    assert vpc in {group["VpcId"] for group in groups}
    for rule in (rule for group in groups for rule in group["IpPermissions"]):
        assert not ANYWHERE & {r["CidrIp"] for r in rule["IpRanges"]}
        assert not ANYWHERE & {r["CidrIpv6"] for r in rule["Ipv6Ranges"]}
    assert physical_ids(aws, "AWS::EC2::SecurityGroupIngress") == []


def test_the_one_group_is_that_of_heads_that_end_in_the_network_of_the_runs(aws: boto3.Session) -> None:
    (group,) = physical_ids(aws, "AWS::EC2::SecurityGroup")
    (security_group,) = aws.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert [security_group["VpcId"]] == physical_ids(aws, "AWS::EC2::VPC")
    assert iam.ENDED_HEADS_TAG in {tag["Key"] for tag in security_group["Tags"]}
    assert security_group["IpPermissions"] == []


def test_nothing_of_the_stack_can_be_taken_for_a_runs(aws: boto3.Session) -> None:
    """`reap` ends what carries a run's tag."""
    ec2 = aws.client("ec2")
    assert ec2.describe_tags(Filters=[{"Name": "key", "Values": ["idletrain:run"]}])["Tags"] == []
    (vpc,) = ec2.describe_vpcs(Filters=[{"Name": "tag-key", "Values": ["idletrain:network"]}])["Vpcs"]
    assert [vpc["VpcId"]] == physical_ids(aws, "AWS::EC2::VPC")


@pytest.mark.parametrize("aws", [{"Network": "true", "Zones": "2"}], indirect=True, ids=["two zones"])
def test_a_region_with_two_zones_gets_two_subnets(aws: boto3.Session) -> None:
    assert len(physical_ids(aws, "AWS::EC2::Subnet")) == 2


@pytest.mark.parametrize("aws", [{}], indirect=True, ids=["no network"])
def test_there_is_no_network_unless_asked_for(aws: boto3.Session) -> None:
    resources = aws.client("cloudformation").describe_stack_resources(StackName=STACK)["StackResources"]
    types = {resource.get("ResourceType", "") for resource in resources}
    assert {type_ for type_ in types if type_.startswith("AWS::EC2::")} == {"AWS::EC2::SecurityGroup"}
    assert {"AWS::S3::Bucket", "AWS::IAM::Role"} <= types
