"""Bodies of requests and the meaning of answers, without a cloud."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from idletrain.cloud.aws import requests
from idletrain.cloud.machines import LaunchedMachine, LaunchOutcome, LaunchSite, NodeRequest, Pool, run_tags

SITE = LaunchSite("eu-west-1", "vpc-1", {"eu-west-1a": "subnet-a", "eu-west-1b": "subnet-b"}, "ami-1", "sg-1", "lt-1")
ZONES = {"subnet-a": "eu-west-1a", "subnet-b": "eu-west-1b"}
TAGS = run_tags("night", "s3://b/runs/night/", "arn:me", "0.1", created=0.0, deadline=3600.0)
HEAD = Pool("on-demand", "t3.medium", "eu-west-1b")
A, B = Pool("spot", "c7i.large", "eu-west-1a"), Pool("spot", "m7i.large", "eu-west-1b")
C = Pool("spot", "m7i.large", "eu-west-1a")


def fleet(pools: tuple[Pool, ...], count: int, attempt: str, max_price: float | None = None) -> dict[str, Any]:
    request = NodeRequest(pools=pools, count=count, attempt=attempt, tags=TAGS, max_price=max_price)
    return requests.fleet(SITE, request)


def tags_of(body: dict[str, Any], kind: str) -> dict[str, str]:
    (tags,) = [spec["Tags"] for spec in body["TagSpecifications"] if spec["ResourceType"] == kind]
    return {tag["Key"]: tag["Value"] for tag in tags}


def test_tags_say_whose_what_is_and_until_when() -> None:
    assert TAGS["idletrain:run"] == "night"
    assert TAGS["idletrain:deadline"] == "3600"
    assert TAGS["idletrain:created"] == "1970-01-01T00:00:00+00:00"


def test_an_answer_is_never_asked_for_again_and_one_pool_s_refusal_is_not_the_run_s() -> None:
    errors = [
        {"ErrorCode": "InternalError"},
        {"ErrorCode": "InvalidFleetConfiguration", "LaunchTemplateAndOverrides": override(A)},
        {"ErrorCode": "Odd", "LaunchTemplateAndOverrides": override(B)},
    ]
    assert requests.outcome_of_fleet({"Errors": errors[1:]}, (A, B, C), ZONES) == LaunchOutcome(
        unavailable=frozenset({A, B}), why="Odd: "
    )
    assert requests.outcome_of_fleet({"Errors": errors}, (A, B, C), ZONES) == LaunchOutcome(
        unavailable=frozenset({A, B, C}), why="InternalError: ; Odd: "
    )


def test_a_security_group_lets_nobody_in_but_itself() -> None:
    rules = requests.ingress("sg-1")["IpPermissions"]
    assert [rule["IpProtocol"] for rule in rules] == ["tcp", "udp"]
    for rule in rules:
        assert rule["UserIdGroupPairs"] == [{"GroupId": "sg-1"}]
        assert "IpRanges" not in rule
        assert "Ipv6Ranges" not in rule
    assert tags_of(requests.security_group("night", "vpc-1", TAGS), "security-group") == TAGS


def test_the_template_requires_tokens_and_turns_shutdown_into_termination() -> None:
    body = requests.launch_template("night", SITE, "idletrain-node", "#!/bin/bash\n", TAGS)
    data = body["LaunchTemplateData"]
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["SecurityGroupIds"] == ["sg-1"]
    assert base64.b64decode(data["UserData"]) == b"#!/bin/bash\n"
    assert {spec["ResourceType"] for spec in data["TagSpecifications"]} == {"instance", "volume", "network-interface"}
    assert tags_of(body, "launch-template") == TAGS


def test_a_template_of_the_same_second_has_a_token_of_its_own_where_anything_differs() -> None:
    def token(group: str = SITE.group, boot: str = "#!/bin/bash\n") -> str:
        body = requests.launch_template("night", replace(SITE, group=group), "idletrain-node", boot, TAGS)
        return str(body["ClientToken"])

    assert token() == token()
    assert len({token(), token(group="sg-9"), token(boot="#!/bin/sh\n")}) == 3


def test_the_head_is_one_machine_with_its_role_and_a_token_for_every_generation() -> None:
    first, second = (requests.head(SITE, HEAD, "head", TAGS, generation) for generation in (0, 1))
    assert (first["MinCount"], first["MaxCount"]) == (1, 1)
    assert (first["InstanceType"], first["SubnetId"]) == ("t3.medium", "subnet-b")
    assert tags_of(first, "instance")["idletrain:role"] == "head"
    assert first["ClientToken"] != second["ClientToken"]
    assert first == requests.head(SITE, HEAD, "head", TAGS, 0)
    assert "UserData" not in first
    assert requests.head(SITE, HEAD, "head", TAGS, 0, "#!boot")["UserData"] == "#!boot"
    assert "InstanceMarketOptions" not in first


def test_a_fleet_asks_for_its_count_in_all_pools_and_is_tagged_in_the_call() -> None:
    body = fleet((A, B), 3, "attempt-1", None)
    assert body["Type"] == "instant"
    assert body["TargetCapacitySpecification"] == {"TotalTargetCapacity": 3, "DefaultTargetCapacityType": "spot"}
    assert body["SpotOptions"]["AllocationStrategy"] == "price-capacity-optimized"
    (config,) = body["LaunchTemplateConfigs"]
    assert config["Overrides"] == [
        {"InstanceType": "c7i.large", "SubnetId": "subnet-a"},
        {"InstanceType": "m7i.large", "SubnetId": "subnet-b"},
    ]
    marked = tags_of(body, "instance")
    assert marked["idletrain:role"] == "worker"
    assert marked["idletrain:attempt"] == "attempt-1"


def test_a_maximum_price_goes_into_spot_requests_alone() -> None:
    on_demand = Pool("on-demand", "c7i.large", "eu-west-1a")
    (spot,) = fleet((A,), 1, "1", 0.5)["LaunchTemplateConfigs"][0]["Overrides"]
    (dear,) = fleet((on_demand,), 1, "1", 0.5)["LaunchTemplateConfigs"][0]["Overrides"]
    assert spot["MaxPrice"] == "0.5"
    assert "MaxPrice" not in dear


def test_tokens_differ_with_the_attempt_the_market_and_the_count_and_with_nothing_else() -> None:
    on_demand = Pool("on-demand", "c7i.large", "eu-west-1a")
    bodies = [
        fleet((A,), 1, "1", None),
        fleet((A,), 1, "2", None),
        fleet((A,), 2, "1", None),
        fleet((on_demand,), 1, "1", None),
    ]
    assert len({body["ClientToken"] for body in bodies}) == 4
    assert all(len(body["ClientToken"]) == 64 for body in bodies)
    assert fleet((A,), 1, "1", None) == bodies[0]


def override(pool: Pool) -> dict[str, Any]:
    return {"Overrides": {"InstanceType": pool.type, "SubnetId": SITE.subnets[pool.zone]}}


def test_machines_count_even_where_there_are_errors_too() -> None:
    answer = {
        "Instances": [{"InstanceIds": ["i-1", "i-2"], "Lifecycle": "spot", "LaunchTemplateAndOverrides": override(A)}],
        "Errors": [{"ErrorCode": "InsufficientInstanceCapacity", "LaunchTemplateAndOverrides": override(B)}],
    }
    outcome = requests.outcome_of_fleet(answer, (A, B), ZONES)
    assert outcome == LaunchOutcome((LaunchedMachine("i-1", A), LaunchedMachine("i-2", A)), unavailable=frozenset({B}))


def refused(code: str, status: int = 400) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "CreateFleet")


TIMEOUT = 'AWS cannot be reached: Read timeout on endpoint URL: "u"'
PREFIX = "AWS refuses CreateFleet: "
QUOTA = "the account's quota is used up (VcpuLimitExceeded); ask AWS for more"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused("InsufficientInstanceCapacity", 500), LaunchOutcome(unavailable=frozenset({A}))),
        (refused("SpotMaxPriceTooLow"), LaunchOutcome(unavailable=frozenset({A}))),
        (refused("VcpuLimitExceeded"), LaunchOutcome(unavailable=frozenset({A}), why=QUOTA)),
        (refused("503", 503), LaunchOutcome(why=PREFIX + "503: words", repeat=True)),
        (ReadTimeoutError(endpoint_url="u"), LaunchOutcome(why=TIMEOUT, repeat=True)),
        (refused("Odd"), LaunchOutcome(unavailable=frozenset({A}), why=PREFIX + "Odd: words")),
    ],
)
def test_every_error_either_repeats_the_request_or_skips_its_pools(error: Exception, expected: LaunchOutcome) -> None:
    assert requests.outcome_of_error(error, (A,)) == expected
