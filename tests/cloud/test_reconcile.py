"""What a fleet lacks, as tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.cloud.machines import Pool
from idletrain.cloud.reconcile import (
    ASK_AGAIN_SECONDS,
    CAPACITY_RETRY_SECONDS,
    LONGEST_PAUSE_SECONDS,
    LOST_SECONDS,
    MACHINE_JOIN_SECONDS,
    DesiredFleet,
    FleetMachine,
    Launch,
    Limits,
    Terminate,
    after_launch,
    decide,
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


FINE = [machine("i-1"), machine("i-2")]


def test_a_fleet_that_is_whole_needs_nothing() -> None:
    assert decide(WANTED, FINE, {}, True, NOW) == ()


def test_what_is_missing_is_asked_for_in_all_pools() -> None:
    assert decide(WANTED, [], {}, True, NOW) == (Launch(SPOT, 2),)
    assert decide(WANTED, FINE[:1], {}, True, NOW) == (Launch(SPOT, 1),)


def test_machines_that_boot_count_until_they_have_had_their_time() -> None:
    booting = [machine("i-1", joined=False), machine("i-2", joined=False)]
    assert decide(WANTED, booting, {}, True, NOW) == ()
    late = machine("i-2", joined=False, launched_at=NOW - MACHINE_JOIN_SECONDS - 1)
    assert decide(WANTED, [FINE[0], late], {}, True, NOW) == (
        Terminate(("i-2",), f"no worker after {MACHINE_JOIN_SECONDS:.0f} s"),
        Launch(SPOT, 1),
    )


def test_a_noticed_machine_is_replaced_before_it_is_gone_and_not_ended_by_us() -> None:
    assert decide(WANTED, [FINE[0], machine("i-2", leaving=True)], {}, True, NOW) == (Launch(SPOT, 1),)


def test_a_machine_at_risk_stays_and_gets_a_spare_once() -> None:
    risky = machine("i-2", at_risk=True)
    assert decide(WANTED, [FINE[0], risky], {}, True, NOW) == (Launch(SPOT, 1),)
    assert decide(WANTED, [FINE[0], risky, machine("i-3")], {}, True, NOW) == ()
    risky_too = machine("i-3", at_risk=True)
    assert decide(WANTED, [machine("i-1", at_risk=True), risky, risky_too], {}, True, NOW) == ()


def test_a_machine_without_a_worker_is_replaced_at_once_and_ended_soon() -> None:
    just = machine("i-2", workerless_since=NOW - 0.1)
    assert decide(WANTED, [FINE[0], just], {}, True, NOW) == (Launch(SPOT, 1),)
    lost = machine("i-2", workerless_since=NOW - LOST_SECONDS - 0.1)
    assert decide(WANTED, [FINE[0], lost, machine("i-3")], {}, True, NOW) == (
        Terminate(("i-2",), "its worker is gone"),
    )


def test_dry_pools_are_left_out_until_their_time_is_over() -> None:
    unavailable = {SPOT[0]: NOW + 1}
    assert decide(WANTED, [], unavailable, True, NOW) == (Launch(SPOT[1:], 2),)
    assert decide(WANTED, [], unavailable, True, NOW + 2) == (Launch(SPOT, 2),)
    asked_now = dict.fromkeys(SPOT, NOW + CAPACITY_RETRY_SECONDS)
    assert decide(WANTED, [], asked_now, True, NOW) == ()
    assert decide(WANTED, [], asked_now, True, NOW + ASK_AGAIN_SECONDS) == (Launch(SPOT, 2),)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 9))
def test_capacity_that_is_there_is_asked_for_within_ten_seconds(spans: list[int], offset: int) -> None:
    """A pool without capacity and with it, in turn, for so many seconds each; nobody keeps what it gives."""
    borders = [NOW + offset + sum(spans[:k]) for k in range(len(spans) + 1)]
    asked, unavailable, now = list[float](), dict[Pool, float](), NOW
    while now < borders[-1] + 60:
        commands = decide(DesiredFleet(1, "spot", SPOT[:1]), [], unavailable, True, now)
        for launch in commands:
            assert isinstance(launch, Launch)
            asked.append(now)
            there = sum(border <= now for border in borders) % 2 == 0
            unavailable |= after_launch(launch, int(there), frozenset() if there else frozenset(SPOT[:1]), now)
        now += next_check_seconds(acted=bool(commands), losing=False, unavailable=unavailable, now=now)
    for begin, end in zip(borders[1::2], borders[2::2], strict=False):
        if end - begin >= 10:
            assert any(begin <= at < begin + 10 for at in asked)


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
    assert decide(wanted, FINE[:1], dict.fromkeys(unavailable, NOW + 1), True, NOW) == (Launch(requested, 1),)


def test_without_money_nothing_is_launched_and_what_is_useless_still_ends() -> None:
    lost = machine("i-2", workerless_since=NOW - 60)
    assert decide(WANTED, [lost], {}, False, NOW) == (Terminate(("i-2",), "its worker is gone"),)


def test_pools_that_gave_less_are_dry_for_a_while() -> None:
    requested = Launch(SPOT, 2)
    assert after_launch(requested, 2, frozenset(), NOW) == {}
    assert after_launch(requested, 1, frozenset(SPOT[:1]), NOW) == {SPOT[0]: NOW + CAPACITY_RETRY_SECONDS}
    assert after_launch(requested, 0, frozenset(), NOW) == dict.fromkeys(SPOT, NOW + CAPACITY_RETRY_SECONDS)


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
    ended = {id_ for c in decide(wanted, there, {}, True, NOW) if isinstance(c, Terminate) for id_ in c.ids}
    new = sum(c.count for c in decide(wanted, there, {}, True, NOW) if isinstance(c, Launch))
    after = [m for m in there if m.id not in ended] + [machine(f"n-{n}") for n in range(new)]
    assert not any(isinstance(c, Launch) for c in decide(wanted, after, {}, True, NOW))


def test_pauses_grow_up_to_a_bound_and_differ_between_heads() -> None:
    assert [pause_seconds(tries, 0.0) for tries in (0, 1, 2, 20)] == [0.5, 1.0, 2.0, LONGEST_PAUSE_SECONDS / 2]
    assert [pause_seconds(tries, 1.0) for tries in (0, 1, 2, 20)] == [1.0, 2.0, 4.0, LONGEST_PAUSE_SECONDS]
    assert pause_seconds(20, 0.5, longest=8.0) == 6.0
