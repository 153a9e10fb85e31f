"""A fleet's quote: the middle price is expected, the worst is what the budget must hold against."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from idletrain.cloud.instance_types import GIB, InstanceType, Offer, Pools
from idletrain.cloud.market import ESTIMATE_ERROR
from idletrain.cloud.quote import Quote
from idletrain.observe.cost import EXTRAS_USD_PER_HOUR, MOST_SPARES

HOUR = 3600.0


def quote(**fields: Any) -> Quote:
    type_ = InstanceType(name="m7i.large", vcpus=2, memory_bytes=8 * GIB)
    pools = Pools(
        tuple(
            Offer(
                type=type_,
                zone=f"eu-west-1{zone}",
                market="spot",
                usd_per_hour=price,
                spot_usd_per_hour=price,
                on_demand_usd_per_hour=on_demand,
                slots=2,
            )
            for zone, price, on_demand in (("a", 0.03, 0.10), ("b", 0.04, 0.12), ("c", 0.09, None))
        )
    )
    options: dict[str, Any] = {"nodes": 8, "head_type": "t3.medium", "head_usd_per_hour": 0.04}
    return Quote(**{"pools": pools} | options | {"max_duration_seconds": 4 * HOUR} | fields)


def test_a_fleet_is_expected_at_the_middle_price_with_its_head_and_extras() -> None:
    extras = 9 * EXTRAS_USD_PER_HOUR
    assert quote().usd_per_hour == pytest.approx(8 * 0.04 + 0.04 + extras)
    assert quote().on_demand_usd_per_hour == pytest.approx(8 * 0.11 + 0.04 + extras)


def test_the_worst_is_a_spare_more_at_the_highest_price_where_nodes_are_spot() -> None:
    extras = (8 + MOST_SPARES + 1) * EXTRAS_USD_PER_HOUR
    assert quote().worst_usd_per_hour == pytest.approx((8 + MOST_SPARES) * 0.90 + 0.04 + extras)
    assert quote(max_price=0.2).worst_usd_per_hour == pytest.approx((8 + MOST_SPARES) * 0.20 + 0.04 + extras)
    fixed = Pools(tuple(replace(offer, market="on-demand") for offer in quote().pools.offers))
    dear = quote(pools=fixed).worst_usd_per_hour
    assert dear == pytest.approx(8 * 0.09 + 0.04 + 9 * EXTRAS_USD_PER_HOUR)


def test_prices_that_are_estimates_may_be_as_much_higher_as_they_are_uncertain() -> None:
    worst = quote().worst_usd_per_hour
    uncertain = quote(error_factor=ESTIMATE_ERROR, budget_usd=worst)
    assert uncertain.worst_usd_per_hour == pytest.approx(ESTIMATE_ERROR * worst)
    assert uncertain.deadline_seconds == pytest.approx(HOUR / ESTIMATE_ERROR)
    assert uncertain.usd_per_hour == quote().usd_per_hour


def test_what_earlier_sittings_spent_is_not_there_any_more() -> None:
    worst = quote().worst_usd_per_hour
    assert quote(budget_usd=4 * worst, spent_usd=3 * worst).deadline_seconds == pytest.approx(HOUR)
    sentence = quote(budget_usd=4 * worst, spent_usd=3.9 * worst).fault
    assert sentence
    assert f"${3.9 * worst:.2f} of ${4 * worst:.2f} are spent, and the rest does not pay another 15 min" in sentence
    assert quote(budget_usd=4 * worst, spent_usd=3.75 * worst).fault is None


def test_a_budget_that_does_not_pay_a_quarter_of_an_hour_is_refused_with_one_that_does() -> None:
    """Machines are billed by the second, and the last minutes are for the last writes."""
    worst = quote().worst_usd_per_hour
    assert quote().fault is None
    sentence = quote(budget_usd=worst / 5).fault
    assert sentence
    assert sentence.startswith(f"nodes.budget_usd: ${worst / 5:.2f} does not pay 15 min, the least that a run takes")
    named = float(sentence.split("can cost $")[1].split(";")[0])
    assert named == pytest.approx(worst / 4, abs=0.01)
    assert quote(budget_usd=named).fault is None
    assert quote(budget_usd=named).deadline_seconds == pytest.approx(HOUR / 4, rel=0.01)
    brief = quote(max_duration_seconds=600, budget_usd=worst / 5).fault
    assert brief == (
        "nodes.max_duration: machines would live for 10 min, of which the last 7 are for the last writes; "
        "allow them 15 min"
    )


def test_a_fleet_lives_as_long_as_its_budget_pays_the_worst_price() -> None:
    assert quote().deadline_seconds == 4 * HOUR
    tight = quote(max_price=0.2, budget_usd=3.0)
    assert tight.deadline_seconds == pytest.approx(3.0 / tight.worst_usd_per_hour * HOUR)
    assert math.isclose(tight.deadline_seconds * tight.worst_usd_per_hour / HOUR, 3.0)
