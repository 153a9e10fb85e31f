"""A fleet that an account's quotas do not allow, without a cloud."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from idletrain.cloud.aws import quotas
from idletrain.cloud.instance_types import InstanceType, Market, Offer


class Limited:
    """An account of which only the quotas are known."""

    def __init__(self, **vcpus: int) -> None:
        self._vcpus = {code.replace("_", "-"): value for code, value in vcpus.items()}

    def client(self, service: str) -> Limited:
        assert service == "service-quotas"
        return self

    def get_service_quota(self, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
        assert ServiceCode == "ec2"
        if QuotaCode not in self._vcpus:
            raise ClientError({"Error": {"Code": "NoSuchResourceException"}}, "GetServiceQuota")
        return {"Quota": {"Value": float(self._vcpus[QuotaCode])}}


def offer(name: str, vcpus: int, market: Market = "spot") -> Offer:
    prices = {"usd_per_hour": 0.1, "spot_usd_per_hour": 0.1, "on_demand_usd_per_hour": 0.2}
    return Offer(
        type=InstanceType(name=name, vcpus=vcpus, memory_bytes=8 << 30), zone="a", market=market, slots=1, **prices
    )


SPOT = offer("c7i.xlarge", 4), offer("m7i.large", 2)


def fault(account: Limited, nodes: int, *offers: Offer) -> str | None:
    return quotas.quota_fault(account, nodes, offers)  # type: ignore[arg-type]


def test_a_quota_that_is_too_small_is_refused_with_the_number_to_ask_for() -> None:
    assert fault(Limited(L_34B43A08=16), 8, *SPOT) is None
    assert fault(Limited(L_34B43A08=15), 8, *SPOT) == (
        "nodes.count: 8 nodes need 16 vCPUs of spot quota (standard) and the account has 15; "
        "ask for 16 under Service Quotas (L-34B43A08), or for fewer nodes"
    )


def test_machines_with_gpus_have_quotas_of_their_own() -> None:
    gpus = offer("g5.xlarge", 4), offer("p5.48xlarge", 192), offer("p3.2xlarge", 8)
    none = Limited(L_34B43A08=1000, L_3819A6DF=0, L_C4BD4855=0, L_7212CCBC=8)
    assert "need 8 vCPUs of spot quota (G and VT)" in (fault(none, 2, *gpus) or "")
    assert fault(none, 1, *gpus) is None  # a p3 does


def test_where_spot_machines_are_too_few_others_may_do() -> None:
    assert fault(Limited(L_34B43A08=0, L_1216C47A=16), 8, *SPOT, offer("m7i.large", 2, "on-demand")) is None


def test_a_quota_that_cannot_be_read_refuses_nothing() -> None:
    assert fault(Limited(), 1000, *SPOT) is None
    assert fault(Limited(), 1000, offer("p6.48xlarge", 192)) is None
