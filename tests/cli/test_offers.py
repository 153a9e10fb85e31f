"""The table and the plan say what they should, in 80 columns as in 120."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from idletrain.cli.offers import spot_plan_lines, table
from idletrain.cloud.instance_types import GIB, InstanceType, Market, Offer, Pools
from idletrain.cloud.quote import Quote


def offer(
    name: str,
    price: float,
    *,
    zone: str = "eu-west-1a",
    slots: int = 2,
    gpus: int = 0,
    on_demand: float | None = 0.1008,
    market: Market = "spot",
) -> Offer:
    return Offer(
        type=InstanceType(name=name, vcpus=96, memory_bytes=192 * GIB, gpus=gpus, gpu_memory_bytes=gpus * 24 * GIB),
        zone=zone,
        market=market,
        usd_per_hour=price,
        spot_usd_per_hour=price,
        on_demand_usd_per_hour=on_demand,
        slots=slots,
    )


OFFERS = [
    offer("m7i.large", 0.0336, zone="eu-west-1b"),
    offer("m7i.large", 0.0402, zone="eu-west-1a"),
    offer("c7i-flex.24xlarge", 1.5501, slots=92, on_demand=4.0698),
    offer("r7i.large", 0.0500, on_demand=None),
]


def shown(width: int, offers: list[Offer], estimate: bool = False, **fields: Any) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(table(offers, estimate, **fields))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_a_type_with_all_that_is_asked_about(width: int) -> None:
    lines = [line.split() for line in shown(width, OFFERS).splitlines()]
    assert ["spot", "machines", "in", "eu-west-1;", "USD,", "GiB"] in lines
    assert ["type", "zones", "vCPU", "RAM", "slots", "$/h", "slot-h", "demand", "saving"] in lines
    assert ["m7i.large", "ba", "96", "192", "2", "0.0336", "0.0168", "0.1008", "67%"] in lines
    assert ["c7i-flex.24xlarge", "a", "96", "192", "92", "1.550", "0.0168", "4.070", "62%"] in lines
    assert ["r7i.large", "a", "96", "192", "2", "0.0500", "0.0250"] in lines
    assert len([line for line in lines if line]) == 7


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("estimate", [True, False])
def test_no_line_is_wrapped_or_cut(width: int, estimate: bool) -> None:
    wide = [
        offer("u7in-32tb.224xlarge", 407.68, zone=f"ap-southeast-1{z}", gpus=8, on_demand=999.9999) for z in "abcdef"
    ]
    lines = shown(width, wide, estimate).splitlines()
    assert all(len(line) <= width for line in lines)
    assert "u7in-32tb.224xlarge" in "".join(lines)
    assert "…" not in "".join(lines)
    assert "407.7" in "".join(lines)


def test_gpus_have_a_column_where_there_are_some() -> None:
    assert "4x24" in shown(80, [offer("g5.12xlarge", 2.0, gpus=4)])
    assert "GPU" not in shown(80, OFFERS)


def test_what_is_estimated_is_marked_and_explained() -> None:
    text = shown(80, OFFERS, estimate=True)
    assert "~0.1008" in text
    assert "~ estimated: the price list cannot be had" in text
    assert "~" not in shown(80, OFFERS)


def test_the_rest_is_counted() -> None:
    text = shown(80, OFFERS, rows=1)
    assert "and 2 more types" in text
    assert "r7i" not in text


def test_on_demand_machines_save_nothing() -> None:
    text = shown(80, [offer("m7i.large", 0.1008, market="on-demand")])
    assert "on-demand machines in eu-west-1" in text
    assert "%" not in text


def test_local_zones_keep_their_names() -> None:
    text = shown(80, [offer("m7i.large", 0.1, zone="us-west-2-lax-1a"), offer("m7i.large", 0.1, zone="us-west-2b")])
    assert "-lax-1a b" in text
    assert "us-west-2; USD" in text


def test_an_empty_table_says_so() -> None:
    assert "no machines" in shown(80, [])


def quote(offers: list[Offer] = OFFERS, **fields: Any) -> Quote:
    options: dict[str, Any] = {"nodes": 8, "head_type": "t3.medium", "head_usd_per_hour": 0.0416}
    return Quote(pools=Pools(tuple(offers)), **options | {"max_duration_seconds": 4 * 3600.0} | fields)


SMALL = [offer(f"{family}.large", 0.03 + n / 1000) for n, family in enumerate(("m7i", "m7a", "c7i", "r7i", "r7a"))]


def test_the_plan_of_a_fleet() -> None:
    assert spot_plan_lines(quote(SMALL), estimate=False) == [
        "nodes      8 spot, of 5 types in 1 zone:",
        "           m7i.large, m7a.large, c7i.large and 2 more",
        "head       1 on-demand t3.medium",
        "expected   $0.37 an hour: 8 nodes at $0.0320,",
        "           the head at $0.0416, disk and address $0.0083 each",
        "total      $1.49 if it takes all of 4 h",
        "on-demand  $3.69; 60% saved",
        "deadline   every machine ends by itself after 4 h",
    ]


def test_a_budget_that_is_tight_shortens_the_plan() -> None:
    lines = spot_plan_lines(quote(SMALL, budget_usd=2.0), estimate=True)
    worst = quote(SMALL).worst_usd_per_hour
    assert f"           so that $2.00 hold at up to ${worst:.2f} an hour" in lines
    assert "deadline   every machine ends by itself after 1 h 56 min" in lines
    assert "total      $0.72 if it takes all of 1 h 56 min" in lines
    resumed = spot_plan_lines(quote(SMALL, budget_usd=5.0, spent_usd=3.0), estimate=True)
    assert "           and $3.00 of them are spent already" in resumed
    assert "deadline   every machine ends by itself after 1 h 56 min" in resumed
    assert "on-demand  about $1.79; 60% saved" in lines


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"offers": SMALL[:4]}, "so few types run dry together"),
        ({"offers": SMALL, "max_price": 0.05}, "nodes.max_price brings preemptions"),
    ],
)
def test_what_makes_a_fleet_fragile_is_warned_of(fields: dict[str, Any], arguments: str) -> None:
    assert any(
        arguments in line for line in spot_plan_lines(quote(**fields), estimate=False) if line.startswith("warning")
    )
    assert not any("warning" in line for line in spot_plan_lines(quote(SMALL), estimate=False))


def test_a_plan_on_demand_compares_with_nothing() -> None:
    lines = spot_plan_lines(quote([offer("m7i.large", 0.1, market="on-demand")]), estimate=False)
    assert lines[0] == "nodes      8 on-demand, of 1 type in 1 zone:"
    assert not any("saved" in line for line in lines)


def test_a_plan_that_falls_back_is_priced_at_what_it_prefers() -> None:
    both = [*SMALL, offer("m7i.large", 0.1008, market="on-demand")]
    lines = spot_plan_lines(quote(both), estimate=False)
    assert "           on-demand where there are no spot machines" in lines
    assert "expected   $0.37 an hour: 8 nodes at $0.0320," in lines
    assert len(lines) == len(spot_plan_lines(quote(SMALL), estimate=False)) + 1


def test_a_plan_fits_a_narrow_terminal() -> None:
    long = [offer("c7i-flex.24xlarge", 1.5), offer("u7in-32tb.224xlarge", 1.5), offer("m8i-flex.16xlarge", 1.5)]
    lines = spot_plan_lines(quote(long, nodes=1000, budget_usd=99999.0, max_price=2.0), estimate=True)
    assert max(map(len, lines)) <= 80
