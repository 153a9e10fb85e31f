"""Decide which instances a request gets from which pools, and with which errors. Pure: no moto, no clock."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

INSUFFICIENT = "InsufficientInstanceCapacity"


@dataclass(frozen=True, slots=True)
class CapacityPool:
    """Machines of one market, type and zone, which share their capacity."""

    market: str
    """`spot` or `on-demand`."""
    type: str
    zone: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of `count` running instances in all pools that match the patterns; `*` matches anything."""

    market: str
    type: str
    zone: str
    count: int

    def covers(self, pool: CapacityPool) -> bool:
        """Return whether a pool's instances count against the limit."""
        pairs = ((pool.market, self.market), (pool.type, self.type), (pool.zone, self.zone))
        return all(fnmatch.fnmatchcase(value, pattern) for value, pattern in pairs)


@dataclass(frozen=True, slots=True)
class CapacityOffer:
    """A pool that a request accepts, with its price.

    Attributes:
        fault: The error code of a pool that is not available at all, or empty.
    """

    pool: CapacityPool
    usd_per_hour: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request.

    Attributes:
        counts: Number of instances from each offer.
        errors: Index and error code of each offer that failed; it may still have given some instances.
    """

    counts: tuple[int, ...]
    errors: tuple[tuple[int, str], ...]


def grant_capacity(
    count: int,
    offers: Sequence[CapacityOffer],
    limits: Sequence[Limit],
    running: Sequence[CapacityPool],
    *,
    spread: bool,
) -> Grant:
    """Distribute a request over pools.

    Args:
        count: Number of requested instances.
        offers: Pools that they may come from.
        limits: Capacity limits.
        running: The pool of each instance that already runs.
        spread: If true, prefer pools with most capacity, then even counts, then low prices, as
            `price-capacity-optimized` does; else use the cheapest pool until its capacity is used up.

    Returns:
        At most `count` instances. A pool without any capacity is an error; if instances are missing, every pool is.
    """
    left = [limit.count - sum(map(limit.covers, running)) for limit in limits]
    covering = [[k for k, limit in enumerate(limits) if limit.covers(offer.pool)] for offer in offers]
    counts = [0] * len(offers)

    def remaining(n: int) -> float:
        return 0 if offers[n].fault else min((left[k] for k in covering[n]), default=math.inf)

    def rank(n: int) -> tuple[float, ...]:
        price = offers[n].usd_per_hour
        return (-remaining(n), counts[n], price, n) if spread else (price, n)

    failed = [n for n in range(len(offers)) if remaining(n) <= 0]
    for _ in range(count):
        candidates = [n for n in range(len(offers)) if remaining(n) > 0]
        if not candidates:
            break
        chosen = min(candidates, key=rank)
        counts[chosen] += 1
        for k in covering[chosen]:
            left[k] -= 1
    if sum(counts) < count:
        failed = list(range(len(offers)))
    return Grant(tuple(counts), tuple((n, offers[n].fault or INSUFFICIENT) for n in failed))


def with_limit(limits: Sequence[Limit], patterns: tuple[str, str, str], count: int | None) -> tuple[Limit, ...]:
    """Return the limits with one set, in place of an older one with the same patterns; None removes it."""
    others = tuple(limit for limit in limits if (limit.market, limit.type, limit.zone) != patterns)
    return others if count is None else (*others, Limit(*patterns, count))
