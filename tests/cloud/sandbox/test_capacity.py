"""What a request gets: as much as there is, spread as asked, and an error for each pool that failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.cloud.sandbox.capacity import (
    INSUFFICIENT,
    CapacityOffer,
    CapacityPool,
    Limit,
    grant_capacity,
    with_limit,
)

A, B, C = (CapacityPool("spot", "m5.large", f"eu-west-1{zone}") for zone in "abc")
CHEAP_FIRST = [CapacityOffer(A, 0.03), CapacityOffer(B, 0.04), CapacityOffer(C, 0.05)]


def only(pool: CapacityPool, count: int) -> Limit:
    return Limit(pool.market, pool.type, pool.zone, count)


def test_without_limits_a_spread_request_takes_pools_in_turn_by_price() -> None:
    assert grant_capacity(5, CHEAP_FIRST, (), (), spread=True).counts == (2, 2, 1)
    assert grant_capacity(5, CHEAP_FIRST, (), (), spread=True).errors == ()


def test_without_spread_the_cheapest_pool_is_emptied_first() -> None:
    granted = grant_capacity(5, CHEAP_FIRST, (only(A, 3),), (), spread=False)
    assert granted.counts == (3, 2, 0)
    assert granted.errors == ()


def test_the_deepest_pool_comes_first() -> None:
    limits = (only(A, 1), only(B, 4), only(C, 3))
    assert grant_capacity(3, CHEAP_FIRST, limits, (), spread=True).counts == (0, 2, 1)


def test_what_runs_already_counts() -> None:
    granted = grant_capacity(2, CHEAP_FIRST[:1], (only(A, 3),), (A, A, B), spread=True)
    assert granted.counts == (1,)
    assert granted.errors == ((0, INSUFFICIENT),)


def test_a_dry_pool_is_an_error_although_all_wanted_instances_came() -> None:
    granted = grant_capacity(2, CHEAP_FIRST, (only(A, 0),), (), spread=True)
    assert granted.counts == (0, 1, 1)
    assert granted.errors == ((0, INSUFFICIENT),)


def test_a_pool_that_cannot_be_had_says_why_and_gives_nothing() -> None:
    granted = grant_capacity(
        2, [CapacityOffer(A, 0.03, "SpotMaxPriceTooLow"), CapacityOffer(B, 0.04)], (), (), spread=True
    )
    assert granted.counts == (0, 2)
    assert granted.errors == ((0, "SpotMaxPriceTooLow"),)


def test_a_limit_on_many_pools_is_shared_by_them() -> None:
    granted = grant_capacity(5, CHEAP_FIRST, (Limit("spot", "m5.*", "*", 2),), (), spread=True)
    assert sum(granted.counts) == 2
    assert len(granted.errors) == 3


@given(
    count=st.integers(0, 12),
    limits=st.lists(st.builds(Limit, st.just("spot"), st.just("*"), st.sampled_from("abc*"), st.integers(0, 4))),
    spread=st.booleans(),
)
def test_no_limit_is_ever_exceeded_and_nothing_is_missing_without_an_error(
    count: int, limits: list[Limit], spread: bool
) -> None:
    offers = [
        CapacityOffer(CapacityPool("spot", "x", zone), price) for zone, price in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]
    granted = grant_capacity(count, offers, limits, (), spread=spread)
    given_ = [offer.pool for offer, n in zip(offers, granted.counts, strict=True) for _ in range(n)]
    assert len(given_) <= count
    assert all(sum(map(limit.covers, given_)) <= limit.count for limit in limits)
    if len(given_) < count:
        assert len(granted.errors) == len(offers)


def test_a_limit_replaces_the_one_before_it_and_can_be_lifted() -> None:
    limits = with_limit((), ("spot", "*", "*"), 3)
    assert with_limit(limits, ("spot", "*", "*"), 1) == (Limit("spot", "*", "*", 1),)
    assert with_limit(limits, ("spot", "*", "*"), None) == ()
    assert len(with_limit(limits, ("on-demand", "*", "*"), 0)) == 2


@pytest.mark.parametrize(("market", "limited"), [("spot", True), ("on-demand", False)])
def test_a_limit_covers_what_its_patterns_match(market: str, limited: bool) -> None:
    assert Limit("spot", "m5.*", "*", 0).covers(CapacityPool(market, "m5.large", "eu-west-1a")) is limited
