"""Subnets by what their route tables say."""

from __future__ import annotations

from typing import Any

import pytest

from idletrain.cloud.aws.network_routes import subnets_with_internet


def subnet(id_: str, zone: str = "a", public: bool = True, free: int = 10) -> dict[str, Any]:
    return {"SubnetId": id_, "AvailabilityZone": zone, "MapPublicIpOnLaunch": public, "AvailableIpAddressCount": free}


def table(*subnets: str, to: dict[str, str] | None = None, main: bool = False, state: str = "active") -> dict[str, Any]:
    routes = [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local", "State": "active"}]
    routes += [{"DestinationCidrBlock": "0.0.0.0/0", "State": state, **to}] if to else []
    return {"Associations": [{"SubnetId": s} for s in subnets] + [{"Main": True}] * main, "Routes": routes}


GATEWAY, NAT = {"GatewayId": "igw-1"}, {"NatGatewayId": "nat-1"}


@pytest.mark.parametrize(
    ("route", "public", "leads_out"),
    [
        (GATEWAY, True, True),
        (GATEWAY, False, False),
        (NAT, False, True),
        ({"TransitGatewayId": "tgw-1"}, False, True),
        ({"GatewayId": "vgw-1"}, True, False),
        (None, True, False),
    ],
)
def test_a_public_subnet_goes_by_the_gateway_and_a_private_one_by_nat(
    route: dict[str, str] | None, public: bool, leads_out: bool
) -> None:
    public_subnets = subnets_with_internet([subnet("s", public=public)], [table("s", to=route)])
    assert public_subnets == ({"a": "s"} if leads_out else {})


def test_a_route_whose_target_is_gone_leads_nowhere() -> None:
    assert subnets_with_internet([subnet("s")], [table("s", to=NAT, state="blackhole")]) == {}


def test_a_subnet_without_a_table_of_its_own_has_the_main_one() -> None:
    tables = [table("own"), table(to=GATEWAY, main=True)]
    assert subnets_with_internet([subnet("own"), subnet("other", "b")], tables) == {"b": "other"}


def test_of_several_in_a_zone_the_one_with_most_room_is_taken_if_it_has_a_way_out() -> None:
    subnets = [subnet("small", free=3), subnet("large", free=30), subnet("closed", free=300, public=False)]
    assert subnets_with_internet(subnets, [table(to=GATEWAY, main=True)]) == {"a": "large"}
