"""Compute what a run's machines cost, from its events alone, and what they may cost, from its budget.

Pure: `now` is an argument, in Unix seconds. Of the events of `observe.records` these count most:

    instance_launched   instance, role, type, zone, market, usd_per_hour, on_demand_usd_per_hour
    instance_ended      instance, reason
    spot_price          type, zone, usd_per_hour
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CostEvent = Mapping[str, Any]
HOUR_SECONDS = 3600.0
TEARDOWN_SECONDS = 60.0  # from a run's end to its machines' end
MOST_SPARES = 1  # rebalance recommendations are noisy: half of the machines stay (aws-node-termination-handler #141)
BILLED_SECONDS = 60.0  # the least that EC2 bills for an instance (AWS, "Amazon EC2 On-Demand Pricing")
# Billed with every machine: the root disk of Amazon's ECS-optimized image at gp3's price (AWS price list,
# us-east-1, May 2025), and a public IPv4 address (AWS News Blog, July 2023; billed since February 2024).
DISK_GIB = 30
DISK_USD_PER_GIB_MONTH = 0.08
MONTH_HOURS = 730.0
PUBLIC_IPV4_USD_PER_HOUR = 0.005
EXTRAS_USD_PER_HOUR = DISK_GIB * DISK_USD_PER_GIB_MONTH / MONTH_HOURS + PUBLIC_IPV4_USD_PER_HOUR
STOP_LAUNCHING = 0.9  # share of a budget; the rest pays for the running machines while they finish
PREEMPTIONS = frozenset({"notice", "kill", "lease"})  # causes of `lost` that mean a preempted or silent node
PACE_ROUNDS = 10  # latest rounds from which the next ones' length is forecast, as fleets grow and shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class BillItem:
    """A machine's part of the bill.

    Attributes:
        seconds: Billed seconds.
        usd: Cost, with disk and address.
        on_demand_usd: Cost of the same machine on demand.
        usd_per_hour: Present price; 0 once the machine has ended.
    """

    instance: str
    role: str
    type: str
    zone: str
    market: str
    seconds: float
    usd: float
    on_demand_usd: float
    usd_per_hour: float


@dataclass(frozen=True)
class Bill:
    """A run's cost so far, machine by machine."""

    items: tuple[BillItem, ...]

    @property
    def spent_usd(self) -> float:
        """Cost of all machines."""
        return sum(item.usd for item in self.items)

    @property
    def on_demand_usd(self) -> float:
        """Cost of the same machines on demand."""
        return sum(item.on_demand_usd for item in self.items)

    @property
    def usd_per_hour(self) -> float:
        """Price of the running machines per hour."""
        return sum(item.usd_per_hour for item in self.items)

    @property
    def saving(self) -> float:
        """Share of the on-demand price that was saved."""
        return 1 - self.spent_usd / self.on_demand_usd if self.on_demand_usd else 0.0


def accrued(events: Iterable[CostEvent], now: float) -> Bill:
    """Return the bill at `now`; a machine without a recorded end counts until then."""
    recorded = list(events)
    launched, ended = bounds(recorded)
    prices: dict[tuple[str, str], list[CostEvent]] = {}
    for event in recorded:
        if event["kind"] == "spot_price":
            prices.setdefault((event["type"], event["zone"]), []).append(event)
    return Bill(
        tuple(
            _item(event, ended.get(instance), prices.get((event["type"], event["zone"]), ()), now)
            for instance, event in launched.items()
        )
    )


def bounds(events: Iterable[CostEvent]) -> tuple[dict[str, CostEvent], dict[str, float]]:
    """Return each machine's launch event, and the end times of those that have ended, by instance."""
    launched: dict[str, CostEvent] = {}
    ended: dict[str, float] = {}
    for event in events:
        if event["kind"] == "instance_launched":
            launched.setdefault(event["instance"], event)
        elif event["kind"] == "instance_ended":
            ended.setdefault(event["instance"], event["t"])
        elif event["kind"] == "run_ended":  # the head ends all machines, itself last, and cannot record that
            for instance in launched:
                ended.setdefault(instance, event["t"] + TEARDOWN_SECONDS)
    return launched, ended


