"""Print the market's offers as a table, and the plan that `launch --spot` asks to confirm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from idletrain.cloud.instance_types import GIB, Offer
from idletrain.cloud.quote import Quote
from idletrain.observe.cost import EXTRAS_USD_PER_HOUR, HOUR_SECONDS

ROWS = 20  # fit a screen
PLANNED_ROWS = 5  # the best of those that may be requested
NAMED_TYPES = 3  # fit a line of 80 columns


def table(offers: Sequence[Offer], estimate: bool, rows: int = ROWS) -> RenderableType:
    """Return a table of the best offers: a line per type with all its zones, the cheapest first, and its price there.

    Args:
        offers: Offers of one market, ranked.
        estimate: True if on-demand prices are estimates.
        rows: Number of types to show.
    """
    by_type: dict[str, list[Offer]] = {}
    for offer in offers:
        by_type.setdefault(offer.type.name, []).append(offer)
    shown = list(by_type.values())[:rows]
    gpus = any(of_type[0].type.gpus for of_type in shown)
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", caption_justify="left")
    result.title = _title(offers)
    result.caption = _caption(len(by_type) - len(shown), estimate)
    result.add_column("\ntype", no_wrap=True)
    result.add_column("\nzones", no_wrap=True)
    numbers = ("\nvCPU", "\nRAM", *(["\nGPU"] if gpus else []), "\nslots", "\n$/h", "$ per\nslot-h", "on-\ndemand")
    for heading in (*numbers, "\nsaving"):
        result.add_column(heading, justify="right", no_wrap=True)
    for of_type in shown:
        best = of_type[0]
        on_demand, saving = _on_demand(best)
        result.add_row(
            best.type.name,
            _zones(of_type),
            str(best.type.vcpus),
            f"{best.type.memory_bytes / GIB:g}",
            *([_gpus(best)] if gpus else []),
            str(best.slots),
            _price(best.usd_per_hour),
            _price(best.usd_per_slot_hour),
            f"~{on_demand}" if estimate and on_demand else on_demand,
            saving,
        )
    return result


def _zones(offers: Sequence[Offer]) -> str:
    """Return the zones without their region's name: `bac`, or `-lax-1a b` with local zones."""
    names = [offer.zone.removeprefix(_region(offer.zone)) for offer in offers]
    return "".join(names) if all(len(name) == 1 for name in names) else " ".join(names)


def _price(usd: float) -> str:
    """Format USD with at least four digits in the same width: `0.0336`, `1.550`, `407.7`."""
    digits = next((d for bound, d in ((1, 4), (10, 3), (100, 2)) if usd < bound), 1)
    return f"{usd:.{digits}f}"


def _region(zone: str) -> str:
    """Return `eu-west-1` for `eu-west-1a`, and `us-west-2` for the local zone `us-west-2-lax-1a`."""
    area, direction, number = zone.split("-")[:3]
    return f"{area}-{direction}-{number.rstrip('abcdefghijklmnopqrstuvwxyz')}"


def _title(offers: Sequence[Offer]) -> str:
    return f"{offers[0].market} machines in {_region(offers[0].zone)}; USD, GiB" if offers else "no machines"


def _caption(hidden: int, estimate: bool) -> str | None:
    parts = [f"and {_count(hidden, 'more type')}"] if hidden else []
    parts += ["~ estimated: the price list cannot be had"] if estimate else []
    return "; ".join(parts) or None


def _gpus(offer: Offer) -> str:
    type_ = offer.type
    return f"{type_.gpus}x{type_.gpu_memory_bytes / type_.gpus / GIB:.0f}" if type_.gpus else ""


def _on_demand(offer: Offer) -> tuple[str, str]:
    """Return the on-demand price and the share saved; "" for what is unknown."""
    if offer.on_demand_usd_per_hour is None:
        return "", ""
    saving = 1 - offer.usd_per_hour / offer.on_demand_usd_per_hour
    return _price(offer.on_demand_usd_per_hour), f"{saving:.0%}" if offer.market == "spot" else ""


def spot_plan_lines(quote: Quote, estimate: bool) -> list[str]:
    """Return the plan that the user confirms before machines start, a line each.

    Args:
        quote: The fleet and its prices.
        estimate: True if on-demand prices are estimates.
    """
    return [f"{label:<10} {text}" for label, text in _plan(quote, estimate)]


def show_quote(quote: Quote, estimate: bool) -> None:
    """Print a fleet's best offers and its plan, as the user confirms them."""
    Console().print(table(quote.preferred.offers, estimate, PLANNED_ROWS))
    for line in spot_plan_lines(quote, estimate):
        typer.echo(line)


def _plan(quote: Quote, estimate: bool) -> Iterator[tuple[str, str]]:
    pools, lifetime = quote.preferred, _duration(quote.deadline_seconds)
    market, types = pools.offers[0].market, pools.types
    more = f" and {len(types) - NAMED_TYPES} more" if len(types) > NAMED_TYPES else ""
    where = f"{_count(len(types), 'type')} in {_count(len(pools.zones), 'zone')}"
    yield "nodes", f"{quote.nodes} {market}, of {where}:"
    yield "", ", ".join(types[:NAMED_TYPES]) + more
    if pools != quote.pools:
        yield "", "on-demand where there are no spot machines"
    yield "head", f"1 on-demand {quote.head_type}"
    yield (
        "expected",
        f"${quote.usd_per_hour:.2f} an hour: {_count(quote.nodes, 'node')} at ${_price(quote.node_usd_per_hour)},",
    )
    yield "", f"the head at ${_price(quote.head_usd_per_hour)}, disk and address ${EXTRAS_USD_PER_HOUR:.4f} each"
    yield "total", f"${_total(quote, quote.usd_per_hour):.2f} if it takes all of {lifetime}"
    on_demand = quote.on_demand_usd_per_hour
    if on_demand is not None and market == "spot":
        about, saved = "about " if estimate else "", 1 - quote.usd_per_hour / on_demand
        yield "on-demand", f"{about}${_total(quote, on_demand):.2f}; {saved:.0%} saved"
    yield "deadline", f"every machine ends by itself after {lifetime}"
    if quote.budget_usd is not None:
        yield "", f"so that ${quote.budget_usd:.2f} hold at up to ${quote.worst_usd_per_hour:.2f} an hour"
        if quote.spent_usd:
            yield "", f"and ${quote.spent_usd:.2f} of them are spent already"
    if pools.few:
        yield "warning", "so few types run dry together; less nodes.memory lets more serve"
    if quote.max_price is not None and market == "spot":
        yield "warning", "nodes.max_price brings preemptions; spot is never above on-demand"


def _total(quote: Quote, usd_per_hour: float) -> float:
    return usd_per_hour * quote.deadline_seconds / HOUR_SECONDS


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _duration(seconds: float) -> str:
    """Format a duration as `4 h`, `1 h 25 min` or `50 min`, rounded down to whole minutes."""
    hours, minutes = divmod(int(seconds // 60), 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0 or hours == 0)
    return " ".join(parts)
