"""Say when the nodes of a simulated fleet come and go, and how fast each is. Pure: the same seed, the same fleet."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A fleet of nodes.

    Attributes:
        nodes: How many there are at the beginning; each that goes is replaced.
        stay_seconds: How long a node stays, on average; infinite if none goes.
        shape: Shape of the Weibull distribution of that time: 1 for the exponential one, below for many early ends.
        return_seconds: Time until the one in its place is at work, on average, exponentially distributed.
        notice_seconds: Time between a node's notice and its end; 0 without one.
        spread: Standard deviation of the logarithm of nodes' seconds a step.
        changes: A recorded trace in place of the distributions: seconds, node, and whether it comes.
        seed: What all random numbers follow from.
    """

    nodes: int
    stay_seconds: float = math.inf
    shape: float = 1.0
    return_seconds: float = 60.0
    notice_seconds: float = 0.0
    spread: float = 0.0
    changes: Sequence[tuple[float, str, bool]] = ()
    seed: int = 0

    def pace(self, node: str) -> float:
        """Return a node's seconds a step over those of the typical node."""
        dice = random.Random(f"{self.seed}/pace/{node}")  # noqa: S311 (no secret)
        return math.exp(self.spread * dice.gauss(0, 1))


class Change(NamedTuple):
    """A node comes or goes."""

    at: float
    node: str
    comes: bool


def changes_of(fleet: Fleet) -> Iterator[Change]:
    """Yield who comes and goes, in the order of time; without end, if nodes go."""
    if fleet.changes:
        yield from (Change(*change) for change in sorted(fleet.changes))
        return
    yield from heapq.merge(*(_of_node(fleet, number) for number in range(fleet.nodes)))


def _of_node(fleet: Fleet, number: int) -> Iterator[Change]:
    """Yield the changes of one place in the fleet: each node that goes has a successor."""
    dice = random.Random(f"{fleet.seed}/stay/{number}")  # noqa: S311 (no secret)
    at = 0.0
    for generation in itertools.count():
        node = f"n{number}.{generation}"
        yield Change(at, node, comes=True)
        if math.isinf(fleet.stay_seconds):
            return
        scale = fleet.stay_seconds / math.gamma(1 + 1 / fleet.shape)
        at += dice.weibullvariate(scale, fleet.shape)
        yield Change(at, node, comes=False)
        at += dice.expovariate(1 / fleet.return_seconds) if fleet.return_seconds else 0.0
