"""Bills follow from events alone, budgets hold whatever prices do, and a budget too small is refused with a sum."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.observe.cost import (
    EXTRAS_USD_PER_HOUR,
    accrued,
    deadline_seconds,
    forecast_usd,
    launches_allowed,
    must_stop,
    wasted_usd,
)

HOUR = 3600.0
START = 1_700_000_000.0


def launched(instance: str, t: float = START, price: float | None = 0.10, **fields: Any) -> dict[str, Any]:
    event = {"kind": "instance_launched", "t": t, "instance": instance, "role": "worker", "type": "m7i.large"}
    event |= {"zone": "eu-west-1a", "market": "spot", "usd_per_hour": price, "on_demand_usd_per_hour": 0.30}
    return event | fields


def ended(instance: str, t: float) -> dict[str, Any]:
    return {"kind": "instance_ended", "t": t, "instance": instance, "reason": "Server.SpotInstanceTermination"}


def lost(steps: int, cause: str = "kill", kept_seconds: float = 0.0) -> dict[str, Any]:
    return {"kind": "lost", "t": START, "cause": cause, "lost_steps": steps, "kept_seconds": kept_seconds}


def staged(steps: int, train_seconds: float) -> dict[str, Any]:
    return {"kind": "staged", "t": START, "steps": steps, "train_seconds": train_seconds}


# --- the bill ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "now", "seconds"),
    [
        ([launched("a")], START, [60]),
        ([launched("a")], START + 59, [60]),
        ([launched("a")], START + HOUR, [3600]),
        ([launched("a")], START - 10, [60]),  # a clock that runs late
        ([launched("a"), ended("a", START + 90)], START + HOUR, [90]),
        ([launched("a"), ended("a", START + 5)], START + HOUR, [60]),
        ([launched("a"), ended("a", START - 5)], START + HOUR, [60]),
        ([launched("a"), ended("a", START + 90)], START + 70, [70]),  # asked about a time before its end
        ([launched("a"), launched("b", START + 100)], START + 300, [300, 200]),
        ([launched("a"), launched("a", START + 100)], START + 300, [300]),  # a new head found it again
        ([launched("a"), ended("a", START + 90), ended("a", START + 200)], START + 300, [90]),
        ([ended("stranger", START + 90)], START + 300, []),
        ([{"kind": "leased", "t": START}, launched("a")], START + 100, [100]),
        ([], START, []),
    ],
)
def test_billed_seconds(events: list[dict[str, Any]], now: float, seconds: list[float]) -> None:
    assert [item.seconds for item in accrued(events, now).items] == seconds


def repriced(t: float, price: float, zone: str = "eu-west-1a") -> dict[str, Any]:
    return {"kind": "spot_price", "t": t, "type": "m7i.large", "zone": zone, "usd_per_hour": price}


def test_a_spot_machine_costs_what_the_market_asks_at_each_time() -> None:
    events = [
        launched("a"),
        repriced(START + HOUR / 2, 0.20),
        repriced(START + HOUR, 0.40),
        ended("a", START + 2 * HOUR),
    ]
    bill = accrued(events, START + 3 * HOUR)
    assert bill.spent_usd == pytest.approx(0.05 + 0.10 + 0.40 + 2 * EXTRAS_USD_PER_HOUR)
    assert accrued(events, START + 0.75 * HOUR).usd_per_hour == pytest.approx(0.20 + EXTRAS_USD_PER_HOUR)
    assert bill.on_demand_usd == pytest.approx(0.60 + 2 * EXTRAS_USD_PER_HOUR)


@pytest.mark.parametrize(
    ("machine", "change"),
    [
        (launched("a"), repriced(START - 1, 0.20)),  # it was launched at its price of then
        (launched("a"), repriced(START + HOUR, 0.20)),
        (launched("a"), repriced(START + 10, 0.20, zone="eu-west-1b")),
        (launched("a", market="on-demand"), repriced(START + 10, 0.20)),
    ],
)
def test_prices_before_behind_and_beside_a_machine_do_not_count(machine: Any, change: Any) -> None:
    end = ended("a", START + HOUR)
    assert accrued([change, machine, end], START + HOUR) == accrued([machine, end], START + HOUR)


def test_an_hour_of_a_fleet() -> None:
    head = launched("h", price=0.04, role="head", market="on-demand", on_demand_usd_per_hour=0.04)
    bill = accrued([head, launched("a"), launched("b"), ended("b", START + HOUR / 2)], START + HOUR)
    assert bill.spent_usd == pytest.approx(0.04 + 0.10 + 0.05 + 2.5 * EXTRAS_USD_PER_HOUR)
    assert bill.on_demand_usd == pytest.approx(0.04 + 0.30 + 0.15 + 2.5 * EXTRAS_USD_PER_HOUR)
    assert bill.usd_per_hour == pytest.approx(0.04 + 0.10 + 2 * EXTRAS_USD_PER_HOUR)
    assert bill.saving == pytest.approx(1 - bill.spent_usd / bill.on_demand_usd)
    assert [item.role for item in bill.items] == ["head", "worker", "worker"]


def test_a_bill_of_nothing() -> None:
    bill = accrued([], START)
    assert (bill.spent_usd, bill.on_demand_usd, bill.usd_per_hour, bill.saving) == (0, 0, 0, 0)


def test_disk_and_address_cost_what_they_cost_in_a_month() -> None:
    assert pytest.approx(30 * 0.08 + 730 * 0.005) == EXTRAS_USD_PER_HOUR * 730


@pytest.mark.parametrize(
    ("paid", "on_demand", "spent", "equivalent"),
    [(0.1, None, 0.1, 0.1), (None, 0.3, 0.3, 0.3), (None, None, 0.0, 0.0), (0.1, 0.3, 0.1, 0.3)],
)
def test_an_unknown_price_is_taken_from_the_known_one(
    paid: float | None, on_demand: float | None, spent: float, equivalent: float
) -> None:
    bill = accrued([launched("a", price=paid, on_demand_usd_per_hour=on_demand)], START + HOUR)
    assert bill.spent_usd == pytest.approx(spent + EXTRAS_USD_PER_HOUR)
    assert bill.on_demand_usd == pytest.approx(equivalent + EXTRAS_USD_PER_HOUR)


times = st.floats(START, START + 10 * HOUR)
prices = st.floats(0.001, 100)


@st.composite
def fleets(draw: st.DrawFn, prefix: str = "i") -> list[dict[str, Any]]:
    events = []
    for n in range(draw(st.integers(0, 5))):
        events.append(launched(f"{prefix}-{n}", draw(times), draw(prices)))
        if draw(st.booleans()):
            events.append(ended(f"{prefix}-{n}", draw(times)))
    return events


@given(events=fleets(), now=times, later=st.floats(0, 10 * HOUR))
def test_a_bill_is_never_negative_and_never_falls_with_time(
    events: list[dict[str, Any]], now: float, later: float
) -> None:
    early, late = accrued(events, now), accrued(events, now + later)
    assert 0 <= early.spent_usd <= late.spent_usd
    assert 0 <= early.on_demand_usd <= late.on_demand_usd
    assert late.usd_per_hour >= 0
    # Nothing is launched meanwhile: the price an hour can only fall, and bounds what the time between cost.
    started = [event for event in events if event["kind"] == "instance_launched"]
    rate = sum(event["usd_per_hour"] + EXTRAS_USD_PER_HOUR for event in started)
    assert late.spent_usd - early.spent_usd <= rate * later / HOUR + 1e-6


@given(one=fleets("a"), other=fleets("b"), now=times)
def test_bills_add_up(one: list[dict[str, Any]], other: list[dict[str, Any]], now: float) -> None:
    both = accrued(one + other, now)
    assert both.spent_usd == pytest.approx(accrued(one, now).spent_usd + accrued(other, now).spent_usd)
    assert both.usd_per_hour == pytest.approx(accrued(one, now).usd_per_hour + accrued(other, now).usd_per_hour)


# --- what preemption wasted --------------------------------------------------------------------------------------


def test_lost_steps_cost_their_time_on_an_average_node() -> None:
    events = [launched("a", price=0.1), launched("b", price=0.3), staged(100, 50.0), lost(20), lost(4, "lease")]
    average = 0.2 + EXTRAS_USD_PER_HOUR
    assert wasted_usd(events, START + HOUR) == pytest.approx(24 * 0.5 * average / HOUR)


def test_seconds_whose_steps_were_kept_count_for_the_pace() -> None:
    events = [launched("a"), lost(10, kept_seconds=20.0), staged(100, 80.0)]
    assert wasted_usd(events, START + HOUR) == pytest.approx(10 * (0.1 + EXTRAS_USD_PER_HOUR) / HOUR)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [lost(10), staged(100, 50.0)],  # local nodes cost nothing
        [launched("a"), lost(10)],  # no pace yet
        [launched("a"), staged(100, 50.0)],
        [launched("a"), staged(100, 50.0), lost(10, "error"), lost(10, "refused"), lost(10, "closed")],
        [launched("h", role="head"), staged(100, 50.0), lost(10)],
    ],
)
def test_nothing_is_wasted(events: list[dict[str, Any]]) -> None:
    assert wasted_usd(events, START + HOUR) == 0


@given(
    events=fleets(),
    losses=st.lists(st.integers(0, 10**6), max_size=5),
    steps=st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1000)), max_size=5),
    now=times,
)
def test_waste_is_part_of_what_was_spent(
    events: list[dict[str, Any]], losses: list[int], steps: list[tuple[int, float]], now: float
) -> None:
    events = [*events, *map(lost, losses), *(staged(*step) for step in steps)]
    assert 0 <= wasted_usd(events, now) <= accrued(events, now).spent_usd


# --- the forecast ------------------------------------------------------------------------------------------------


def committed(round_: int, seconds: float) -> dict[str, Any]:
    return {"kind": "round_committed", "t": START, "round": round_, "seconds": seconds}


def test_a_forecast_goes_on_at_the_present_pace_and_price() -> None:
    events = [{"kind": "run_started", "t": START, "rounds": 100}, launched("a"), launched("b"), ended("b", START + 60)]
    events += [committed(n, 999.0 if n < 10 else 36.0) for n in range(20)]
    spent = accrued(events, START + HOUR).spent_usd
    expected = spent + 80 * 36 / HOUR * (0.1 + EXTRAS_USD_PER_HOUR)
    assert forecast_usd(events, START + HOUR) == pytest.approx(expected)


def test_there_is_no_forecast_before_a_round_is_done() -> None:
    assert forecast_usd([{"kind": "run_started", "t": START, "rounds": 9}, launched("a")], START + HOUR) is None
    assert forecast_usd([launched("a")], START + HOUR) is None


def test_the_forecast_of_a_run_that_ended_is_its_bill() -> None:
    events = [{"kind": "run_started", "t": START, "rounds": 9}, launched("a"), committed(0, 10.0)]
    events += [ended("a", START + 500), {"kind": "run_ended", "t": START + 400}]
    assert forecast_usd(events, START + HOUR) == accrued(events, START + HOUR).spent_usd


# --- the budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "worst", "longest", "seconds"),
    [
        (None, 2.0, 4 * HOUR, 4 * HOUR),
        (100.0, 2.0, 4 * HOUR, 4 * HOUR),
        (2.0, 2.0, 4 * HOUR, HOUR),
        (1.0, 2.0, 4 * HOUR, HOUR / 2),
        (0.0, 2.0, 4 * HOUR, 0.0),
        (-1.0, 2.0, 4 * HOUR, 0.0),  # overspent
        (1.0, 0.0, 4 * HOUR, 4 * HOUR),  # machines for nothing
    ],
)
def test_how_long_machines_may_live(budget: float | None, worst: float, longest: float, seconds: float) -> None:
    assert deadline_seconds(budget, worst, longest) == pytest.approx(seconds)


@given(
    budget=st.floats(0.01, 1e4),
    worst=st.floats(0.01, 1e3),
    moments=st.lists(st.tuples(st.floats(0, 2 * HOUR), st.floats(0, 1)), max_size=8),
)
def test_a_budget_holds_if_everybody_dies_after_any_launch(
    budget: float, worst: float, moments: list[tuple[float, float]]
) -> None:
    """Machines are launched now and then, with what is left at that time; prices stay at or below the worst."""
    spent, now, latest = 0.0, 0.0, deadline_seconds(budget, worst, 100 * HOUR)
    for wait, price in moments:
        passed = min(wait, max(0.0, latest - now))
        spent, now = spent + price * worst * passed / HOUR, now + passed
        latest = max(latest, now + deadline_seconds(budget - spent, worst, 100 * HOUR))
        assert spent + worst * (latest - now) / HOUR <= budget * (1 + 1e-9)


@pytest.mark.parametrize(
    ("spent", "budget", "launches", "stop"),
    [
        (0.0, 1.0, True, False),
        (0.89, 1.0, True, False),
        (0.9, 1.0, False, False),
        (0.99, 1.0, False, False),
        (1.0, 1.0, False, True),
        (2.0, 1.0, False, True),
        (1e9, None, True, False),
    ],
)
def test_a_budget_stops_launches_first_and_then_the_run(
    spent: float, budget: float | None, launches: bool, stop: bool
) -> None:
    assert launches_allowed(spent, budget) is launches
    assert must_stop(spent, budget) is stop
