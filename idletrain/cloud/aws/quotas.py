"""Compare the vCPUs that an account may use with those that a fleet needs."""

from __future__ import annotations

import re
from collections.abc import Collection

from idletrain.cloud.aws.clients import Clients
from idletrain.cloud.aws.errors import REQUEST_ERRORS
from idletrain.cloud.instance_types import Offer

# Families that share a quota of vCPUs, and its codes (AWS, "Amazon EC2 service quotas" and "Spot Instance quotas").
# A new account's are 0 for GPUs. Families that are not listed, such as P6, are not checked.
QUOTAS = {
    "standard": (r"(a|c|d|h|i|im|is|m|r|t|z)\d", {"spot": "L-34B43A08", "on-demand": "L-1216C47A"}),
    "G and VT": (r"(g|gr|vt)\d", {"spot": "L-3819A6DF", "on-demand": "L-DB2E81BA"}),
    "P2 to P4": (r"p[234]", {"spot": "L-7212CCBC", "on-demand": "L-417A185B"}),
    "P5": (r"p5", {"spot": "L-C4BD4855", "on-demand": "L-417A185B"}),
    "X": (r"x\d", {"spot": "L-E3A00192", "on-demand": "L-7295265B"}),
}
GPU_QUOTAS = ("G and VT", "P2 to P4", "P5")


def quota_fault(clients: Clients, nodes: int, offers: Collection[Offer]) -> str | None:
    """Return why an account's quotas allow a fleet of none of these offers, or None; None if a quota is unreadable."""
    smallest: dict[tuple[str, str], int] = {}
    for offer in offers:
        families = next((name for name, (family, _) in QUOTAS.items() if re.match(family, offer.type.name)), None)
        if families is None:
            return None
        key = families, offer.market
        smallest[key] = min(offer.type.vcpus, smallest.get(key, offer.type.vcpus))
    faults = []
    for (families, market), vcpus in sorted(smallest.items(), key=lambda item: item[1]):
        try:
            allowed = vcpus_allowed(clients, families, market)
        except REQUEST_ERRORS:
            return None
        faults.append(quota_sentence(nodes, vcpus, allowed, families, market))
    return faults[0] if all(faults) else None


def quota_sentence(nodes: int, vcpus: int, allowed: int, families: str, market: str) -> str | None:
    """Return why `nodes` machines of `vcpus` vCPUs each exceed a quota of `allowed` vCPUs, or None."""
    needed = nodes * vcpus
    if needed <= allowed:
        return None
    return (
        f"nodes.count: {nodes} nodes need {needed} vCPUs of {market} quota ({families}) and the account has {allowed}; "
        f"ask for {needed} under Service Quotas ({QUOTAS[families][1][market]}), or for fewer nodes"
    )


def vcpus_allowed(clients: Clients, families: str, market: str) -> int:
    """Return the number of vCPUs that an account may use of some families in a market."""
    code = QUOTAS[families][1][market]
    answer = clients.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)
    return int(answer["Quota"]["Value"])
