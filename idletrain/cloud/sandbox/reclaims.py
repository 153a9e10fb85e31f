"""Decide when the cloud reclaims which spot instance: periodically, or by a recorded trace. Pure: time and instances
are arguments, so that every rehearsal can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from idletrain.simulation.trace import TraceChange


@dataclass(frozen=True, slots=True)
class Reclaim:
    """One instance is reclaimed, with a notice or at once."""

    instance: str
    notice: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicReclaims:
    """Periodic reclaims, by turns with a notice and without.

    Attributes:
        next_at: Time of the next one, in seconds since the cloud began.
        reclaimed: Number of reclaims so far.
    """

    every_seconds: float
    next_at: float
    reclaimed: int = 0


@dataclass(frozen=True, slots=True)
class Tenure:
    """The instance that represents each node of a trace, and the number of reclaims so far."""

    held: Mapping[str, str]
    reclaimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimPolicy:
    """A cloud's rules for reclaiming nodes.

    Attributes:
        periodic: Periodic reclaims, or None.
        trace: Recorded trace, or empty; it begins with its first node.
        speed: Seconds of the trace that pass in one second.
        tenure: Which instance represents which node.
    """

    periodic: PeriodicReclaims | None = None
    trace: tuple[TraceChange, ...] = ()
    speed: float = 1.0
    tenure: Tenure = Tenure({})


@dataclass(frozen=True, slots=True)
class ReclaimStep:
    """The market's next actions.

    Attributes:
        reclaims: Instances that are reclaimed.
        capacity: How many spot instances may run, or None for no limit.
    """

    reclaims: tuple[Reclaim, ...]
    capacity: int | None


def next_reclaims(
    market: ReclaimPolicy, seconds: float, oldest_first: Sequence[str]
) -> tuple[ReclaimPolicy, ReclaimStep]:
    """Return the policy's next state and what the market does now.

    Args:
        market: The policy's present state.
        seconds: Seconds since the cloud began.
        oldest_first: Running spot instances that have no notice yet, the oldest first.
    """
    reclaimed: tuple[Reclaim, ...] = ()
    capacity = None
    if market.periodic:
        periodic, reclaimed = periodic_reclaims(market.periodic, seconds, oldest_first)
        market = replace(market, periodic=periodic)
    if market.trace:
        nodes = nodes_present(market.trace, market.trace[0].at_ms + 1000 * seconds * market.speed)
        capacity = len(nodes)
        left = [id_ for id_ in oldest_first if all(id_ != reclaim.instance for reclaim in reclaimed)]
        tenure, by_trace = trace_reclaims(market.tenure, nodes, left)
        market, reclaimed = replace(market, tenure=tenure), reclaimed + by_trace
    return market, ReclaimStep(reclaimed, capacity)


def periodic_reclaims(
    periodic: PeriodicReclaims, now: float, oldest_first: Sequence[str]
) -> tuple[PeriodicReclaims, tuple[Reclaim, ...]]:
    """Reclaim the oldest instance if it is time; if there is none, wait for the next time without counting a turn.

    Args:
        periodic: The present state.
        now: The time, on the clock of `next_at`.
        oldest_first: Running spot instances that have no notice yet, the oldest first.
    """
    if now < periodic.next_at:
        return periodic, ()
    periodic = replace(periodic, next_at=max(periodic.next_at + periodic.every_seconds, now))
    if not oldest_first:
        return periodic, ()
    return replace(periodic, reclaimed=periodic.reclaimed + 1), (
        Reclaim(oldest_first[0], _with_notice(periodic.reclaimed)),
    )


def nodes_present(trace: Sequence[TraceChange], at_ms: float) -> tuple[str, ...]:
    """Return the nodes that a trace has at a time, in the order in which they appeared."""
    nodes: dict[str, None] = {}
    for change in trace:
        if change.at_ms > at_ms:
            break
        if change.present:
            nodes[change.node] = None
        else:
            nodes.pop(change.node, None)
    return tuple(nodes)


def trace_reclaims(
    tenure: Tenure, nodes: Sequence[str], oldest_first: Sequence[str]
) -> tuple[Tenure, tuple[Reclaim, ...]]:
    """Reclaim running instances so that they match the nodes of a trace.

    Args:
        tenure: Which instance represented which node until now.
        nodes: The trace's nodes now, in the order in which they appeared.
        oldest_first: Running spot instances that have no notice yet, the oldest first.

    Returns:
        Which instance represents which node now, and the reclaimed instances: those whose node has disappeared, and
        those without a node.
    """
    held = {node: instance for node, instance in tenure.held.items() if node in nodes and instance in oldest_first}
    idle = [node for node in nodes if node not in held]
    placed = set(tenure.held.values())
    reclaims: list[Reclaim] = []
    for instance in oldest_first:
        if instance in held.values():
            continue
        if idle and instance not in placed:
            held[idle.pop(0)] = instance
        else:
            reclaims.append(Reclaim(instance, _with_notice(tenure.reclaimed + len(reclaims))))
    return Tenure(held, tenure.reclaimed + len(reclaims)), tuple(reclaims)


def _with_notice(reclaimed: int) -> bool:
    return reclaimed % 2 == 0
