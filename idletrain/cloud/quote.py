"""Compute what a fleet would cost: the numbers that a user confirms before it starts. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from idletrain.cloud.instance_types import Pools
from idletrain.cloud.reconcile import NOTICE_LEFT_SECONDS
from idletrain.observe.cost import EXTRAS_USD_PER_HOUR, HOUR_SECONDS, MOST_SPARES, deadline_seconds

SHORTEST_SECONDS = 900.0  # that machines live: as long for training as for the last writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The cost of a fleet, as shown to the user.

    Attributes:
        pools: Where nodes come from; pools of the best one's market are preferred.
        nodes: Number of machines.
        max_price: USD an hour that one node may cost, or None.
        budget_usd: Budget of the whole run, or None.
        spent_usd: Part of it that earlier sessions of the run have spent.
        error_factor: How much higher than known prices may be: more than 1 where on-demand prices are estimates.
    """

    pools: Pools
    nodes: int
    head_type: str
    head_usd_per_hour: float
    max_duration_seconds: float
    max_price: float | None = None
    budget_usd: float | None = None
    spent_usd: float = 0.0
    error_factor: float = 1.0

    @property
    def preferred(self) -> Pools:
        """Pools that are requested first."""
        market = self.pools.offers[0].market
        return Pools(tuple(offer for offer in self.pools.offers if offer.market == market))

    @property
    def node_usd_per_hour(self) -> float:
        """Median price of the preferred pools: the cloud chooses by capacity as well as by price."""
        return statistics.median(offer.usd_per_hour for offer in self.preferred.offers)

    @property
    def usd_per_hour(self) -> float:
        """Expected cost of nodes and head node together."""
        return self._fleet(self.nodes, self.node_usd_per_hour)

    @property
    def on_demand_usd_per_hour(self) -> float | None:
        """Expected cost with on-demand nodes; None if no such price is known."""
        known = [o.on_demand_usd_per_hour for o in self.preferred.offers if o.on_demand_usd_per_hour is not None]
        return self._fleet(self.nodes, statistics.median(known)) if known else None

    @property
    def worst_usd_per_hour(self) -> float:
        """Highest possible cost: all nodes in the most expensive pool at the highest price it may rise to, plus the
        spares that are launched where spot nodes are at risk.
        """
        spares = MOST_SPARES if any(offer.market == "spot" for offer in self.pools.offers) else 0
        worst = max(offer.worst_usd_per_hour(self.max_price) for offer in self.pools.offers)
        return self.error_factor * self._fleet(self.nodes + spares, worst)

    @property
    def remaining_usd(self) -> float | None:
        """Return the rest of the budget in dollars, or None without one."""
        return None if self.budget_usd is None else self.budget_usd - self.spent_usd

    @property
    def deadline_seconds(self) -> float:
        """Longest lifetime of the machines, in seconds."""
        return deadline_seconds(self.remaining_usd, self.worst_usd_per_hour, self.max_duration_seconds)

    @property
    def fault(self) -> str | None:
        """Return why the machines would live too briefly to train something, because of the budget or the duration."""
        if self.deadline_seconds >= SHORTEST_SECONDS:
            return None
        shortest = f"{SHORTEST_SECONDS / 60:.0f} min"
        if self.budget_usd is None or self.max_duration_seconds < SHORTEST_SECONDS:
            return (
                f"nodes.max_duration: machines would live for {self.max_duration_seconds / 60:.0f} min, of which the "
                f"last {NOTICE_LEFT_SECONDS / 60:.0f} are for the last writes; allow them {shortest}"
            )
        needed_usd = self.spent_usd + self.worst_usd_per_hour * SHORTEST_SECONDS / HOUR_SECONDS
        needed = f"${math.ceil(needed_usd * 100) / 100:.2f}"  # rounded up to the cent
        if self.spent_usd:
            return (
                f"nodes.budget_usd: ${self.spent_usd:.2f} of ${self.budget_usd:.2f} are spent, and the rest does not "
                f"pay another {shortest}; raise it to {needed}, ask for fewer nodes, or lower nodes.max_price"
            )
        return (
            f"nodes.budget_usd: ${self.budget_usd:.2f} does not pay {shortest}, the least that a run takes, which can "
            f"cost {needed}; raise it to that, ask for fewer nodes, or lower nodes.max_price"
        )

    def _fleet(self, nodes: int, node_usd_per_hour: float) -> float:
        return nodes * node_usd_per_hour + self.head_usd_per_hour + (nodes + 1) * EXTRAS_USD_PER_HOUR
