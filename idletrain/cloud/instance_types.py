"""Choose the machines to request: rank instance types by the price of an hour of one usable subnet slot.

Pure: types, offerings and prices are arguments (`pricing` fetches them). A slot is the RAM, vCPUs and GPUs that one
subnet trains with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Market = Literal["spot", "on-demand"]
MIB, GIB, TIB = 2**20, 2**30, 2**40
ARCHITECTURE = "x86_64"  # of the project's container image
# RAM that the kernel, sshd, containerd and the container's own processes use before the first subnet starts, and the
# visible part of a machine's nominal RAM (firmware and the kernel's tables take the rest).
INSTANCE_SYSTEM_BYTES = round(0.7 * GIB)
VISIBLE_SHARE = 0.94
# At equal prices many small nodes lose less at once than a large one: a node that is the whole fleet has to be a fifth
# cheaper per slot. Spot Instance Advisor's worst class is interrupted in more than one case of five a month.
INTERRUPTION_WEIGHT = 0.2
WANTED_TYPES = 5  # Karpenter warns below that; AWS recommends flexibility, 10 being better
MOST_TYPES = 60  # as many as Karpenter sends in one CreateFleet
# Largest ratio of a type's score to the best one, and largest number of sizes of one family: families share the same
# hosts and lack capacity together. Later pairs apply only until there are WANTED_TYPES; at three times the best spot
# price, on-demand machines of the best type would be as cheap.
SEARCH_BOUNDS = ((1.5, 2), (1.5, 4), (2.0, 4), (3.0, 8))
MOST_SAVING = 0.9  # AWS: spot machines cost up to 90 % less; bounds the price where no on-demand price is known


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """An instance type, as DescribeInstanceTypes describes it.

    Attributes:
        gpus: Number of whole NVIDIA GPUs; those of another maker, or parts of one, count as `other_accelerators`.
        gpu_memory_bytes: Memory of all GPUs together.
        other_accelerators: Whether its price includes accelerators that torch's stock builds cannot use.
    """

    name: str
    vcpus: int
    memory_bytes: int
    gpus: int = 0
    gpu_memory_bytes: int = 0
    architecture: str = ARCHITECTURE
    burstable: bool = False
    bare_metal: bool = False
    current_generation: bool = True
    other_accelerators: bool = False

    @property
    def family(self) -> str:
        """`c7i` of `c7i.large`."""
        return self.name.partition(".")[0]

    @property
    def usable_bytes(self) -> int:
        """RAM available to subnets."""
        return max(0, int((self.memory_bytes - INSTANCE_SYSTEM_BYTES) * VISIBLE_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """The resources that one subnet needs on a node.

    Attributes:
        memory_bytes: RAM of a slot, its worker process included.
        vcpus: vCPUs of a slot.
        gpus: GPUs of a slot; with 0, machines with GPUs are excluded.
        most_slots: Largest number of slots used on one machine; None for all.
        burstable: Whether machines that run at full speed only on credit are allowed.
    """

    memory_bytes: int
    vcpus: int = 1
    gpus: int = 0
    most_slots: int | None = None
    burstable: bool = False
    architecture: str = ARCHITECTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A type in a zone, at its price in one market.

    Attributes:
        slots: Number of subnets that train on it at the same time.
    """

    type: InstanceType
    zone: str
    market: Market
    usd_per_hour: float
    spot_usd_per_hour: float | None
    on_demand_usd_per_hour: float | None
    slots: int

    @property
    def usd_per_slot_hour(self) -> float:
        """USD an hour and slot, by which offers are compared."""
        return self.usd_per_hour / self.slots

    def worst_usd_per_hour(self, max_price: float | None = None) -> float:
        """Return the highest possible price: a spot price stays below the on-demand price and the requested maximum."""
        if self.market == "on-demand":
            return self.usd_per_hour
        cap = self.on_demand_usd_per_hour or self.usd_per_hour / (1 - MOST_SAVING)
        return max(self.usd_per_hour, cap if max_price is None else min(cap, max_price))


@dataclass(frozen=True)
class Pools:
    """The offers to request, the best first."""

    offers: tuple[Offer, ...]

    @property
    def types(self) -> tuple[str, ...]:
        """Names of their instance types, without repeats."""
        return tuple(dict.fromkeys(offer.type.name for offer in self.offers))

    @property
    def zones(self) -> tuple[str, ...]:
        """Their zones, sorted."""
        return tuple(sorted({offer.zone for offer in self.offers}))

    @property
    def few(self) -> bool:
        """Return whether there are so few types that a lack of capacity in some may leave none."""
        return len(self.types) < WANTED_TYPES


