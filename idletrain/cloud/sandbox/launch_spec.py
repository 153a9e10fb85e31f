"""What an instance is made of: a launch template and a request, put together as EC2 does. Pure: plain mappings in,
in the words of the EC2 API.
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
    """One instance, or several of a kind.

    Attributes:
        subnet: Its id, or empty: then any subnet in `zone`, or in any zone.
        max_usd_per_hour: What a spot instance may cost, or None.
        profile: `Name` or `Arn` of the instance profile, or nothing.
        user_data: In base64, or empty.
        tags: By type of resource.
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
        """The user data itself."""
        return base64.b64decode(self.user_data)


def launch_spec(template: RequestData, request: RequestData, market: str | None = None) -> LaunchSpec:
    """Put a launch template's data and a request's parameters, or a fleet's overrides, together; the latter win.

    Args:
        template: `LaunchTemplateData`, or nothing.
        request: Parameters of RunInstances or of an override.
        market: What the fleet asks for; by default what the data say.
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
    """`TagSpecifications` by type of resource."""
    tags: Tags = {}
    for specification in specifications or ():
        into = tags.setdefault(specification["ResourceType"], {})
        into.update({tag["Key"]: tag["Value"] for tag in specification.get("Tags") or ()})
    return tags


def overlaid(under: Tags, over: Tags) -> Tags:
    """Two sets of tags; where both have a key, the latter counts."""
    return {kind: {**under.get(kind, {}), **over.get(kind, {})} for kind in {**under, **over}}


def _disk(mapping: RequestData) -> RequestData:
    """A disk as EC2 makes it of an image's root: gone with its instance."""
    return {**mapping, "Ebs": {"VolumeSize": ROOT_GIB, "DeleteOnTermination": True, **(mapping.get("Ebs") or {})}}
