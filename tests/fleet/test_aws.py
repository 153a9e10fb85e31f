"""The calls to AWS, against the rehearsal cloud: safe to repeat, and sentences where it refuses."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, NoRegionError
from rehearsal import Sandbox

from idletrain.errors import JobError, RunError
from idletrain.fleet import certificates, requests
from idletrain.fleet.aws import Account, explained
from idletrain.fleet.requests import Outcome, Pool

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


def test_an_image_that_is_not_there_is_refused(account: Account) -> None:
    with pytest.raises(JobError, match=r"cloud\.ami: there is no machine image ami-12345678"):
        account.site("ami-12345678", gpu=False)


def test_a_group_is_made_once_and_lets_nobody_else_in(account: Account, site: Any) -> None:
    first = account.make_group("night", site.vpc, tags_of("night"))
    assert account.make_group("night", site.vpc, tags_of("night")) == first
    (group,) = account.ec2.describe_security_groups(GroupIds=[first])["SecurityGroups"]
    (rule,) = group["IpPermissions"]
    assert (rule["IpRanges"], rule["Ipv6Ranges"]) == ([], [])
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [first]


def test_an_identity_is_kept_secret_and_read_back(account: Account) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    issued = certificates.issue("night", ("worker",), until)
    account.put_identities("night", issued, tags_of("night"))
    assert account.identity("night", "worker") == issued["worker"]
    found = account.ssm.get_parameter(Name="/idletrain/night/worker/tls")["Parameter"]
    assert found["Type"] == "SecureString"
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
    made = requests.Site(**{**vars(site), "template": cloud.template("#!/bin/bash\nsleep 60\n")})
    return made, requests.fleet(made, (POOL,), 1, "1", tags_of("night"), None)


def test_a_lack_of_capacity_is_asked_about_once(cloud: Sandbox, account: Account, site: Any) -> None:
    made, body = fleet_body(cloud, account, site)
    cloud.ask("POST", "fault", action="CreateFleet", code="InsufficientInstanceCapacity", status=500, times=1)
    assert account.start_nodes(made, body, [POOL]) == Outcome(dry=frozenset({POOL}))
    assert cloud.ask("GET", "calls")["ec2"]["CreateFleet"] == 1


def test_what_nobody_understands_is_not_taken_for_a_passing_trouble(
    cloud: Sandbox, account: Account, site: Any
) -> None:
    made, body = fleet_body(cloud, account, site)
    cloud.ask("POST", "fault", action="CreateFleet", mode="html", times=1)
    outcome = account.start_nodes(made, body, [POOL])
    assert outcome.fatal
    assert not outcome.again


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
    ("error", "kind", "words"),
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
def test_refusals_are_one_sentence(error: Exception, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), explained():
        raise error