def slots_of(type_: InstanceType, need: NodeNeed) -> int:
    """Return how many subnets can train on a machine at the same time; 0 if its kind is unsuitable."""
    if not _is_suitable(type_, need):
        return 0
    slots = [type_.usable_bytes // need.memory_bytes, type_.vcpus // need.vcpus]
    if need.gpus:
        slots.append(type_.gpus // need.gpus)
    if need.most_slots is not None:
        slots.append(need.most_slots)
    return min(slots)


def _is_suitable(type_: InstanceType, need: NodeNeed) -> bool:
    return (
        type_.architecture == need.architecture
        and not type_.bare_metal  # boots for ten minutes, and has no price advantage
        and not type_.other_accelerators
        and (need.burstable or not type_.burstable)
        and bool(type_.gpus) == bool(need.gpus)
        # Old processors cost more per step; most GPUs on offer are old.
        and (type_.current_generation or need.gpus > 0)
    )


def rank_offers(
    types: Collection[InstanceType],
    offerings: Mapping[str, Collection[str]],
    spot_prices: Mapping[tuple[str, str], float],
    on_demand_prices: Mapping[str, float],
    need: NodeNeed,
    market: Market,
) -> tuple[Offer, ...]:
    """Return all offers that meet a need, the cheapest slot first; at equal prices the smaller machine.

    Args:
        types: All instance types.
        offerings: Zones that offer a type, by its name.
        spot_prices: USD an hour by type and zone.
        on_demand_prices: USD an hour by type.
        need: The resources that one subnet needs.
        market: Whose price counts; there is no offer where it is unknown.
    """
    offers = []
    for type_ in types:
        slots = slots_of(type_, need)
        if not slots:
            continue
        on_demand = on_demand_prices.get(type_.name)
        for zone in offerings.get(type_.name, ()):
            spot = spot_prices.get((type_.name, zone))
            price = spot if market == "spot" else on_demand
            if price is not None:
                offers.append(
                    Offer(
                        type=type_,
                        zone=zone,
                        market=market,
                        usd_per_hour=price,
                        spot_usd_per_hour=spot,
                        on_demand_usd_per_hour=on_demand,
                        slots=slots,
                    )
                )
    return tuple(sorted(offers, key=lambda o: (o.usd_per_slot_hour, o.slots, o.type.name, o.zone)))


def diversify(offers: Sequence[Offer], count: int) -> Pools:
    """Choose the pools to request: near the best price, in all zones, over as many families as there are.

    Args:
        offers: Result of `rank_offers`.
        count: Number of slots wanted in all; a machine's slots beyond it are worth nothing.
    """
    scores = {offer: _score(offer, count) for offer in offers}
    ordered = sorted(offers, key=lambda o: (scores[o], o.type.name, o.zone))
    best = scores[ordered[0]] if ordered else 0.0
    admitted: dict[str, float] = {}  # by type name, the largest score ratio allowed to its zones
    sizes: dict[str, int] = {}
    for n, (bound, most_sizes) in enumerate(SEARCH_BOUNDS):
        limit = MOST_TYPES if n == 0 else WANTED_TYPES
        for offer in ordered:
            name, family = offer.type.name, offer.type.family
            if len(admitted) >= limit or scores[offer] > bound * best:
                break
            if name not in admitted and sizes.get(family, 0) < most_sizes:
                admitted[name] = bound
                sizes[family] = sizes.get(family, 0) + 1
    return Pools(tuple(o for o in ordered if scores[o] <= admitted.get(o.type.name, 0.0) * best))


def _score(offer: Offer, count: int) -> float:
    used = min(offer.slots, count)
    return offer.usd_per_hour / used * (1 + INTERRUPTION_WEIGHT * used / count)


def nearest(types: Collection[InstanceType], need: NodeNeed) -> InstanceType | None:
    """Return the suitable type that comes closest to the resources of one slot; None if no type is suitable."""
    suitable = [type_ for type_ in types if _is_suitable(type_, need)]
    return max(suitable, key=lambda t: (min(_shares(t, need).values()), t.usable_bytes, t.name), default=None)


def _shares(type_: InstanceType, need: NodeNeed) -> dict[str, float]:
    """Return which fraction of a slot's need a machine has, by resource, at most 1."""
    shares = {"gpu": type_.gpus / need.gpus} if need.gpus else {}
    shares |= {"memory": type_.usable_bytes / need.memory_bytes, "vcpus": type_.vcpus / need.vcpus}
    return {field: min(1.0, share) for field, share in shares.items()}


def no_offer_reason(
    types: Collection[InstanceType], at_any_price: Sequence[Offer], need: NodeNeed, market: Market
) -> str:
    """Return the sentence for a need that no offer meets.

    Args:
        types: Types with a price in the market.
        at_any_price: Result of `rank_offers`.
        need: The resources that one subnet needs.
        market: The market that was searched.
    """
    if at_any_price:
        cheapest = min(at_any_price, key=lambda o: (o.usd_per_hour, o.type.name, o.zone))
        return (
            f"nodes.max_price: is below the price of every suitable machine; the cheapest is {cheapest.type.name} in "
            f"{cheapest.zone} at ${cheapest.usd_per_hour:.4f} an hour: allow that, or leave max_price out"
        )
    closest = nearest(types, need)
    if closest is None:
        wanted = f"{need.architecture} machine with GPUs" if need.gpus else f"{need.architecture} machine"
        return f"nodes: no {wanted} has a {market} price here; name another region in cloud.region"
    missing = [field for field, share in _shares(closest, need).items() if share < 1]
    if "gpu" in missing:
        return f"nodes.gpu: no machine has {need.gpus} GPUs; {closest.name} has {closest.gpus}: ask for at most that"
    if missing:
        return (
            f"nodes.memory: no machine has {memory_text(need.memory_bytes)} to spare for a subnet; the nearest is "
            f"{closest.name} with {memory_text(closest.usable_bytes)}: ask for at most that"
        )
    return (
        f"nodes: {closest.name} is suitable, but no zone that the run can use offers it or a similar one as {market}; "
        "name another region in cloud.region, or another nodes.spot_policy"
    )


def memory_text(count: int) -> str:
    """Format bytes for a person, rounded down: `7.0 GiB`."""
    unit, name = (TIB, "TiB") if count >= TIB else (GIB, "GiB")
    return f"{count * 10 // unit / 10:.1f} {name}"
