"""Build the bodies of the requests that create a run's machines, and interpret their answers. Pure.

Every resource gets its tags in the call that creates it: after a crash a moment later it is still found by tag.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from botocore.exceptions import ClientError

from idletrain.cloud.aws.errors import ErrorKind, code_of, error_kind, kind_of_answer, sentence_of
from idletrain.cloud.machines import TAG, LaunchedMachine, LaunchOutcome, LaunchSite, NodeRequest, Pool

FIRST_PORT, LAST_PORT = 1024, 65535


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
    body = {
        "LaunchTemplateName": f"idletrain-{run}",
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
    return {**body, "ClientToken": token("template", body)}


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
    machine_tags = {**tags, TAG + "role": "head"}
    return {**body, "ClientToken": key, "TagSpecifications": tagged(machine_tags, "instance", "volume")}


def fleet(site: LaunchSite, request: NodeRequest) -> dict[str, Any]:
    """Build the body of CreateFleet for nodes of one market; each attempt has its own token, so that AWS does not take
    it for an older one with another content.
    """
    pools, market = request.pools, request.pools[0].market
    capped = request.max_price is not None and market == "spot"
    price = {"MaxPrice": str(request.max_price)} if capped else {}
    overrides = [{"InstanceType": pool.type, "SubnetId": site.subnets[pool.zone], **price} for pool in pools]
    template = {"LaunchTemplateId": site.template, "Version": "$Default"}
    body: dict[str, Any] = {
        "Type": "instant",
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": overrides}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": request.count, "DefaultTargetCapacityType": market},
    }
    if market == "spot":
        body["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    else:
        body["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
    key = token("fleet", request.attempt, body)
    machine_tags = {**request.tags, TAG + "role": "worker", TAG + "attempt": request.attempt}
    # Volumes get their tags from the template: CreateFleet takes none for them.
    return {**body, "ClientToken": key, "TagSpecifications": tagged(machine_tags, "fleet", "instance")}


def outcome_of_fleet(answer: Mapping[str, Any], requested: Collection[Pool], zones: Mapping[str, str]) -> LaunchOutcome:
    """Parse CreateFleet's answer, which may contain machines and errors at the same time.

    Args:
        answer: The answer.
        requested: The requested pools, all of one market.
        zones: Zone by subnet id.
    """
    market = next(iter(requested)).market
    machines = tuple(
        LaunchedMachine(
            id_, _pool(item["LaunchTemplateAndOverrides"]["Overrides"], item.get("Lifecycle", market), zones)
        )
        for item in answer.get("Instances") or ()
        for id_ in item["InstanceIds"]
    )
    unavailable: set[Pool] = set()
    reasons: dict[str, None] = {}
    for error in answer.get("Errors") or ():
        overrides = error.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        unavailable |= {_pool(overrides, market, zones)} if "InstanceType" in overrides else set(requested)
        fault = {"Code": error.get("ErrorCode", ""), "Message": error.get("ErrorMessage", "")}
        reasons[_why(kind_of_answer(fault), fault["Code"], "{Code}: {Message}".format(**fault))] = None
    # Nothing is repeated: its token would return the same answer.
    return LaunchOutcome(machines, frozenset(unavailable), "; ".join(filter(None, reasons)))


def outcome_of_error(error: Exception, requested: Collection[Pool]) -> LaunchOutcome:
    """Interpret what a launch request raised: it is repeated as it is, or its pools are skipped for a while."""
    kind = error_kind(error)
    if kind in (ErrorKind.PASSING, ErrorKind.ABSENT):
        return LaunchOutcome(why=sentence_of(error), repeat=True)
    code = code_of(error) if isinstance(error, ClientError) else ""
    return LaunchOutcome(unavailable=frozenset(requested), why=_why(kind, code, sentence_of(error)))


def _why(kind: ErrorKind, code: str, sentence: str) -> str:
    """Return why machines are missing, or nothing for a lack of capacity."""
    if kind is ErrorKind.CAPACITY:
        return ""
    return f"the account's quota is used up ({code}); ask AWS for more" if kind is ErrorKind.QUOTA else sentence


def _pool(overrides: Mapping[str, Any], market: str, zones: Mapping[str, str]) -> Pool:
    zone = zones.get(overrides.get("SubnetId", ""), overrides.get("AvailabilityZone", ""))
    return Pool(market, overrides["InstanceType"], zone)