def _item(launched: CostEvent, ended: float | None, changes: Sequence[CostEvent], now: float) -> BillItem:
    until = now if ended is None else min(ended, now)
    seconds = max(BILLED_SECONDS, until - launched["t"])
    on_demand = launched["on_demand_usd_per_hour"]
    price = on_demand if launched["usd_per_hour"] is None else launched["usd_per_hour"]
    price, on_demand = price or 0.0, (price or 0.0) if on_demand is None else on_demand
    usd, since, end = 0.0, launched["t"], launched["t"] + seconds
    for change in changes if launched["market"] == "spot" else ():
        if since <= change["t"] < end:
            usd += (change["t"] - since) / HOUR_SECONDS * price
            since, price = change["t"], change["usd_per_hour"]
    usd += (end - since) / HOUR_SECONDS * price
    return BillItem(
        instance=launched["instance"],
        role=launched["role"],
        type=launched["type"],
        zone=launched["zone"],
        market=launched["market"],
        seconds=seconds,
        usd=usd + seconds / HOUR_SECONDS * EXTRAS_USD_PER_HOUR,
        on_demand_usd=seconds / HOUR_SECONDS * (on_demand + EXTRAS_USD_PER_HOUR),
        usd_per_hour=0.0 if ended is not None and ended <= now else price + EXTRAS_USD_PER_HOUR,
    )


def wasted_usd(events: Sequence[CostEvent], now: float) -> float:
    """Return the cost of steps lost to preemption: their time at the nodes' mean speed, at the nodes' mean price.

    It is 0 before the first staged update, as the speed is not known, and never more than the nodes' cost.
    """
    nodes = [item for item in accrued(events, now).items if item.role == "worker"]
    spent, seconds = sum(item.usd for item in nodes), sum(item.seconds for item in nodes)
    lost = [event for event in events if event["kind"] == "lost"]
    staged = [event for event in events if event["kind"] == "staged"]
    steps = sum(event["steps"] for event in staged)
    if not steps or not seconds:
        return 0.0
    # A staged update counts all of its steps but only the last attempt's seconds; `lost` events hold the others.
    trained = sum(e["train_seconds"] for e in staged) + sum(e["kept_seconds"] for e in lost)
    lost_steps = sum(event["lost_steps"] for event in lost if event["cause"] in PREEMPTIONS)
    return min(spent, float(lost_steps * (trained / steps) * (spent / seconds)))


def forecast_usd(events: Sequence[CostEvent], now: float) -> float | None:
    """Forecast the run's cost after its last round, at its present speed and price; None before the first commit.

    A target accuracy may end the run earlier.
    """
    bill = accrued(events, now)
    if any(event["kind"] == "run_ended" for event in events):
        return bill.spent_usd
    committed = [event for event in events if event["kind"] == "round_committed"]
    totals = [event["rounds"] for event in events if event["kind"] == "run_started"]
    if not committed or not totals:
        return None
    pace_seconds = statistics.mean(event["seconds"] for event in committed[-PACE_ROUNDS:])
    hours_left: float = max(0, totals[-1] - (committed[-1]["round"] + 1)) * pace_seconds / HOUR_SECONDS
    return bill.spent_usd + bill.usd_per_hour * hours_left


def deadline_seconds(budget_usd: float | None, worst_usd_per_hour: float, max_duration_seconds: float) -> float:
    """Return the longest lifetime of machines that keeps a budget even if nothing is left to stop them.

    Args:
        budget_usd: The rest of the budget; None without one.
        worst_usd_per_hour: The most that the whole fleet, head included, can cost.
        max_duration_seconds: The longest lifetime at any price.
    """
    if budget_usd is None or worst_usd_per_hour <= 0:
        return max_duration_seconds
    return min(max_duration_seconds, max(0.0, budget_usd) / worst_usd_per_hour * HOUR_SECONDS)


def launches_allowed(spent_usd: float, budget_usd: float | None) -> bool:
    """Return whether the budget allows to launch more machines."""
    return budget_usd is None or spent_usd < STOP_LAUNCHING * budget_usd


def must_stop(spent_usd: float, budget_usd: float | None) -> bool:
    """Return whether the budget is used up."""
    return budget_usd is not None and spent_usd >= budget_usd
