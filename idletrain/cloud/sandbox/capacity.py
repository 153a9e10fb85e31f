"""Which instances a request gets out of which pools, and with which errors. Pure: no moto, no clock."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

INSUFFICIENT = "InsufficientInstanceCapacity"


@dataclass(frozen=True, slots=True)
class CapacityPool:
    """Machines that are given and taken together."""

    market: str
    """`spot` or `on-demand`."""
    type: str
    zone: str


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `count` instances run in the pools that the patterns match; `*` stands for anything."""

    market: str
    type: str
    zone: str
    count: int

    def covers(self, pool: CapacityPool) -> bool:
        """Whether a pool's instances count."""
        pairs = ((pool.market, self.market), (pool.type, self.type), (pool.zone, self.zone))
        return all(fnmatch.fnmatchcase(value, pattern) for value, pattern in pairs)


@dataclass(frozen=True, slots=True)
class CapacityOffer:
    """A pool that a request would take.

    Attributes:
        fault: The error code of a pool that cannot be had at all, or empty.
    """

    pool: CapacityPool
    usd_per_hour: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request.

    Attributes:
        counts: Instances from each offer.
        errors: Offers, by index, that failed, and with which code; there may be instances all the same.
    """

    counts: tuple[int, ...]
    errors: tuple[tuple[int, str], ...]


def grant(
    count: int,
    offers: Sequence[CapacityOffer],
    limits: Sequence[Limit],
    running: Sequence[CapacityPool],
    *,
    spread: bool,
) -> Grant:
    """Share out a request.

    Args:
        count: Instances wanted.
        offers: Where they may come from.
        limits: What there is.
        running: The pool of each instance that runs already.
        spread: Over the pools with most capacity, then evenly, then by price, as `price-capacity-optimized` means;
            else the cheapest pool first, until it is dry.

    Returns:
        At most `count` instances. A pool that had nothing is an error; so is each that ran dry if some are missing.
    """
    left = [limit.count - sum(map(limit.covers, running)) for limit in limits]
    covering = [[k for k, limit in enumerate(limits) if limit.covers(offer.pool)] for offer in offers]
    counts = [0] * len(offers)

    def remaining(n: int) -> float:
        return 0 if offers[n].fault else min((left[k] for k in covering[n]), default=math.inf)

    def rank(n: int) -> tuple[float, ...]:
        price = offers[n].usd_per_hour
        return (-remaining(n), counts[n], price, n) if spread else (price, n)

    dry = [n for n in range(len(offers)) if remaining(n) <= 0]
    for _ in range(count):
        candidates = [n for n in range(len(offers)) if remaining(n) > 0]
        if not candidates:
            break
        chosen = min(candidates, key=rank)
        counts[chosen] += 1
        for k in covering[chosen]:
            left[k] -= 1
    if sum(counts) < count:
        dry = list(range(len(offers)))
    return Grant(tuple(counts), tuple((n, offers[n].fault or INSUFFICIENT) for n in dry))


def with_limit(limits: Sequence[Limit], patterns: tuple[str, str, str], count: int | None) -> tuple[Limit, ...]:
    """Set a limit, in place of an older one with the same patterns; None lifts it."""
    others = tuple(limit for limit in limits if (limit.market, limit.type, limit.zone) != patterns)
    return others if count is None else (*others, Limit(*patterns, count))
