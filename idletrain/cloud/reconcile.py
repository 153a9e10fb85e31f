"""Decide which machines to launch and terminate: a pure function of the machines, the pools' capacity and the budget.

Uses no cloud and no clock. Repeated calls return the same commands until something has changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from idletrain.cloud.machines import Pool
from idletrain.observe.cost import MOST_SPARES, must_stop

# Between two looks at a fleet, and between two requests to pools without capacity: what comes back is asked for within
# ten seconds, three of them for the calls themselves. Where they are answered, that is some 515 of DescribeInstances an
# hour, and where nodes are missing as many of CreateFleet; twice as many where neither spot nor on-demand has capacity.
CHECK_SECONDS = 7.0
REPEAT_SECONDS = 4.0  # the longest pause before a call without an answer is repeated: it leaves time to ask two markets
CHANGE_SECONDS = 1.0  # until the next look after a change
PREFER_OTHERS_SECONDS = 180.0  # after a pool had no capacity: Karpenter skips it for as long
NOTICE_LEFT_SECONDS = 420.0  # before the deadline: time to write the last snapshot and to take the fleet down
MACHINE_JOIN_SECONDS = 600.0  # an image of 1 GB over a slow link, and half as long again
LOST_SECONDS = 2.0  # without a worker after having had one: its process or machine is gone, or it is leaving


@dataclass(frozen=True)
class FleetMachine:
    """A node as the cloud and the run see it.

    Attributes:
        launched_at: When it was launched, in seconds.
        joined: Whether one of its workers ever joined.
        workerless_since: Since when it has no worker, in seconds, if it had one.
        leaving: Whether it got an interruption notice.
        at_risk: Whether it got a rebalance recommendation.
    """

    id: str
    pool: Pool
    launched_at: float
    joined: bool = False
    workerless_since: float | None = None
    leaving: bool = False
    at_risk: bool = False


@dataclass(frozen=True)
class DesiredFleet:
    """The nodes that the job requests.

    Attributes:
        count: Number of nodes.
        policy: Which markets they may come from.
        pools: Where nodes may come from, the best first, of both markets where the job allows both.
    """

    count: int
    policy: Literal["spot", "on-demand", "auto"]
    pools: tuple[Pool, ...]


@dataclass(frozen=True)
class PoolTimes:
    """When pools were requested, and when they had no machines, in seconds.

    Attributes:
        requested: When each pool's machines were last requested.
        dry: When it last had none, or took one back; others are preferred for `PREFER_OTHERS_SECONDS`.
    """

    requested: Mapping[Pool, float] = field(default_factory=dict)
    dry: Mapping[Pool, float] = field(default_factory=dict)

    def after_request(self, pools: Collection[Pool], now: float) -> PoolTimes:
        """Return the times after a request to these pools."""
        return PoolTimes({**self.requested, **dict.fromkeys(pools, now)}, self.dry)

    def after_failure(self, pools: Collection[Pool], now: float) -> PoolTimes:
        """Return the times once these pools had no machine, or took one back."""
        return PoolTimes(self.requested, {**self.dry, **dict.fromkeys(pools, now)})

    def due(self, pool: Pool) -> float:
        """Return from when on a pool may be requested again although it was dry."""
        return self.requested.get(pool, 0.0) + CHECK_SECONDS if pool in self.dry else 0.0


@dataclass(frozen=True)
class Launch:
    """Launch machines of one market."""

    pools: tuple[Pool, ...]
    count: int


@dataclass(frozen=True)
class Terminate:
    """Terminate machines that are of no use."""

    ids: tuple[str, ...]
    why: str


FleetCommand = Launch | Terminate


def decide(
    wanted: DesiredFleet,
    machines: Sequence[FleetMachine],
    times: PoolTimes,
    may_launch: bool,
    now: float,
) -> tuple[FleetCommand, ...]:
    """Return the commands that bring the fleet to its requested size, the most urgent first.

    Args:
        wanted: The nodes that the job requests.
        machines: Nodes that are pending or running.
        times: When pools were requested, and when they had no machines.
        may_launch: Whether the budget allows more machines.
        now: Seconds, of the clock that the other times are of.
    """
    late, lost = _late(machines, now), _lost(machines, now)
    commands: list[FleetCommand] = []
    missing = missing_count(wanted, machines, now)
    pools = _pools_to_ask(wanted, times, now)
    if missing > 0 and may_launch and pools:
        commands.append(Launch(pools, missing))
    if late:
        commands.append(Terminate(_ids(late), f"no worker after {MACHINE_JOIN_SECONDS:.0f} s"))
    if lost:
        commands.append(Terminate(_ids(lost), "its worker is gone"))
    return tuple(commands)


def missing_count(wanted: DesiredFleet, machines: Sequence[FleetMachine], now: float) -> int:
    """Return how many nodes are missing, spares for machines at risk included; negative where there are too many.

    Args:
        wanted: The nodes that the job requests.
        machines: Nodes that are pending or running.
        now: Seconds, of the clock that the other times are of.
    """
    late = _late(machines, now)
    useful = [m for m in machines if not m.leaving and m not in late and m.workerless_since is None]
    spares = min(sum(m.at_risk for m in useful), MOST_SPARES)
    return wanted.count + spares - len(useful)


def after_launch(
    times: PoolTimes, requested: Launch, launched: int, unavailable: frozenset[Pool], now: float
) -> PoolTimes:
    """Return the times after an answer; where machines are missing, at least one of the requested pools is dry: those
    that reported an error, or all.

    Args:
        times: Those before.
        requested: What was asked for.
        launched: How many machines there are of it.
        unavailable: The pools that reported an error.
        now: Seconds, at the answer.
    """
    failed = unavailable.intersection(requested.pools)
    return times.after_failure(failed if failed or launched >= requested.count else requested.pools, now)


def next_check_seconds(wanted: DesiredFleet, times: PoolTimes, *, changed: bool, may_launch: bool, now: float) -> float:
    """Return the seconds until the fleet is looked at again, unless an event comes before.

    Args:
        wanted: The nodes that the job requests.
        times: When pools were requested, and when they had no machines.
        changed: Whether something was launched or terminated now, or is going to be in a moment.
        may_launch: Whether nodes are missing and the budget allows them.
        now: Seconds, of the clock that the other times are of.
    """
    if changed:
        return CHANGE_SECONDS
    dues = [times.due(pool) for pools in _by_market(wanted) for pool in pools]
    if not may_launch or not dues:
        return CHECK_SECONDS
    return min(max(min(dues) - now, 0.0), CHECK_SECONDS)


def pause_seconds(tries: int, jitter: float, longest: float = REPEAT_SECONDS) -> float:
    """Return how long to wait before a request is repeated: longer after each try, and never for all at the same time.

    Args:
        tries: How often it was repeated before.
        jitter: A random number in [0, 1).
        longest: Bound of the pause, in seconds.
    """
    return float(min(longest, 2**tries) * (1 + jitter) / 2)


@dataclass(frozen=True)
class Limits:
    """Limits that stop a run; it can be resumed later.

    Attributes:
        deadline: When its machines end by themselves; Unix seconds.
        budget_usd: What the run may cost, or None.
        idle_seconds: How long it waits without a single worker.
    """

    deadline: float
    budget_usd: float | None
    idle_seconds: float


def why_stop(limits: Limits, spent_usd: float, idle_seconds: float, now: float, refusal: str = "") -> str:
    """Return why a run has to stop now, as a phrase, or an empty string.

    Args:
        limits: What stops the run.
        spent_usd: What it has cost so far.
        idle_seconds: How long it has had no worker.
        now: Unix seconds.
        refusal: Why nodes are missing, in the cloud's words, if it says so.
    """
    if now > limits.deadline - NOTICE_LEFT_SECONDS:
        return "its deadline is near, by nodes.max_duration or the budget"
    if must_stop(spent_usd, limits.budget_usd):
        return f"its budget of ${limits.budget_usd:.2f} is used up"
    if idle_seconds > limits.idle_seconds:
        return f"no node joined for {limits.idle_seconds:.0f} s" + (f" ({refusal})" if refusal else "")
    return ""


def _pools_to_ask(wanted: DesiredFleet, times: PoolTimes, now: float) -> tuple[Pool, ...]:
    """Return the pools of one market: spot while any has capacity, else on-demand where the job allows it.

    Where none has any, return all of the first market that has one due: if each were asked when its own time comes,
    those of one market could keep the other waiting for ever.
    """
    by_market = _by_market(wanted)
    for pools in by_market:
        if fresh := tuple(pool for pool in pools if now - times.dry.get(pool, -math.inf) >= PREFER_OTHERS_SECONDS):
            return fresh
    return next((pools for pools in by_market if any(times.due(pool) <= now for pool in pools)), ())


def _by_market(wanted: DesiredFleet) -> list[tuple[Pool, ...]]:
    """Return the pools of each market that the job allows, the one to prefer first."""
    markets = {"spot": ("spot",), "on-demand": ("on-demand",), "auto": ("spot", "on-demand")}[wanted.policy]
    return [tuple(pool for pool in wanted.pools if pool.market == market) for market in markets]


def _late(machines: Sequence[FleetMachine], now: float) -> list[FleetMachine]:
    return [m for m in machines if not m.joined and now - m.launched_at > MACHINE_JOIN_SECONDS]


def _lost(machines: Sequence[FleetMachine], now: float) -> list[FleetMachine]:
    return [m for m in machines if m.workerless_since is not None and now - m.workerless_since > LOST_SECONDS]


def _ids(machines: Sequence[FleetMachine]) -> tuple[str, ...]:
    return tuple(machine.id for machine in machines)
