"""Build the bodies of the requests that create a run's machines, and interpret their answers. Pure.

Every resource gets its tags in the call that creates it: after a crash a moment later it is still found by tag.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from idletrain.errors import RunError

TAG = "idletrain:"
FIRST_PORT, LAST_PORT = 1024, 65535
# What an error means for its pool: no capacity for a while, or the account's quota is used up, or retry; any other
# error ends the run (Karpenter's classes of CreateFleet errors, and AWS' "Error codes for the Amazon EC2 API").
CAPACITY_ERRORS = frozenset(
    {
        "InvalidFleetConfiguration",  # a type that its zone does not offer
        "InsufficientInstanceCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "ReservationCapacityExceeded",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",
    }
)
QUOTA_ERRORS = frozenset(
    {"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "MaxFleetCountExceeded", "InstanceLimitExceeded"}
)
RETRY_ERRORS = frozenset(
    {
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "InternalError",
        "InternalFailure",
        "ServerInternal",
        "ServiceUnavailable",
        "Unavailable",
    }
)


@dataclass(frozen=True)
class Pool:
    """A source of machines: a market, an instance type and a zone."""

    market: str
    """`spot` or `on-demand`."""
    type: str
    zone: str


@dataclass(frozen=True)
class LaunchedMachine:
    """A machine in an answer to a launch request."""

    id: str
    pool: Pool


@dataclass(frozen=True)
class LaunchOutcome:
    """The outcome of a launch request: its machines count; its errors say which pools to skip for a while.

    Attributes:
        machines: Machines that were launched, whatever else failed.
        without_capacity: Pools without capacity.
        quota: The account's limit that was reached, as AWS names it, or empty.
        retry: Whether the same request, with the same token, should be repeated.
        fatal: Why no request will succeed, or empty.
    """

    machines: tuple[LaunchedMachine, ...] = ()
    without_capacity: frozenset[Pool] = frozenset()
    quota: str = ""
    retry: bool = False
    fatal: str = ""


@dataclass(frozen=True)
class LaunchSite:
    """Network, image and template of a run's machines in the account."""

    region: str
    vpc: str
    subnets: Mapping[str, str]
    """Zone to subnet."""
    ami: str
    group: str = ""
    template: str = ""


