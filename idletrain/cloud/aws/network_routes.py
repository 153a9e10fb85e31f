"""Find the network's subnets with internet access, which machines need to fetch their image and to call AWS.

Pure: takes the answers of DescribeSubnets and DescribeRouteTables (AWS, "Route table concepts": a subnet without a
route table of its own has the network's main one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ANYWHERE = "0.0.0.0/0"
INTERNET = "igw-"
# Gateways that connect machines with private addresses to the internet.
GATEWAY_FIELDS = ("NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId")


def subnets_with_internet(subnets: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Choose for each zone the subnet with internet access that has the most free addresses.

    Args:
        subnets: Subnets of one network.
        tables: Route tables of the same network.

    Returns:
        Zone to subnet.
    """
    chosen: dict[str, Mapping[str, Any]] = {}
    for subnet in subnets:
        if not _reaches_internet(_table_of(subnet, tables), public=subnet.get("MapPublicIpOnLaunch", False)):
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


def _reaches_internet(table: Mapping[str, Any], *, public: bool) -> bool:
    """Return whether a table routes to the internet; an internet gateway serves machines with public addresses only."""
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
