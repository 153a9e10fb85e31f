"""Describe a region's market at one time, and find the offers in it that meet a need. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from idletrain.cloud.instance_types import InstanceType, Market, NodeNeed, Offer, no_offer_reason, rank_offers
from idletrain.errors import JobError

ESTIMATE_ERROR = 1.95  # families with local disks cost up to 30 % more than estimated, and other regions up to 50 %


@dataclass(frozen=True)
class MarketSnapshot:
    """A region's market at one time.

    Attributes:
        types: By name.
        offerings: Zones by type.
        spot_prices: USD an hour by type and zone.
        on_demand_prices: USD an hour by type.
        estimate: Whether on-demand prices are estimates from our table.
    """

    types: Mapping[str, InstanceType]
    offerings: Mapping[str, Collection[str]]
    spot_prices: Mapping[tuple[str, str], float]
    on_demand_prices: Mapping[str, float]
    estimate: bool

    @property
    def error_factor(self) -> float:
        """How many times the known on-demand prices the real ones may be."""
        return ESTIMATE_ERROR if self.estimate else 1.0

    def offers(
        self, need: NodeNeed, market: Market, max_price: float | None = None, zones: Collection[str] | None = None
    ) -> tuple[Offer, ...]:
        """Return all offers that meet a need, the cheapest slot first.

        Args:
            need: The resources that one subnet needs.
            market: Spot or on-demand.
            max_price: USD an hour that one machine may cost.
            zones: Zones that the run can use; None for all.

        Raises:
            JobError: there is no offer; the message names the nearest.
        """
        offerings = {
            name: [zone for zone in offered if zones is None or zone in zones]
            for name, offered in self.offerings.items()
        }
        types = self.types.values()
        any_price = rank_offers(types, offerings, self.spot_prices, self.on_demand_prices, need, market)
        offers = tuple(o for o in any_price if max_price is None or o.usd_per_hour <= max_price)
        if not offers:
            priced = {name for name, _ in self.spot_prices} if market == "spot" else self.on_demand_prices
            raise JobError(no_offer_reason([t for t in types if t.name in priced], any_price, need, market))
        return offers