def tags(run: str, prefix: str, owner: str, version: str, created: float, deadline: float) -> dict[str, str]:
    """Return the tags of all resources of a run; times are Unix seconds."""
    values = {
        "run": run,
        "prefix": prefix,
        "owner": owner,
        "version": version,
        "created": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat(timespec="seconds"),
        "deadline": str(int(deadline)),
    }
    return {TAG + key: value for key, value in values.items()} | {"Name": f"idletrain-{run}"}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Format tags for EC2."""
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def tagged(tags: Mapping[str, str], *kinds: str) -> list[dict[str, Any]]:
    """Return `TagSpecifications` for kinds of resources."""
    return [{"ResourceType": kind, "Tags": tag_list(tags)} for kind in kinds]


def token(*parts: object) -> str:
    """Return a ClientToken (64 ASCII characters) that is the same only for the very same request."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def security_group(run: str, vpc: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """Build the body of CreateSecurityGroup."""
    return {
        "GroupName": f"idletrain-{run}",
        "Description": f"Machines of the idletrain run {run}; they talk to each other alone",
        "VpcId": vpc,
        "TagSpecifications": tagged(tags, "security-group"),
    }


def ingress(group: str) -> dict[str, Any]:
    """Build the body of AuthorizeSecurityGroupIngress: traffic from the group itself and from nowhere else."""
    ports = {"FromPort": FIRST_PORT, "ToPort": LAST_PORT, "UserIdGroupPairs": [{"GroupId": group}]}
    return {"GroupId": group, "IpPermissions": [{"IpProtocol": protocol, **ports} for protocol in ("tcp", "udp")]}


def launch_template(run: str, site: LaunchSite, profile: str, boot: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """Build the body of CreateLaunchTemplate: the settings that all machines of a run share."""
    return {
        "LaunchTemplateName": f"idletrain-{run}",
        "ClientToken": token("template", run, tags),
        "TagSpecifications": tagged(tags, "launch-template"),
        "LaunchTemplateData": {
            "ImageId": site.ami,
            "SecurityGroupIds": [site.group],
            "IamInstanceProfile": {"Name": profile},
            "UserData": base64.b64encode(boot.encode()).decode(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {
                "HttpTokens": "required",
                "HttpEndpoint": "enabled",
                "HttpPutResponseHopLimit": 1,  # containers share the host's network
                "InstanceMetadataTags": "enabled",
            },
            "TagSpecifications": tagged(tags, "instance", "volume", "network-interface"),
        },
    }


def head(
    site: LaunchSite, pool: Pool, profile: str, tags: Mapping[str, str], generation: int, boot: str = ""
) -> dict[str, Any]:
    """Build the body of RunInstances for a run's head node; `boot` is user data in place of the template's."""
    body: dict[str, Any] = {
        "LaunchTemplate": {"LaunchTemplateId": site.template, "Version": "$Default"},
        "InstanceType": pool.type,
        "IamInstanceProfile": {"Name": profile},
        "SubnetId": site.subnets[pool.zone],
        "MinCount": 1,
        "MaxCount": 1,
    }
    body |= {"UserData": boot} if boot else {}  # boto3 encodes it, here and not in a template
    key = token("head", generation, body)
    machine_tags = {**tags, TAG + "role": "head", TAG + "launch": key}
    return {**body, "ClientToken": key, "TagSpecifications": tagged(machine_tags, "instance", "volume")}


def fleet(
    site: LaunchSite,
    pools: Sequence[Pool],
    count: int,
    attempt: str,
    tags: Mapping[str, str],
    max_price: float | None,
) -> dict[str, Any]:
    """Build the body of CreateFleet for nodes of one market; each attempt has its own token, so that AWS does not take
    it for an older one with another content.
    """
    market = pools[0].market
    price = {"MaxPrice": str(max_price)} if max_price is not None and market == "spot" else {}
    overrides = [{"InstanceType": pool.type, "SubnetId": site.subnets[pool.zone], **price} for pool in pools]
    template = {"LaunchTemplateId": site.template, "Version": "$Default"}
    body: dict[str, Any] = {
        "Type": "instant",
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": overrides}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": market},
    }
    if market == "spot":
        body["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    else:
        body["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
    key = token("fleet", attempt, body)
    machine_tags = {**tags, TAG + "role": "worker", TAG + "launch": key}
    # Volumes get their tags from the template: CreateFleet takes none for them.
    return {**body, "ClientToken": key, "TagSpecifications": tagged(machine_tags, "fleet", "instance")}


def outcome_of_fleet(answer: Mapping[str, Any], market: str, zones: Mapping[str, str]) -> LaunchOutcome:
    """Parse CreateFleet's answer, which may contain machines and errors at the same time.

    Args:
        answer: The answer.
        market: The requested market.
        zones: Zone by subnet id.
    """
    machines = tuple(
        LaunchedMachine(
            id_, _pool(item["LaunchTemplateAndOverrides"]["Overrides"], item.get("Lifecycle", market), zones)
        )
        for item in answer.get("Instances") or ()
        for id_ in item["InstanceIds"]
    )
    outcome = LaunchOutcome(machines)
    for error in answer.get("Errors") or ():
        overrides = error.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        pools = {_pool(overrides, market, zones)} if "InstanceType" in overrides else set()
        outcome = _merge(outcome, outcome_of_error(error["ErrorCode"], error.get("ErrorMessage", ""), pools))
    # No retry: its token would return the same answer. A fatal error of one pool need not hold for the others.
    return replace(outcome, retry=False, fatal="" if outcome.without_capacity else outcome.fatal)


def outcome_of_error(code: str, message: str, pools: set[Pool] | frozenset[Pool]) -> LaunchOutcome:
    """Interpret an error code of a request for `pools`; an unknown one ends the run, with AWS' own message."""
    if code in CAPACITY_ERRORS:
        return LaunchOutcome(without_capacity=frozenset(pools))
    if code in QUOTA_ERRORS:
        return LaunchOutcome(without_capacity=frozenset(pools), quota=code)
    if code in RETRY_ERRORS:
        return LaunchOutcome(retry=True)
    return LaunchOutcome(fatal=f"{code}: {message}")


def refuse_fatal(outcome: LaunchOutcome, what: str) -> None:
    """Raise the run's error if a launch failed for good; `what` names the machines in the message.

    Raises:
        RunError: the outcome is fatal and nothing was launched.
    """
    if outcome.fatal and not outcome.machines:
        raise RunError(f"the cloud refuses {what}: {outcome.fatal}; fix that and start again")


def _merge(one: LaunchOutcome, other: LaunchOutcome) -> LaunchOutcome:
    return LaunchOutcome(
        one.machines + other.machines,
        one.without_capacity | other.without_capacity,
        one.quota or other.quota,
        one.retry or other.retry,
        one.fatal or other.fatal,
    )


def _pool(overrides: Mapping[str, Any], market: str, zones: Mapping[str, str]) -> Pool:
    zone = zones.get(overrides.get("SubnetId", ""), overrides.get("AvailabilityZone", ""))
    return Pool(market, overrides["InstanceType"], zone)
