"""Types are read right, ranked by what a slot costs, spread over families, and refused with what would be nearest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.cloud.aws.pricing import parse_type
from idletrain.cloud.instance_types import (
    GIB,
    MOST_TYPES,
    SEARCH_BOUNDS,
    TIB,
    WANTED_TYPES,
    InstanceType,
    NodeNeed,
    Offer,
    Pools,
    diversify,
    memory_text,
    nearest,
    no_offer_reason,
    rank_offers,
    slots_of,
)
from idletrain.cloud.market import MarketSnapshot


def item(name: str, vcpus: int, gib: float, architecture: str = "x86_64", **fields: Any) -> dict[str, Any]:
    """An item of DescribeInstanceTypes, without what nobody here reads."""
    return {
        "InstanceType": name,
        "CurrentGeneration": True,
        "BareMetal": False,
        "BurstablePerformanceSupported": False,
        "ProcessorInfo": {"SupportedArchitectures": [architecture]},
        "VCpuInfo": {"DefaultVCpus": vcpus},
        "MemoryInfo": {"SizeInMiB": int(gib * 1024)},
        **fields,
    }


def gpu(maker: str, name: str, count: int, mib: int) -> dict[str, Any]:
    return {"Gpus": [{"Manufacturer": maker, "Name": name, "Count": count, "MemoryInfo": {"SizeInMiB": mib}}]}


ITEMS = [
    item("t3.medium", 2, 4, BurstablePerformanceSupported=True),
    item("c7i.large", 2, 4),
    item("c7i.xlarge", 4, 8),
    item("c7i.2xlarge", 8, 16),
    item("c7i.24xlarge", 96, 192),
    item("c7i.metal-24xl", 96, 192, BareMetal=True),
    item("m7i.large", 2, 8),
    item("m7a.large", 2, 8),
    item("r7i.large", 2, 16),
    item("m7g.large", 2, 8, "arm64"),
    item("m4.large", 2, 8, CurrentGeneration=False),
    item("g5.xlarge", 4, 16, CurrentGeneration=False, GpuInfo=gpu("NVIDIA", "A10G", 1, 22888)),
    item("g4dn.12xlarge", 48, 192, GpuInfo=gpu("NVIDIA", "T4", 4, 16384)),
    item("g4ad.xlarge", 4, 16, GpuInfo=gpu("AMD", "Radeon Pro V520", 1, 8192)),
    item("g6f.large", 2, 8, GpuInfo=gpu("NVIDIA", "L4", 0, 2861)),  # an eighth of one
    item("trn1.2xlarge", 8, 32, NeuronInfo={"NeuronDevices": [{"Count": 1, "Name": "Trainium"}]}),
    item("inf1.xlarge", 4, 8, InferenceAcceleratorInfo={"Accelerators": [{"Count": 1, "Name": "Inferentia"}]}),
    item("f2.6xlarge", 24, 256, FpgaInfo={"Fpgas": [{"Count": 1, "Name": "VU47P"}]}),
    item("vt1.3xlarge", 12, 24, MediaAcceleratorInfo={"Accelerators": [{"Count": 1, "Name": "U30"}]}),
]
TYPES = {type_.name: type_ for type_ in map(parse_type, ITEMS)}
ZONES = ("eu-west-1a", "eu-west-1b", "eu-west-1c")
EVERYWHERE = dict.fromkeys(TYPES, ZONES)


def offer(name: str, usd_per_hour: float, slots: int = 1, zone: str = "eu-west-1a", **fields: Any) -> Offer:
    type_ = InstanceType(name=name, vcpus=slots, memory_bytes=slots * 4 * GIB)
    prices = {"spot_usd_per_hour": usd_per_hour, "on_demand_usd_per_hour": 3 * usd_per_hour} | fields
    return Offer(type=type_, zone=zone, market="spot", usd_per_hour=usd_per_hour, slots=slots, **prices)


# --- reading -----------------------------------------------------------------------------------------------------


def test_an_item_is_read() -> None:
    assert TYPES["g4dn.12xlarge"] == InstanceType(
        name="g4dn.12xlarge", vcpus=48, memory_bytes=192 * GIB, gpus=4, gpu_memory_bytes=64 * GIB
    )
    assert TYPES["m7g.large"].architecture == "arm64"
    assert TYPES["t3.medium"].burstable
    assert TYPES["c7i.metal-24xl"].bare_metal
    assert not TYPES["m4.large"].current_generation
    assert TYPES["c7i.metal-24xl"].family == "c7i"


def test_a_type_that_can_do_both_counts_as_x86_64() -> None:
    both = item("t2.micro", 1, 1) | {"ProcessorInfo": {"SupportedArchitectures": ["i386", "x86_64"]}}
    assert parse_type(both).architecture == "x86_64"


@pytest.mark.parametrize(
    "name", ["trn1.2xlarge", "inf1.xlarge", "f2.6xlarge", "vt1.3xlarge", "g4ad.xlarge", "g6f.large"]
)
def test_what_torch_cannot_use_is_another_accelerator_and_serves_nobody(name: str) -> None:
    assert TYPES[name].other_accelerators
    assert TYPES[name].gpus == 0
    assert slots_of(TYPES[name], NodeNeed(memory_bytes=GIB)) == 0
    assert slots_of(TYPES[name], NodeNeed(memory_bytes=GIB, gpus=1)) == 0


# --- slots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "need", "slots"),
    [
        # usable: (4 - 0.7) * 0.94 = 3.1 of 4 GiB, 6.9 of 8, 14.4 of 16, 180 of 192
        ("c7i.large", NodeNeed(memory_bytes=GIB), 2),  # by its processors
        ("c7i.large", NodeNeed(memory_bytes=2 * GIB), 1),  # by its memory
        ("c7i.large", NodeNeed(memory_bytes=3 * GIB), 1),
        ("c7i.large", NodeNeed(memory_bytes=4 * GIB), 0),
        ("r7i.large", NodeNeed(memory_bytes=2 * GIB), 2),
        ("r7i.large", NodeNeed(memory_bytes=2 * GIB, vcpus=2), 1),
        ("r7i.large", NodeNeed(memory_bytes=2 * GIB, vcpus=3), 0),
        ("c7i.24xlarge", NodeNeed(memory_bytes=2 * GIB), 89),
        ("c7i.24xlarge", NodeNeed(memory_bytes=2 * GIB, most_slots=1), 1),
        ("g5.xlarge", NodeNeed(memory_bytes=2 * GIB, gpus=1), 1),
        ("g4dn.12xlarge", NodeNeed(memory_bytes=2 * GIB, gpus=1), 4),
        ("g4dn.12xlarge", NodeNeed(memory_bytes=2 * GIB, gpus=2), 2),
        ("g4dn.12xlarge", NodeNeed(memory_bytes=100 * GIB, gpus=1), 1),
        # of the wrong kind
        ("g5.xlarge", NodeNeed(memory_bytes=GIB), 0),
        ("c7i.large", NodeNeed(memory_bytes=GIB, gpus=1), 0),
        ("c7i.metal-24xl", NodeNeed(memory_bytes=GIB), 0),
        ("m7g.large", NodeNeed(memory_bytes=GIB), 0),
        ("m7g.large", NodeNeed(memory_bytes=GIB, architecture="arm64"), 2),
        ("m4.large", NodeNeed(memory_bytes=GIB), 0),
        ("t3.medium", NodeNeed(memory_bytes=GIB), 0),
        ("t3.medium", NodeNeed(memory_bytes=GIB, burstable=True), 2),
    ],
)
def test_slots(name: str, need: NodeNeed, slots: int) -> None:
    assert slots_of(TYPES[name], need) == slots


def test_a_machine_smaller_than_its_system_has_no_slot() -> None:
    tiny = InstanceType(name="t3.nano", vcpus=2, memory_bytes=GIB // 2)
    assert tiny.usable_bytes == 0
    assert slots_of(tiny, NodeNeed(memory_bytes=1, burstable=True)) == 0


# --- ranking -----------------------------------------------------------------------------------------------------


def test_offers_are_ranked_by_the_price_of_a_slot() -> None:
    spot = {
        ("c7i.large", "eu-west-1a"): 0.03,  # one slot
        ("m7i.large", "eu-west-1a"): 0.04,  # two
        ("m7i.large", "eu-west-1b"): 0.036,
        ("r7i.large", "eu-west-1c"): 0.05,
        ("t3.medium", "eu-west-1a"): 0.001,
        ("trn1.2xlarge", "eu-west-1a"): 0.001,
    }
    offers = rank_offers(TYPES.values(), EVERYWHERE, spot, {"m7i.large": 0.1}, NodeNeed(memory_bytes=2 * GIB), "spot")
    assert [(o.type.name, o.zone, round(o.usd_per_slot_hour, 4)) for o in offers] == [
        ("m7i.large", "eu-west-1b", 0.018),
        ("m7i.large", "eu-west-1a", 0.02),
        ("r7i.large", "eu-west-1c", 0.025),
        ("c7i.large", "eu-west-1a", 0.03),
    ]
    assert [o.on_demand_usd_per_hour for o in offers] == [0.1, 0.1, None, None]


def test_on_demand_has_one_price_in_all_zones_where_a_type_is_offered() -> None:
    offerings = {"c7i.large": ZONES[:2], "m7i.large": ()}
    prices = {"c7i.large": 0.09, "m7i.large": 0.1, "r7i.large": 0.13}
    offers = rank_offers(
        TYPES.values(), offerings, {("c7i.large", ZONES[1]): 0.03}, prices, NodeNeed(memory_bytes=GIB), "on-demand"
    )
    assert [(o.zone, o.usd_per_hour, o.spot_usd_per_hour) for o in offers] == [
        (ZONES[0], 0.09, None),
        (ZONES[1], 0.09, 0.03),
    ]


def test_equal_prices_keep_one_order_whatever_the_order_of_the_catalogue() -> None:
    names = ["c7i.2xlarge", "c7i.large", "c7i.xlarge", "m7a.large", "m7i.large", "r7i.large"]
    need = NodeNeed(memory_bytes=GIB)
    spot = {(name, zone): 0.01 * slots_of(TYPES[name], need) for name in names for zone in ZONES}
    expected = [
        (name, zone)
        for name in ["c7i.large", "m7a.large", "m7i.large", "r7i.large", "c7i.xlarge", "c7i.2xlarge"]
        for zone in ZONES
    ]
    for seed in range(5):
        types = random.Random(seed).sample(list(TYPES.values()), len(TYPES))
        offers = rank_offers(types, EVERYWHERE, spot, {}, need, "spot")
        assert [(o.type.name, o.zone) for o in offers] == expected


def test_max_price_is_a_machines_and_inclusive() -> None:
    spot = {("c7i.large", "eu-west-1a"): 0.03, ("m7i.large", "eu-west-1a"): 0.0301}
    market = MarketSnapshot(TYPES, EVERYWHERE, spot, {}, estimate=False)
    offers = market.offers(NodeNeed(memory_bytes=GIB), "spot", max_price=0.03)
    assert [o.type.name for o in offers] == ["c7i.large"]


@pytest.mark.parametrize(
    ("candidate", "max_price", "worst"),
    [
        (offer("a.large", 0.1), None, 0.3),
        (offer("a.large", 0.1), 0.2, 0.2),
        (offer("a.large", 0.1), 9.0, 0.3),
        (offer("a.large", 0.1, on_demand_usd_per_hour=None), None, 1.0),  # spot saves 90 % at most
        (offer("a.large", 0.1, on_demand_usd_per_hour=0.05), None, 0.1),  # an estimate that is too low
    ],
)
def test_the_worst_price_of_a_spot_machine(candidate: Offer, max_price: float | None, worst: float) -> None:
    assert candidate.worst_usd_per_hour(max_price) == pytest.approx(worst)


def test_the_price_of_an_on_demand_machine_does_not_move() -> None:
    type_ = TYPES["c7i.large"]
    fixed = Offer(
        type=type_,
        zone=ZONES[0],
        market="on-demand",
        usd_per_hour=0.09,
        spot_usd_per_hour=None,
        on_demand_usd_per_hour=0.09,
        slots=2,
    )
    assert fixed.worst_usd_per_hour() == 0.09


# --- spreading ---------------------------------------------------------------------------------------------------


def names(pools: Pools) -> list[str]:
    return list(pools.types)


def test_at_most_two_sizes_of_a_family_and_nothing_above_half_again_the_best() -> None:
    offers = [offer(f"{family}.{size_}", 0.1) for family in "abc" for size_ in ("1", "2", "3")]
    offers += [offer("d.1", 0.15), offer("e.1", 0.1501)]
    pools = diversify(offers, 8)
    assert names(pools) == ["a.1", "a.2", "b.1", "b.2", "c.1", "c.2", "d.1"]
    assert not pools.few


def test_all_zones_near_the_best_price_are_asked() -> None:
    offers = [
        offer(f"{f}.1", price, zone=z) for f in "abcde" for z, price in zip(ZONES, (0.1, 0.14, 0.16), strict=True)
    ]
    pools = diversify(offers, 8)
    assert pools.zones == ZONES[:2]
    assert len(pools.offers) == 10


def test_too_few_types_loosen_the_bounds_just_so_far_that_there_are_five() -> None:
    offers = [offer("a.1", 0.1), offer("a.2", 0.1), offer("a.3", 0.1)]
    offers += [offer("b.1", 0.19), offer("c.1", 0.25), offer("d.1", 0.29), offer("e.1", 0.31)]
    pools = diversify(offers, 8)
    assert names(pools) == ["a.1", "a.2", "a.3", "b.1", "c.1"]
    assert not pools.few


def test_what_costs_more_than_three_times_the_best_is_not_asked_for_the_sake_of_variety() -> None:
    pools = diversify([offer("a.1", 0.1), offer("b.1", 0.31)], 8)
    assert names(pools) == ["a.1"]
    assert pools.few


def test_at_most_sixty_types() -> None:
    assert len(diversify([offer(f"f{n}.1", 0.1) for n in range(100)], 8).types) == MOST_TYPES


def test_many_small_nodes_come_before_a_large_one_of_the_same_price_a_slot() -> None:
    pools = diversify([offer("big.1", 0.8, slots=8), offer("small.1", 0.1)], 8)
    assert names(pools) == ["small.1", "big.1"]
    cheaper = diversify([offer("big.1", 0.6, slots=8), offer("small.1", 0.1)], 8)
    assert names(cheaper) == ["big.1", "small.1"]


def test_slots_that_nobody_needs_are_worth_nothing() -> None:
    pools = diversify([offer("big.1", 0.8, slots=16), offer("small.1", 0.1)], 2)
    assert names(pools) == ["small.1"]


def test_nothing_offered_is_nothing_to_ask_for() -> None:
    assert diversify([], 4) == Pools(())
    assert Pools(()).few


@st.composite
def markets(draw: st.DrawFn) -> list[Offer]:
    pools = st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 6), st.sampled_from(ZONES))
    chosen = draw(st.lists(pools, min_size=1, max_size=60, unique=True))
    price = st.floats(0.01, 1.0)
    return [offer(f"{family}.{n}", draw(price), slots=n, zone=zone) for family, n, zone in chosen]


@settings(deadline=None, max_examples=150)
@given(offers=markets(), count=st.integers(1, 20), seed=st.integers(0, 9))
def test_a_choice_is_the_same_in_any_order_holds_the_best_and_is_few_only_for_want(
    offers: list[Offer], count: int, seed: int
) -> None:
    pools = diversify(offers, count)
    assert diversify(random.Random(seed).sample(offers, len(offers)), count) == pools
    assert set(pools.offers) <= set(offers)
    assert len(set(pools.offers)) == len(pools.offers)

    def score(o: Offer) -> float:
        used = min(o.slots, count)
        return o.usd_per_hour / used * (1 + 0.2 * used / count)

    best = min(offers, key=lambda o: (score(o), o.type.name, o.zone))
    assert pools.offers[0] == best
    loosest, most_sizes = SEARCH_BOUNDS[-1]
    near = {o.type.name for o in offers if score(o) <= loosest * score(best)}
    assert all(o.type.name in near for o in pools.offers)
    assert len(pools.types) >= min(WANTED_TYPES, len(near))  # six sizes a family are below the loosest limit
    assert most_sizes >= 6
    if len(pools.types) > WANTED_TYPES:
        families = [name.partition(".")[0] for name in pools.types]
        assert max(families.count(family) for family in families) <= SEARCH_BOUNDS[0][1]
        assert all(score(o) <= SEARCH_BOUNDS[0][0] * score(best) for o in pools.offers)


# --- refusing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "name"),
    [
        (NodeNeed(memory_bytes=9 * TIB), "c7i.24xlarge"),
        (NodeNeed(memory_bytes=10 * GIB, vcpus=4), "c7i.24xlarge"),
        (NodeNeed(memory_bytes=GIB, gpus=16), "g4dn.12xlarge"),
        (NodeNeed(memory_bytes=GIB, architecture="arm64"), "m7g.large"),
        (NodeNeed(memory_bytes=GIB, architecture="riscv64"), None),
    ],
)
def test_the_nearest_type(need: NodeNeed, name: str | None) -> None:
    closest = nearest(TYPES.values(), need)
    assert (closest and closest.name) == name


NINE_TIB_REFUSED = (
    "nodes.memory: no machine has 9.0 TiB to spare for a subnet; the nearest is c7i.24xlarge with 179.8 GiB: "
    "ask for at most that"
)


@pytest.mark.parametrize(
    ("need", "sentence"),
    [
        (NodeNeed(memory_bytes=9 * TIB), NINE_TIB_REFUSED),
        (
            NodeNeed(memory_bytes=GIB, gpus=16),
            "nodes.gpu: no machine has 16 GPUs; g4dn.12xlarge has 4: ask for at most that",
        ),
        (
            NodeNeed(memory_bytes=GIB, architecture="riscv64", gpus=1),
            "nodes: no riscv64 machine with GPUs has a spot price here; name another region in cloud.region",
        ),
    ],
)
def test_a_need_that_nothing_serves_is_refused_with_the_nearest(need: NodeNeed, sentence: str) -> None:
    assert not rank_offers(TYPES.values(), EVERYWHERE, {(n, ZONES[0]): 0.1 for n in TYPES}, {}, need, "spot")
    assert no_offer_reason(TYPES.values(), (), need, "spot") == sentence


def test_asking_for_what_a_refusal_names_is_enough() -> None:
    largest = nearest(TYPES.values(), NodeNeed(memory_bytes=9 * TIB))
    assert largest is not None
    named = float(memory_text(largest.usable_bytes).removesuffix(" GiB"))
    assert slots_of(largest, NodeNeed(memory_bytes=int(named * GIB))) == 1


def test_a_maximum_below_all_prices_is_refused_with_the_cheapest_machine() -> None:
    offers = [offer("big.1", 0.2, slots=8), offer("small.1", 0.1, zone="eu-west-1c")]
    assert no_offer_reason(TYPES.values(), offers, NodeNeed(memory_bytes=GIB), "spot") == (
        "nodes.max_price: is below the price of every suitable machine; the cheapest is small.1 in eu-west-1c at "
        "$0.1000 an hour: allow that, or leave max_price out"
    )


def test_a_type_that_no_usable_zone_offers_is_named() -> None:
    sentence = no_offer_reason([TYPES["c7i.large"]], (), NodeNeed(memory_bytes=GIB), "spot")
    assert sentence.startswith("nodes: c7i.large is suitable, but no zone")
    assert sentence.endswith("name another region in cloud.region, or another nodes.spot_policy")
