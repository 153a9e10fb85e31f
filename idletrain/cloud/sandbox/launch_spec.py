"""Merge a launch template and a request into the specification of an instance, as EC2 does. Pure: takes plain mappings
with the keys of the EC2 API.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RequestData = Mapping[str, Any]
Tags = dict[str, dict[str, str]]
MAX_USER_DATA_BYTES = 16384  # AWS: "limited to 16 KB, in raw form, before it is base64-encoded"
DEFAULT_TYPE = "m1.small"  # EC2's own
ROOT_GIB = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The specification of one instance, or several identical ones.

    Attributes:
        subnet: Its id, or empty for any subnet in `zone`, or in any zone.
        max_usd_per_hour: Highest price of a spot instance, or None.
        profile: `Name` or `Arn` of the instance profile, or empty.
        user_data: In base64, or empty.
        tags: Tags by type of resource.
        on_shutdown: `stop`, which is EC2's default, or `terminate`.
    """

    image: str
    type: str
    market: str
    subnet: str
    zone: str
    max_usd_per_hour: float | None
    groups: tuple[str, ...]
    profile: RequestData
    metadata_options: RequestData
    user_data: str
    tags: Tags
    on_shutdown: str
    disks: tuple[RequestData, ...]
    key: str | None

    @property
    def program(self) -> bytes:
        """The decoded user data."""
        return base64.b64decode(self.user_data)


def launch_spec(template: RequestData, request: RequestData, market: str | None = None) -> LaunchSpec:
    """Merge a launch template's data with a request's parameters, or a fleet's overrides, which take precedence.

    Args:
        template: `LaunchTemplateData`, or empty.
        request: Parameters of RunInstances or of an override.
        market: Market of the fleet; by default that of the data.
    """
    data = {**template, **{key: value for key, value in request.items() if value not in (None, "", [], {})}}
    options = data.get("InstanceMarketOptions") or {}
    price = request.get("MaxPrice") or (options.get("SpotOptions") or {}).get("MaxPrice")
    network = (data.get("NetworkInterfaces") or [{}])[0]
    return LaunchSpec(
        image=data.get("ImageId") or "",
        type=data.get("InstanceType") or DEFAULT_TYPE,
        market=market or options.get("MarketType") or "on-demand",
        subnet=data.get("SubnetId") or network.get("SubnetId") or "",
        zone=data.get("AvailabilityZone") or (data.get("Placement") or {}).get("AvailabilityZone") or "",
        max_usd_per_hour=float(price) if price else None,
        groups=tuple(network.get("Groups") or data.get("SecurityGroupIds") or ()),
        profile=data.get("IamInstanceProfile") or {},
        metadata_options=data.get("MetadataOptions") or {},
        user_data=str(data.get("UserData") or ""),
        tags=overlaid(tags_of(template.get("TagSpecifications")), tags_of(request.get("TagSpecifications"))),
        on_shutdown=data.get("InstanceInitiatedShutdownBehavior") or "stop",
        disks=tuple(_disk(disk) for disk in data.get("BlockDeviceMappings") or ()),
        key=data.get("KeyName"),
    )


def tags_of(specifications: Sequence[RequestData] | None) -> Tags:
    """Convert `TagSpecifications` to tags by type of resource."""
    tags: Tags = {}
    for specification in specifications or ():
        into = tags.setdefault(specification["ResourceType"], {})
        into.update({tag["Key"]: tag["Value"] for tag in specification.get("Tags") or ()})
    return tags


def overlaid(under: Tags, over: Tags) -> Tags:
    """Merge two sets of tags; `over` wins where both have a key."""
    return {kind: {**under.get(kind, {}), **over.get(kind, {})} for kind in {**under, **over}}


def _disk(mapping: RequestData) -> RequestData:
    """Complete a disk as EC2 does for an image's root: deleted with its instance."""
    return {**mapping, "Ebs": {"VolumeSize": ROOT_GIB, "DeleteOnTermination": True, **(mapping.get("Ebs") or {})}}
