"""The calls to AWS, against the rehearsal cloud: safe to repeat, and sentences where it refuses."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, NoRegionError
from rehearsal import Sandbox

from idletrain.cloud.aws import doctor, requests
from idletrain.cloud.aws.account import Account, explained
from idletrain.cloud.aws.requests import LaunchOutcome, Pool
from idletrain.cluster import certificates
from idletrain.errors import JobError, RunError
from idletrain.job import CloudSettings

POOL = Pool("spot", "m5.large", "eu-west-1a")


def tags_of(run: str) -> dict[str, str]:
    return requests.tags(run, "s3://none/", "arn:me", "0", time.time(), time.time() + 60)


@pytest.fixture
def site(account: Account) -> Any:
    return account.site(None, gpu=False)


def test_a_site_is_the_default_network_and_an_image_that_is_there(site: Any) -> None:
    assert site.region == "eu-west-1"
    assert len(site.subnets) == 3
    assert site.ami.startswith("ami-")


def test_a_site_has_no_subnets_whose_machines_would_be_cut_off(account: Account, site: Any) -> None:
    within = [{"Name": "vpc-id", "Values": [site.vpc]}]
    (table,) = account.ec2.describe_route_tables(Filters=within)["RouteTables"]
    (out,) = [route for route in table["Routes"] if route["GatewayId"].startswith("igw-")]
    there = {"RouteTableId": table["RouteTableId"], "DestinationCidrBlock": out["DestinationCidrBlock"]}
    closed = account.ec2.create_route_table(VpcId=site.vpc)["RouteTable"]["RouteTableId"]
    held = account.ec2.associate_route_table(RouteTableId=closed, SubnetId=site.subnets["eu-west-1b"])["AssociationId"]
    try:
        assert set(account.site(None, gpu=False).subnets) == {"eu-west-1a", "eu-west-1c"}
        account.ec2.delete_route(**there)
        with pytest.raises(JobError, match=r"cloud\.region: no subnet of vpc-.* has internet access"):
            account.site(None, gpu=False)
        (finding,) = [f for f in doctor.examine(account, CloudSettings(), account.bucket) if f.what == "network"]
        assert finding.passed is False
        assert "has internet access" in finding.text
    finally:
        account.ec2.disassociate_route_table(AssociationId=held)
        account.ec2.delete_route_table(RouteTableId=closed)
        if len(account.ec2.describe_route_tables(Filters=within)["RouteTables"][0]["Routes"]) == 1:
            account.ec2.create_route(**there, GatewayId=out["GatewayId"])


def test_a_head_comes_from_the_next_zone_where_one_has_no_capacity(cloud: Sandbox, account: Account, site: Any) -> None:
    made = replace(site, template=cloud.template("#!/bin/bash\nsleep 60\n"))
    pools = [Pool("on-demand", "t3.medium", zone) for zone in ("eu-west-1b", "eu-west-1a", "eu-west-1c")]
    bodies = [requests.head(made, pool, "idletrain-head", tags_of("night"), 0) for pool in pools]
    cloud.ask("POST", "capacity", market="on-demand", zone="eu-west-1b", count=0)
    head = account.start_head(bodies)
    assert cloud.state(head)["Placement"]["AvailabilityZone"] == "eu-west-1a"
    assert cloud.ask("GET", "calls")["ec2"]["RunInstances"] == 2
    cloud.ask("POST", "capacity", market="on-demand", count=1)
    with pytest.raises(RunError, match=r"cloud\.head: no zone of eu-west-1 has capacity for a t3\.medium now"):
        account.start_head([requests.head(made, pool, "idletrain-head", tags_of("night"), 1) for pool in pools])
    assert len(account.instances("night")) == 1


def test_a_head_that_is_refused_for_another_reason_is_not_asked_for_elsewhere(
    cloud: Sandbox, account: Account, site: Any
) -> None:
    made = replace(site, template=cloud.template("#!/bin/bash\nsleep 60\n"))
    pools = [Pool("on-demand", "t3.medium", zone) for zone in ("eu-west-1b", "eu-west-1a")]
    bodies = [requests.head(made, pool, "idletrain-head", tags_of("night"), 0) for pool in pools]
    cloud.ask("POST", "fault", action="RunInstances", code="UnauthorizedOperation", status=403, times=1)
    with pytest.raises(RunError, match="AWS refuses RunInstances: UnauthorizedOperation"):
        account.start_head(bodies)
    assert cloud.ask("GET", "calls")["ec2"]["RunInstances"] == 1


def test_an_image_that_is_not_there_is_refused(account: Account) -> None:
    with pytest.raises(JobError, match=r"cloud\.ami: there is no machine image ami-12345678"):
        account.site("ami-12345678", gpu=False)


def test_a_group_is_made_once_and_lets_nobody_else_in(account: Account, site: Any) -> None:
    first = account.make_group("night", site.vpc, tags_of("night"))
    assert account.make_group("night", site.vpc, tags_of("night")) == first
    (group,) = account.ec2.describe_security_groups(GroupIds=[first])["SecurityGroups"]
    assert {rule["IpProtocol"] for rule in group["IpPermissions"]} == {"tcp", "udp"}
    for rule in group["IpPermissions"]:
        assert (rule["IpRanges"], rule["Ipv6Ranges"]) == ([], [])
        assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [first]


def test_an_identity_is_kept_secret_and_read_back(account: Account) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    issued = certificates.issue("night", ("worker",), until)
    account.put_identities("night", issued, tags_of("night"))
    assert account.identity("night", "worker") == issued["worker"]
    parameter = account.ssm.get_parameter(Name="/idletrain/night/worker/tls")["Parameter"]
    assert parameter["Type"] == "SecureString"
    for remnant in account.remnants("night"):
        account.delete(remnant)


def test_everything_of_a_run_is_found_by_its_tag_and_nothing_else(account: Account, site: Any) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    for run in ("night", "day"):
        account.make_group(run, site.vpc, tags_of(run))
        account.put_identities(run, certificates.issue(run, ("worker",), until), tags_of(run))
    assert sorted(remnant.kind for remnant in account.remnants("night")) == ["group", "parameter"]
    assert {remnant.tags["idletrain:run"] for remnant in account.remnants("night")} == {"night"}
    assert {remnant.tags["idletrain:run"] for remnant in account.remnants()} == {"night", "day"}
    for remnant in account.remnants():
        account.delete(remnant)
        account.delete(remnant)
    assert account.remnants() == []


def fleet_body(cloud: Sandbox, account: Account, site: Any) -> Any:
    made = requests.LaunchSite(**{**vars(site), "template": cloud.template("#!/bin/bash\nsleep 60\n")})
    return made, requests.fleet(made, (POOL,), 1, "1", tags_of("night"), None)


def test_a_lack_of_capacity_is_asked_about_once(cloud: Sandbox, account: Account, site: Any) -> None:
    made, body = fleet_body(cloud, account, site)
    cloud.ask("POST", "fault", action="CreateFleet", code="InsufficientInstanceCapacity", status=500, times=1)
    assert account.start_nodes(made, body, [POOL]) == LaunchOutcome(without_capacity=frozenset({POOL}))
    assert cloud.ask("GET", "calls")["ec2"]["CreateFleet"] == 1


def test_what_nobody_understands_is_not_taken_for_a_passing_trouble(
    cloud: Sandbox, account: Account, site: Any
) -> None:
    made, body = fleet_body(cloud, account, site)
    cloud.ask("POST", "fault", action="CreateFleet", mode="html", times=1)
    outcome = account.start_nodes(made, body, [POOL])
    assert outcome.fatal
    assert not outcome.retry
    cloud.ask("POST", "fault", action="DescribeInstances", mode="html", times=10)
    with pytest.raises(RunError, match=r"AWS is not what answers: Unable to parse response .*; check the network"):
        account.instances("night")
    while cloud.ask("GET", "faults"):
        with pytest.raises(RunError):
            account.instances("night")


def test_machines_that_are_not_there_do_not_keep_others_alive(cloud: Sandbox, account: Account) -> None:
    (there,) = cloud.start("sleep 60")
    account.terminate([there, "i-00000000000000000"])
    assert cloud.state(there)["State"]["Name"] == "terminated"
    account.terminate([there])


def test_a_group_in_use_is_deleted_as_soon_as_it_is_free(cloud: Sandbox, account: Account, site: Any) -> None:
    account.make_group("night", site.vpc, tags_of("night"))
    cloud.ask("POST", "fault", action="DeleteSecurityGroup", code="DependencyViolation", times=2)
    (group,) = account.remnants("night")
    account.delete(group)
    assert account.remnants("night") == []
    assert cloud.ask("GET", "faults") == []


def test_a_machine_can_leave_its_run_s_group(cloud: Sandbox, account: Account, site: Any) -> None:
    group = account.make_group("night", site.vpc, tags_of("night"))
    (there,) = cloud.start("sleep 60", SecurityGroupIds=[group])
    account.leave_group(there)
    for remnant in account.remnants("night"):
        account.delete(remnant)
    assert cloud.state(there)["State"]["Name"] == "running"


@pytest.mark.parametrize(
    ("error", "kind", "arguments"),
    [
        (NoCredentialsError(), JobError, "no credentials; run `aws configure`"),
        (NoRegionError(), JobError, "cloud.region: no region is set"),
        (
            ClientError({"Error": {"Code": "Odd", "Message": "thing"}}, "DoIt"),
            RunError,
            "AWS refuses DoIt: Odd: thing; `idletrain doctor`",
        ),
    ],
)
def test_refusals_are_one_sentence(error: Exception, kind: type[Exception], arguments: str) -> None:
    with pytest.raises(kind, match=arguments), explained():
        raise error
