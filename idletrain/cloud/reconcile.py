"""Decide which machines to launch and terminate: a pure function of the machines, the pools' capacity and the budget.

Uses no cloud and no clock. Repeated calls return the same commands until something has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from idletrain.cloud.machines import Pool
from idletrain.observe.cost import MOST_SPARES, must_stop

LONGEST_PAUSE_SECONDS = 60.0  # between repetitions of a request that the cloud does not answer
CHECK_SECONDS = 10.0  # between two looks at a whole fleet: six DescribeInstances calls a minute, however many nodes
CHANGE_SECONDS = 1.0  # until the next look after a change
CAPACITY_RETRY_SECONDS = 180.0  # Karpenter skips a pool without capacity for as long
ASK_AGAIN_SECONDS = 8.0  # between requests to pools without capacity: it is used within ten seconds of its return
NOTICE_LEFT_SECONDS = 420.0  # before the deadline: time to write the last snapshot and to take the fleet down
MACHINE_JOIN_SECONDS = 600.0  # an image of 1 GB over a slow link, and half as long again
LOST_SECONDS = 2.0  # without a worker after having had one: its process or machine is gone, or it is leaving


@dataclass(frozen=True)
class FleetMachine:
    """A node as the cloud and the run see it.

    Attributes:
        launched_at: Unix seconds.
        joined: Whether one of its workers ever joined.
        workerless_since: Unix seconds since when it has no worker, if it had one.
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
    unavailable: Mapping[Pool, float],
    may_launch: bool,
    now: float,
) -> tuple[FleetCommand, ...]:
    """Return the commands that bring the fleet to its requested size.

    Args:
        wanted: The nodes that the job requests.
        machines: Nodes that are pending or running.
        unavailable: Pools that give no machines now, and the Unix seconds until which they are skipped.
        may_launch: Whether the budget allows more machines.
        now: Unix seconds.
    """
    late = [m for m in machines if not m.joined and now - m.launched_at > MACHINE_JOIN_SECONDS]
    lost = [m for m in machines if m.workerless_since is not None and now - m.workerless_since > LOST_SECONDS]
    commands: list[FleetCommand] = []
    if late:
        commands.append(Terminate(_ids(late), f"no worker after {MACHINE_JOIN_SECONDS:.0f} s"))
    if lost:
        commands.append(Terminate(_ids(lost), "its worker is gone"))
    useful = [m for m in machines if not m.leaving and m not in late and m.workerless_since is None]
    spares = min(sum(m.at_risk for m in useful), MOST_SPARES)
    missing = wanted.count + spares - len(useful)
    pools = _available_pools(wanted, unavailable, now)
    if missing > 0 and may_launch and pools:
        commands.append(Launch(pools, missing))
    return tuple(commands)


def after_launch(requested: Launch, launched: int, unavailable: frozenset[Pool], now: float) -> dict[Pool, float]:
    """Return the pools to skip and until when; all requested ones where machines are missing without an error."""
    skipped = unavailable if unavailable or launched >= requested.count else frozenset(requested.pools)
    return dict.fromkeys(skipped, now + CAPACITY_RETRY_SECONDS)


def next_check_seconds(*, acted: bool, losing: bool, unavailable: Mapping[Pool, float], now: float) -> float:
    """Return the seconds until the fleet is looked at again, unless an event comes before.

    Args:
        acted: Whether something was launched or terminated now.
        losing: Whether a machine has lost its worker, and will be terminated soon.
        unavailable: Pools that give no machines now, and the Unix seconds until which they are skipped.
        now: Unix seconds.
    """
    if acted or losing:
        return CHANGE_SECONDS
    return ASK_AGAIN_SECONDS if any(until > now for until in unavailable.values()) else CHECK_SECONDS


def pause_seconds(tries: int, jitter: float, longest: float = LONGEST_PAUSE_SECONDS) -> float:
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


def _available_pools(wanted: DesiredFleet, unavailable: Mapping[Pool, float], now: float) -> tuple[Pool, ...]:
    """Return the pools of the market to use: spot while any has capacity, else on-demand where the job allows it.

    Where none has any, return those whose last request is `ASK_AGAIN_SECONDS` old: a longer wait gains nothing.
    """
    markets = {"spot": ("spot",), "on-demand": ("on-demand",), "auto": ("spot", "on-demand")}[wanted.policy]
    for early in (0.0, CAPACITY_RETRY_SECONDS - ASK_AGAIN_SECONDS):
        available = [pool for pool in wanted.pools if unavailable.get(pool, now) <= now + early]
        for market in markets:
            if pools := tuple(pool for pool in available if pool.market == market):
                return pools
    return ()


def _ids(machines: Sequence[FleetMachine]) -> tuple[str, ...]:
    return tuple(machine.id for machine in machines)
