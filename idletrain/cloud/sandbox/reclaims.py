"""When the cloud takes which spot instance back: by the clock, or as a recorded trace says. Pure: time and instances
come as arguments, so that every rehearsal can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from idletrain.errors import JobError


@dataclass(frozen=True, slots=True)
class Reclaim:
    """One instance is taken back, with a notice or at once."""

    instance: str
    notice: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicReclaims:
    """Takings in turn with a notice and without.

    Attributes:
        next_at: When the clock takes the next one.
        taken: How many were taken so far.
    """

    every_seconds: float
    next_at: float
    reclaimed: int = 0


@dataclass(frozen=True, slots=True)
class TraceChange:
    """A line of a trace: a node comes or goes."""

    at_ms: int
    node: str
    present: bool


@dataclass(frozen=True, slots=True)
class Tenure:
    """Which instance stands for which node of a trace, and how many were taken so far."""

    held: Mapping[str, str]
    reclaimed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimPolicy:
    """How a cloud takes nodes back.

    Attributes:
        turns: By the clock, or None.
        trace: As recorded, or nothing; it begins with its first node.
        speed: How many of the trace's seconds pass in one.
        tenure: Who stands for whom.
    """

    periodic: PeriodicReclaims | None = None
    trace: tuple[TraceChange, ...] = ()
    speed: float = 1.0
    tenure: Tenure = Tenure({})


@dataclass(frozen=True, slots=True)
class ReclaimStep:
    """What happens on the market now.

    Attributes:
        capacity: How many spot instances may run, or None where nothing limits them.
    """

    reclaims: tuple[Reclaim, ...]
    capacity: int | None


def next_reclaims(
    market: ReclaimPolicy, seconds: float, oldest_first: Sequence[str]
) -> tuple[ReclaimPolicy, ReclaimStep]:
    """What the market does.

    Args:
        market: What was.
        seconds: Since the cloud began.
        oldest_first: Running spot instances that have no notice yet.
    """
    taken: tuple[Reclaim, ...] = ()
    capacity = None
    if market.periodic:
        turns, taken = periodic_reclaims(market.periodic, seconds, oldest_first)
        market = replace(market, periodic=turns)
    if market.trace:
        nodes = nodes_present(market.trace, market.trace[0].at_ms + 1000 * seconds * market.speed)
        capacity = len(nodes)
        left = [id_ for id_ in oldest_first if all(id_ != taking.instance for taking in taken)]
        tenure, gone = trace_reclaims(market.tenure, nodes, left)
        market, taken = replace(market, tenure=tenure), taken + gone
    return market, ReclaimStep(taken, capacity)


def periodic_reclaims(
    turns: PeriodicReclaims, now: float, oldest_first: Sequence[str]
) -> tuple[PeriodicReclaims, tuple[Reclaim, ...]]:
    """Take the oldest instance if it is time; if there is none to take, its turn comes with the next.

    Args:
        turns: What was.
        now: The time, on the clock of `next_at`.
        oldest_first: Running spot instances that have no notice yet.
    """
    if now < turns.next_at:
        return turns, ()
    turns = replace(turns, next_at=max(turns.next_at + turns.every_seconds, now))
    if not oldest_first:
        return turns, ()
    return replace(turns, reclaimed=turns.reclaimed + 1), (Reclaim(oldest_first[0], _with_notice(turns.reclaimed)),)


def read_trace(text: str) -> tuple[TraceChange, ...]:
    """Parse lines of `milliseconds,add|remove,node`.

    Raises:
        JobError: a line is something else.
    """
    changes = []
    for number, line in enumerate(text.splitlines(), 1):
        match [part.strip() for part in line.split(",")]:
            case [at, "add" | "remove" as verb, node] if at.isdigit() and node:
                changes.append(TraceChange(int(at), node, verb == "add"))
            case [""]:
                continue
            case _:
                raise JobError(f"--trace: line {number} is {line!r}; write lines such as 480000,add,node1")
    return tuple(sorted(changes, key=lambda change: change.at_ms))


def nodes_present(trace: Sequence[TraceChange], at_ms: float) -> tuple[str, ...]:
    """The nodes that a trace has at a time, the one that came first first."""
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
    """Bring the running instances in line with a trace.

    Args:
        tenure: What was.
        nodes: The trace's nodes now, in the order in which they came.
        oldest_first: Running spot instances that have no notice yet.

    Returns:
        Who stands for which node now, and the instances that go: those of nodes that went, and those for which there
        is no node.
    """
    held = {node: instance for node, instance in tenure.held.items() if node in nodes and instance in oldest_first}
    idle = [node for node in nodes if node not in held]
    placed = set(tenure.held.values())
    takings: list[Reclaim] = []
    for instance in oldest_first:
        if instance in held.values():
            continue
        if idle and instance not in placed:
            held[idle.pop(0)] = instance
        else:
            takings.append(Reclaim(instance, _with_notice(tenure.reclaimed + len(takings))))
    return Tenure(held, tenure.reclaimed + len(takings)), tuple(takings)


def _with_notice(reclaimed: int) -> bool:
    return reclaimed % 2 == 0
