"""The calls to AWS, against the rehearsal cloud: safe to repeat, and sentences where it refuses."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader
from rehearsal import Sandbox

from idletrain.cloud.aws import doctor, run_resources
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.aws.run_resources import make_group, put_identities
from idletrain.cloud.machines import LaunchOutcome, NodeRequest, Pool, run_tags
from idletrain.cluster import certificates
from idletrain.errors import JobError, RunError
from idletrain.machine_settings import CloudSettings

POOL = Pool("spot", "m5.large", "eu-west-1a")


def tags_of(run: str) -> dict[str, str]:
    return run_tags(run, "s3://none/", "arn:me", "0", time.time(), time.time() + 60)


@pytest.fixture
def site(account: Account) -> Any:
    return account.site(None, gpu=False)


def test_another_account_reads_no_service_s_description_again_and_has_keys_and_region_of_its_own(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert account.ec2
    read: list[str] = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda self, path: [read.append(path), load(self, path)][1])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    other = Account("us-east-1")
    clients = other.ec2, account.ec2
    assert read == []
    assert [client.meta.region_name for client in clients] == ["us-east-1", account.region]
    keys = [client._get_credentials().access_key for client in clients]
    assert keys[0] == "another" != keys[1]
    monkeypatch.setenv("AWS_DATA_PATH", "/of-ones-own")
    assert Account().ec2
    assert any("/ec2/" in path for path in read)  # which may be described there


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


def test_an_image_that_is_not_there_is_refused(account: Account) -> None:
    with pytest.raises(JobError, match=r"cloud\.ami: there is no machine image ami-12345678"):
        account.site("ami-12345678", gpu=False)


def test_an_identity_is_kept_secret_and_read_back(account: Account) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    issued = certificates.issue("night", ("worker",), until)
    put_identities(account, "night", issued, tags_of("night"), Patience())
    assert account.identity("night", "worker") == issued["worker"]
    parameter = account.ssm.get_parameter(Name="/idletrain/night/worker/tls")["Parameter"]
    assert parameter["Type"] == "SecureString"
    for remnant in account.remnants("night"):
        account.delete(remnant)


def test_everything_of_a_run_is_found_by_its_tag_and_nothing_else(account: Account, site: Any) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    for run in ("night", "day"):
        make_group(account, run, site.vpc, tags_of(run), Patience())
        put_identities(account, run, certificates.issue(run, ("worker",), until), tags_of(run), Patience())
    assert sorted(remnant.kind for remnant in account.remnants("night")) == ["group", "parameter"]
    assert {remnant.tags["idletrain:run"] for remnant in account.remnants("night")} == {"night"}
    assert {remnant.tags["idletrain:run"] for remnant in account.remnants()} == {"night", "day"}
    for remnant in account.remnants():
        account.delete(remnant)
        account.delete(remnant)
    assert account.remnants() == []


@pytest.fixture
def request_(cloud: Sandbox, site: Any) -> Any:
    """A request for one node, and where it would start."""
    launch_site = replace(site, template=cloud.template("#!/bin/bash\nsleep 60\n"))
    return launch_site, NodeRequest(pools=(POOL,), count=1, attempt="1", tags=tags_of("night"))


def test_a_lack_of_capacity_is_asked_about_once(cloud: Sandbox, account: Account, request_: Any) -> None:
    cloud.ask("POST", "fault", action="CreateFleet", code="InsufficientInstanceCapacity", status=500, times=1)
    assert account.start_nodes(*request_) == LaunchOutcome(unavailable=frozenset({POOL}))
    assert cloud.ask("GET", "calls")["ec2"]["CreateFleet"] == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"mode": "html", "status": 500}, "AWS is not what answers: Unable to parse response"),
        ({"mode": "html", "status": 200}, "AWS is not what answers: Unable to parse response"),
        ({"mode": "html", "status": 403}, "AWS is not what answers: Unable to parse response"),
        ({"mode": "empty", "status": 503}, "AWS refuses CreateFleet: 503: Service Unavailable"),
        ({"mode": "drop-reply"}, "AWS cannot be reached: Connection was closed"),
    ],
)
def test_a_request_that_gets_no_answer_may_be_repeated(
    cloud: Sandbox, account: Account, request_: Any, fault: dict[str, Any], message: str
) -> None:
    cloud.ask("POST", "fault", action="CreateFleet", **fault)
    outcome = account.start_nodes(*request_)
    assert (outcome.repeat, outcome.machines, outcome.unavailable) == (True, (), frozenset())
    assert outcome.why.startswith(message)
    assert len(account.start_nodes(*request_).machines) == 1
    assert len(account.instances("night")) == 1
    assert cloud.ask("GET", "faults") == []


def test_a_list_that_cannot_be_read_is_not_taken_for_an_empty_one(cloud: Sandbox, account: Account) -> None:
    cloud.ask("POST", "fault", action="DescribeInstances", mode="html", status=500, times=10)
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
    make_group(account, "night", site.vpc, tags_of("night"), Patience())
    cloud.ask("POST", "fault", action="DeleteSecurityGroup", code="DependencyViolation", times=2)
    (group,) = account.remnants("night")
    account.delete(group)
    assert account.remnants("night") == []
    assert cloud.ask("GET", "faults") == []


def test_a_network_without_the_group_of_heads_that_end_is_a_sentence(account: Account) -> None:
    with pytest.raises(RunError, match="vpc-0 has no group for heads that end; deploy infra/aws again"):
        account.ended_heads_group("vpc-0")


def test_a_machine_can_leave_its_run_s_group(cloud: Sandbox, account: Account, site: Any) -> None:
    group = make_group(account, "night", site.vpc, tags_of("night"), Patience())
    (there,) = cloud.start("sleep 60", SecurityGroupIds=[group])
    account.leave_group(there)
    (entered,) = cloud.state(there)["SecurityGroups"]
    assert entered["GroupName"] == "idletrain-ended-heads"
    for remnant in account.remnants("night"):
        account.delete(remnant)
    assert cloud.state(there)["State"]["Name"] == "running"


def test_a_dashboard_s_token_is_found_on_whatever_page_of_the_parameters_it_is(account: Account) -> None:
    until = datetime.datetime.fromtimestamp(time.time() + 60, datetime.UTC)
    identities = certificates.issue("night", ("head", "worker"), until)
    for number in range(12):  # AWS lists ten a page
        name = run_resources.parameter_name("night", f"a-{number:02d}")
        account.ssm.put_parameter(Name=name, Value="{}", Type="SecureString")
    put_identities(account, "night", identities, tags_of("night"), Patience())
    assert account.dashboard_token("night") == identities["head"].dashboard_token
    for remnant in account.remnants("night"):
        account.delete(remnant)
