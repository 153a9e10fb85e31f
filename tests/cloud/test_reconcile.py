"""What a fleet lacks, as tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.cloud.machines import Pool
from idletrain.cloud.reconcile import (
    CHANGE_SECONDS,
    CHECK_SECONDS,
    LOST_SECONDS,
    MACHINE_JOIN_SECONDS,
    PREFER_OTHERS_SECONDS,
    REPEAT_SECONDS,
    DesiredFleet,
    FleetMachine,
    Launch,
    Limits,
    PoolTimes,
    Terminate,
    after_launch,
    decide,
    missing_count,
    next_check_seconds,
    pause_seconds,
    why_stop,
)

SPOT = tuple(Pool("spot", name, "a") for name in ("c7i", "m7i"))
DEAR = tuple(Pool("on-demand", name, "a") for name in ("c7i", "m7i"))
WANTED = DesiredFleet(2, "spot", SPOT)
NOW = 1e6


def machine(name: str, **changes: object) -> FleetMachine:
    return dataclasses.replace(FleetMachine(name, SPOT[0], NOW - 60, joined=True), **changes)


NO_TIMES = PoolTimes()
FINE = [machine("i-1"), machine("i-2")]


def test_a_fleet_that_is_whole_needs_nothing() -> None:
    assert decide(WANTED, FINE, NO_TIMES, True, NOW) == ()


def test_what_is_missing_is_asked_for_in_all_pools() -> None:
    assert decide(WANTED, [], NO_TIMES, True, NOW) == (Launch(SPOT, 2),)
    assert decide(WANTED, FINE[:1], NO_TIMES, True, NOW) == (Launch(SPOT, 1),)


def test_machines_that_boot_count_until_they_have_had_their_time() -> None:
    booting = [machine("i-1", joined=False), machine("i-2", joined=False)]
    assert decide(WANTED, booting, NO_TIMES, True, NOW) == ()
    late = machine("i-2", joined=False, launched_at=NOW - MACHINE_JOIN_SECONDS - 1)
    assert decide(WANTED, [FINE[0], late], NO_TIMES, True, NOW) == (
        Launch(SPOT, 1),
        Terminate(("i-2",), f"no worker after {MACHINE_JOIN_SECONDS:.0f} s"),
    )


def test_a_noticed_machine_is_replaced_before_it_is_gone_and_not_ended_by_us() -> None:
    assert decide(WANTED, [FINE[0], machine("i-2", leaving=True)], NO_TIMES, True, NOW) == (Launch(SPOT, 1),)


def test_a_machine_at_risk_stays_and_gets_a_spare_once() -> None:
    risky = machine("i-2", at_risk=True)
    assert decide(WANTED, [FINE[0], risky], NO_TIMES, True, NOW) == (Launch(SPOT, 1),)
    assert decide(WANTED, [FINE[0], risky, machine("i-3")], NO_TIMES, True, NOW) == ()
    risky_too = machine("i-3", at_risk=True)
    assert decide(WANTED, [machine("i-1", at_risk=True), risky, risky_too], NO_TIMES, True, NOW) == ()


def test_a_machine_without_a_worker_is_replaced_at_once_and_ended_soon() -> None:
    just = machine("i-2", workerless_since=NOW - 0.1)
    assert decide(WANTED, [FINE[0], just], NO_TIMES, True, NOW) == (Launch(SPOT, 1),)
    lost = machine("i-2", workerless_since=NOW - LOST_SECONDS - 0.1)
    assert decide(WANTED, [FINE[0], lost, machine("i-3")], NO_TIMES, True, NOW) == (
        Terminate(("i-2",), "its worker is gone"),
    )


def dry(*pools: Pool, since: float = NOW) -> PoolTimes:
    """Pools that had nothing when they were asked, all at once."""
    return NO_TIMES.after_request(pools, since).after_failure(pools, since)


def test_others_are_preferred_to_a_dry_pool_for_a_while() -> None:
    times = dry(SPOT[0])
    assert decide(WANTED, [], times, True, NOW + PREFER_OTHERS_SECONDS - 1) == (Launch(SPOT[1:], 2),)
    assert decide(WANTED, [], times, True, NOW + PREFER_OTHERS_SECONDS) == (Launch(SPOT, 2),)


def test_where_all_pools_are_dry_they_are_asked_again_soon_and_all_at_once() -> None:
    times = dry(SPOT[0]).after_request(SPOT[1:], NOW + 3).after_failure(SPOT[1:], NOW + 3)
    assert decide(WANTED, [], times, True, NOW + CHECK_SECONDS - 1) == ()
    assert decide(WANTED, [], times, True, NOW + CHECK_SECONDS) == (Launch(SPOT, 2),)


def test_a_pool_that_took_a_machine_back_is_asked_at_once_where_there_is_no_other() -> None:
    times = NO_TIMES.after_request(SPOT, NOW - 60).after_failure(SPOT, NOW)
    assert decide(WANTED, [], times, True, NOW) == (Launch(SPOT, 2),)


def test_where_no_market_has_capacity_both_are_asked_in_turn() -> None:
    wanted = DesiredFleet(1, "auto", (*SPOT, *DEAR))
    times = dry(*SPOT, *DEAR)
    assert decide(wanted, [], times, True, NOW + CHECK_SECONDS) == (Launch(SPOT, 1),)
    times = times.after_request(SPOT, NOW + CHECK_SECONDS)
    assert decide(wanted, [], times, True, NOW + CHECK_SECONDS) == (Launch(DEAR, 1),)


@pytest.mark.parametrize(
    ("times", "changed", "may_launch", "seconds"),
    [
        (dry(*SPOT), True, True, CHANGE_SECONDS),
        (dry(*SPOT, since=NOW - 3), False, True, CHECK_SECONDS - 3),
        (dry(*SPOT, since=NOW - 60), False, True, 0.0),
        (dry(*SPOT, since=NOW - 60), False, False, CHECK_SECONDS),
        (dry(SPOT[0]), False, True, 0.0),
    ],
)
def test_the_next_look_is_when_something_can_be_asked_for(
    times: PoolTimes, changed: bool, may_launch: bool, seconds: float
) -> None:
    assert next_check_seconds(WANTED, times, changed=changed, may_launch=may_launch, now=NOW) == seconds


def test_a_run_without_pools_is_looked_at_as_rarely_as_any() -> None:
    nowhere = DesiredFleet(1, "spot", ())
    assert next_check_seconds(nowhere, NO_TIMES, changed=False, may_launch=True, now=NOW) == CHECK_SECONDS


@pytest.mark.parametrize(
    ("policy", "unavailable", "requested"),
    [
        ("spot", (), SPOT),
        ("on-demand", (), DEAR),
        ("auto", (), SPOT),
        ("auto", SPOT[:1], SPOT[1:]),
        ("auto", SPOT, DEAR),
    ],
)
def test_on_demand_is_for_what_spot_cannot_give_where_the_job_allows_it(
    policy: str, unavailable: tuple[Pool, ...], requested: tuple[Pool, ...]
) -> None:
    wanted = DesiredFleet(2, policy, (*SPOT, *DEAR))  # type: ignore[arg-type]
    assert decide(wanted, FINE[:1], dry(*unavailable), True, NOW) == (Launch(requested, 1),)


def test_without_money_nothing_is_launched_and_what_is_useless_still_ends() -> None:
    lost = machine("i-2", workerless_since=NOW - 60)
    assert decide(WANTED, [lost], NO_TIMES, False, NOW) == (Terminate(("i-2",), "its worker is gone"),)


@pytest.mark.parametrize(
    ("launched", "unavailable", "now_dry"),
    [
        (2, (), ()),
        (2, SPOT[:1], SPOT[:1]),
        (1, SPOT[:1], SPOT[:1]),
        (0, (), SPOT),
        (1, DEAR[:1], SPOT),  # an error of a pool that was not asked
    ],
)
def test_pools_that_gave_less_are_dry(launched: int, unavailable: tuple[Pool, ...], now_dry: tuple[Pool, ...]) -> None:
    times = after_launch(NO_TIMES, Launch(SPOT, 2), launched, frozenset(unavailable), NOW)
    assert times.dry == dict.fromkeys(now_dry, NOW)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6))
def test_what_is_missing_is_what_is_launched(leaving: int, there: int, count: int) -> None:
    machines = [machine(f"l-{n}", leaving=True) for n in range(leaving)] + [machine(f"i-{n}") for n in range(there)]
    wanted = dataclasses.replace(WANTED, count=count)
    missing = missing_count(wanted, machines, NOW)
    assert missing == count - there
    assert decide(wanted, machines, NO_TIMES, True, NOW) == ((Launch(SPOT, missing),) if missing > 0 else ())


@pytest.mark.parametrize(
    ("spent", "idle", "left", "reason"),
    [
        (0.0, 0.0, 3600.0, ""),
        (4.99, 599.0, 421.0, ""),
        (0.0, 0.0, 419.0, "its deadline is near, by nodes.max_duration or the budget"),
        (5.0, 0.0, 3600.0, "its budget of $5.00 is used up"),
        (0.0, 601.0, 3600.0, "no node joined for 600 s"),
    ],
)
def test_a_run_stops_when_it_has_had_its_time_its_money_or_no_nodes(
    spent: float, idle: float, left: float, reason: str
) -> None:
    assert why_stop(Limits(NOW + left, 5.0, 600.0), spent, idle, NOW) == reason


def test_without_a_budget_money_stops_nothing() -> None:
    assert why_stop(Limits(NOW + 3600, None, 600.0), 1e9, 0.0, NOW) == ""
    refused = why_stop(Limits(NOW + 3600, None, 600.0), 0.0, 601.0, NOW, "AWS refuses CreateFleet: Odd")
    assert refused == "no node joined for 600 s (AWS refuses CreateFleet: Odd)"


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=8), st.integers(1, 6))
def test_after_what_is_decided_there_is_nothing_to_launch(kinds: list[tuple[bool, bool, bool]], count: int) -> None:
    wanted = dataclasses.replace(WANTED, count=count)
    there = [
        machine(f"i-{n}", leaving=leaving, at_risk=risky, workerless_since=NOW - 60 if lost else None)
        for n, (leaving, risky, lost) in enumerate(kinds)
    ]
    ended = {id_ for c in decide(wanted, there, NO_TIMES, True, NOW) if isinstance(c, Terminate) for id_ in c.ids}
    new = sum(c.count for c in decide(wanted, there, NO_TIMES, True, NOW) if isinstance(c, Launch))
    after = [m for m in there if m.id not in ended] + [machine(f"n-{n}") for n in range(new)]
    assert not any(isinstance(c, Launch) for c in decide(wanted, after, NO_TIMES, True, NOW))


def test_pauses_grow_up_to_a_bound_and_differ_between_heads() -> None:
    assert [pause_seconds(tries, 0.0) for tries in (0, 1, 2, 20)] == [0.5, 1.0, 2.0, REPEAT_SECONDS / 2]
    assert [pause_seconds(tries, 1.0) for tries in (0, 1, 2, 20)] == [1.0, 2.0, 4.0, REPEAT_SECONDS]
    assert pause_seconds(20, 0.5, longest=8.0) == 6.0
