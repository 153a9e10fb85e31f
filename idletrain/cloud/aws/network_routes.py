"""Which of a network's subnets machines can stand in: those from which an image can be fetched and AWS be spoken to.

Pure: what DescribeSubnets and DescribeRouteTables tell is handed in (AWS, "Route table concepts": a subnet without a
table of its own has the network's main one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ANYWHERE = "0.0.0.0/0"
INTERNET = "igw-"
GATEWAY_FIELDS = (
    "NatGatewayId",
    "TransitGatewayId",
    "NetworkInterfaceId",
    "InstanceId",
)  # they carry private addresses out


def subnets_with_internet(subnets: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For each zone that has one, the subnet from which machines reach the outside, with most free addresses.

    Args:
        subnets: Of one network.
        tables: Of the same.

    Returns:
        Zone to subnet.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for subnet in subnets:
        if not _leads_out(_table_of(subnet, tables), public=subnet.get("MapPublicIpOnLaunch", False)):
            continue
        zone = subnet["AvailabilityZone"]
        if zone not in chosen or _free(subnet) > _free(chosen[zone]):
            chosen[zone] = subnet
    return {zone: subnet["SubnetId"] for zone, subnet in chosen.items()}


def _table_of(subnet: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    main: Mapping[str, Any] = {}
    for table in tables:
        for association in table.get("Associations", ()):
            if association.get("SubnetId") == subnet["SubnetId"]:
                return table
            if association.get("Main"):
                main = table
    return main


def _leads_out(table: Mapping[str, Any], *, public: bool) -> bool:
    """Whether a table leads anywhere; through an internet gateway only machines with a public address come out."""
    for route in table.get("Routes", ()):
        if route.get("DestinationCidrBlock") != ANYWHERE or route.get("State") == "blackhole":
            continue
        if any(route.get(kind) for kind in GATEWAY_FIELDS) or (
            public and route.get("GatewayId", "").startswith(INTERNET)
        ):
            return True
    return False


def _free(subnet: Mapping[str, Any]) -> tuple[int, str]:
    return subnet.get("AvailableIpAddressCount", 0), subnet["SubnetId"]
