"""What a run needs is made once, whatever is repeated, and patiently where AWS refuses for a moment."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from typing import Any

import pytest
from rehearsal import Sandbox

from idletrain.cloud.aws import requests
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.aws.run_resources import make_group, make_template, put_identities, start_first
from idletrain.cloud.machines import Pool, run_tags
from idletrain.cluster import certificates
from idletrain.errors import RunError


def tags_of(run: str) -> dict[str, str]:
    return run_tags(run, "s3://none/", "arn:me", "0", time.time(), time.time() + 60)


@pytest.fixture
def site(account: Account) -> Any:
    return account.site(None, gpu=False)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def patience(lines: list[str]) -> Patience:
    return Patience(lines.append)


def test_a_head_comes_from_the_next_zone_where_one_has_no_capacity(cloud: Sandbox, account: Account, site: Any) -> None:
    launch_site = replace(site, template=cloud.template("#!/bin/bash\nsleep 60\n"))
    pools = [Pool("on-demand", "t3.medium", zone) for zone in ("eu-west-1b", "eu-west-1a", "eu-west-1c")]
    bodies = [requests.head(launch_site, pool, "idletrain-head", tags_of("night"), 0) for pool in pools]
    cloud.ask("POST", "capacity", market="on-demand", zone="eu-west-1b", count=0)
    head = start_first(account, bodies, Patience())
    assert cloud.state(head)["Placement"]["AvailabilityZone"] == "eu-west-1a"
    assert cloud.ask("GET", "calls")["ec2"]["RunInstances"] == 2
    cloud.ask("POST", "capacity", market="on-demand", count=1)
    with pytest.raises(RunError, match=r"cloud\.head: no zone of eu-west-1 has capacity for a t3\.medium now"):
        start_first(
            account,
            [requests.head(launch_site, pool, "idletrain-head", tags_of("night"), 1) for pool in pools],
            Patience(),
        )
    assert len(account.instances("night")) == 1


def test_a_head_that_is_refused_for_another_reason_is_not_asked_for_elsewhere(
    cloud: Sandbox, account: Account, site: Any
) -> None:
    launch_site = replace(site, template=cloud.template("#!/bin/bash\nsleep 60\n"))
    pools = [Pool("on-demand", "t3.medium", zone) for zone in ("eu-west-1b", "eu-west-1a")]
    bodies = [requests.head(launch_site, pool, "idletrain-head", tags_of("night"), 0) for pool in pools]
    cloud.ask("POST", "fault", action="RunInstances", code="UnauthorizedOperation", status=403, times=1)
    with pytest.raises(RunError, match="AWS refuses RunInstances: UnauthorizedOperation"):
        start_first(account, bodies, Patience())
    assert cloud.ask("GET", "calls")["ec2"]["RunInstances"] == 1


def test_a_group_is_made_once_and_lets_nobody_else_in(account: Account, site: Any) -> None:
    first = make_group(account, "night", site.vpc, tags_of("night"), Patience())
    assert make_group(account, "night", site.vpc, tags_of("night"), Patience()) == first
    (group,) = account.ec2.describe_security_groups(GroupIds=[first])["SecurityGroups"]
    assert {rule["IpProtocol"] for rule in group["IpPermissions"]} == {"tcp", "udp"}
    for rule in group["IpPermissions"]:
        assert (rule["IpRanges"], rule["Ipv6Ranges"]) == ([], [])
        assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [first]


THROTTLED = {"code": "RequestLimitExceeded", "status": 503}
LOST = {"mode": "drop-reply"}
PASSING = {
    "CreateSecurityGroup": [THROTTLED, LOST],
    "AuthorizeSecurityGroupIngress": [THROTTLED, {"code": "InvalidGroup.NotFound"}, LOST],
    "PutParameter": [{"code": "ThrottlingException"}, {"mode": "empty", "status": 503}, LOST],
    "CreateLaunchTemplate": [THROTTLED, {"code": "InvalidGroup.NotFound"}, LOST],
    "RunInstances": [
        THROTTLED,
        {"code": "InvalidLaunchTemplateId.NotFound"},
        {"code": "InvalidParameterValue", "message": "Value (idletrain-head): Invalid IAM Instance Profile name"},
        {"mode": "html", "status": 502},
        LOST,
    ],
}


@pytest.mark.parametrize("action", PASSING)
def test_each_request_of_a_launch_outlives_what_passes_and_says_what_is_waited_for(
    cloud: Sandbox, account: Account, site: Any, action: str, patience: Patience, lines: list[str]
) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    for fault in PASSING[action]:
        cloud.ask("POST", "fault", action=action, **fault)
    tags = tags_of("night")
    launch_site = replace(site, group=make_group(account, "night", site.vpc, tags, patience))
    put_identities(account, "night", certificates.issue("night", ("worker",), until), tags, patience)
    body = requests.launch_template("night", launch_site, "idletrain-node", "#!/bin/bash\nsleep 60\n", tags)
    launch_site = replace(launch_site, template=make_template(account, body, patience))
    head = requests.head(launch_site, Pool("on-demand", "t3.medium", "eu-west-1a"), "idletrain-head", tags, 0)
    start_first(account, [head], patience)
    assert cloud.ask("GET", "faults") == []  # each of them was met
    assert len(lines) == len(PASSING[action])
    assert all(line.startswith("waiting: AWS ") for line in lines), lines
    left = cloud.inventory()
    assert [len(left[kind]) for kind in ("instances", "security_groups", "launch_templates", "parameters")] == [1] * 4


def test_the_certificates_of_another_run_are_not_taken_for_this_one_s(account: Account, patience: Patience) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    first, second = (certificates.issue("night", ("worker",), until) for _ in range(2))
    for _ in range(2):  # the second as if the reply to the first had been lost
        put_identities(account, "night", first, tags_of("night"), patience)
    with pytest.raises(RunError, match="holds the certificates of another run night; end it with"):
        put_identities(account, "night", second, tags_of("night"), patience)
    assert account.identity("night", "worker") == first["worker"]
