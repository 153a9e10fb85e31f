"""What a fleet would cost: the numbers that a user is asked about before it starts. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from idletrain.cloud.aws.instance_types import Pools
from idletrain.observe.cost import EXTRAS_USD_PER_HOUR, MOST_SPARES, deadline_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What a fleet would cost: the numbers that a user is asked about.

    Attributes:
        pools: Where nodes come from; those of the best one's market are preferred to those of another.
        nodes: How many machines.
        max_price: USD an hour that one node may cost, or None.
        budget_usd: For all of the run, or None.
        spent_usd: Of it, by earlier sittings of the run.
    """

    pools: Pools
    nodes: int
    head_type: str
    head_usd_per_hour: float
    max_duration_seconds: float
    max_price: float | None = None
    budget_usd: float | None = None
    spent_usd: float = 0.0

    @property
    def preferred(self) -> Pools:
        """The pools that are asked first."""
        market = self.pools.offers[0].market
        return Pools(tuple(offer for offer in self.pools.offers if offer.market == market))

    @property
    def node_usd_per_hour(self) -> float:
        """Of the pool in the middle: the cloud chooses by capacity as well as by price."""
        return statistics.median(offer.usd_per_hour for offer in self.preferred.offers)

    @property
    def usd_per_hour(self) -> float:
        """Expected of nodes and head together."""
        return self._fleet(self.nodes, self.node_usd_per_hour)

    @property
    def on_demand_usd_per_hour(self) -> float | None:
        """The same with nodes on demand; None if no such price is known."""
        known = [o.on_demand_usd_per_hour for o in self.preferred.offers if o.on_demand_usd_per_hour is not None]
        return self._fleet(self.nodes, statistics.median(known)) if known else None

    @property
    def worst_usd_per_hour(self) -> float:
        """The most that an hour can cost: all nodes of the dearest pool, at the highest that its price may rise to, and
        the spares that stand by where spot nodes are at risk.
        """
        spares = MOST_SPARES if any(offer.market == "spot" for offer in self.pools.offers) else 0
        worst = max(offer.worst_usd_per_hour(self.max_price) for offer in self.pools.offers)
        return self._fleet(self.nodes + spares, worst)

    @property
    def remaining_usd(self) -> float | None:
        """What is left of the budget, or None without one."""
        return None if self.budget_usd is None else self.budget_usd - self.spent_usd

    @property
    def deadline_seconds(self) -> float:
        """How long machines may live."""
        return deadline_seconds(self.remaining_usd, self.worst_usd_per_hour, self.max_duration_seconds)

    def _fleet(self, nodes: int, node_usd_per_hour: float) -> float:
        return nodes * node_usd_per_hour + self.head_usd_per_hour + (nodes + 1) * EXTRAS_USD_PER_HOUR
