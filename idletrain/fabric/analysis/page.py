"""One fabric or a comparison as a self-contained HTML file: verdict, charts, heat map of pairs, and all tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from idletrain.fabric.analysis import compare, ddp_cost, statistics, tables
from idletrain.fabric.analysis.compare import Difference
from idletrain.fabric.analysis.samples import Fabric
from idletrain.fabric.analysis.statistics import TrainingCost
from idletrain.observe import charts

SERIES_COLOURS = 5  # in the style sheet
CELL, NAMES = 26, 110  # pixels of the heat map: the side of a pair's square, and the width of the nodes' names
SPEEDS = tuple(10.0**power for power in (x / 8 for x in range(-16, 17)))  # Gbit/s, 10 Mbit/s to 100 Gbit/s


@dataclass(frozen=True)
class HeatMap:
    """Pairs of nodes as squares, each with its speed as a share of the fastest pair's."""

    names: Sequence[str]
    boxes: Sequence[tuple[charts.Box, float]]

    @property
    def width(self) -> int:
        """Width in pixels."""
        return NAMES + CELL * len(self.names)

    cell, left = CELL, NAMES


def fabric_page(fabric: Fabric) -> str:
    """Return the HTML of one fabric."""
    template = charts.templates().get_template("fabric.html")
    about = fabric.about
    return template.render(
        title=f"{len(fabric.nodes)} nodes, {about.get('date', '')}",
        sentence=compare.sentence(fabric),
        faults=fabric.faults,
        missing=fabric.missing,
        charts=fabric_charts(fabric),
        heats=[heat for heat in (heat_of(fabric, what) for what in ("one way", "round trip")) if heat[1].boxes],
        tables=tables.tables(fabric),
        about=about,
    )


def comparison_page(names: Sequence[str], differences: Sequence[Difference]) -> str:
    """Return the HTML of a comparison of two fabrics."""
    template = charts.templates().get_template("fabric.html")
    return template.render(
        title=" against ".join(names),
        sentence=compare.overall(differences),
        faults=(),
        missing=(),
        charts=(),
        heats=(),
        tables=[tables.comparison_tables(differences)],
        about={},
    )


def heat_of(fabric: Fabric, what: str) -> tuple[str, HeatMap]:
    """Return a title and the heat map of all pairs: of `one way` by rate, of `round trip` by its inverse."""
    points = {(p.source, p.target): p for p in statistics.points_of_kind(fabric, what)}
    speeds = {
        pair: 1 / statistics.median(point.samples) if what == "round trip" else statistics.rate(point)
        for pair, point in points.items()
    }
    best = max(speeds.values(), default=1.0)
    boxes = []
    for (source, target), value in sorted(speeds.items()):
        shown = tables.seconds_text(1 / value) if what == "round trip" else compare.rate_text(value)
        text = f"{fabric.name(source)} to {fabric.name(target)}: {shown}"
        x, y = NAMES + CELL * target, NAMES + CELL * source
        boxes.append((charts.Box(x, y, CELL - 2, CELL - 2, text), round(value / best, 3)))
    return what, HeatMap([str(node["name"]) for node in fabric.nodes], boxes)


def fabric_charts(fabric: Fabric) -> list[charts.Chart]:
    """Return the charts of efficiency by link speed, bus bandwidth by size, and scaling by nodes."""
    candidates = [_by_speed(statistics.largest_world(statistics.costs(fabric))), _by_size(fabric), _scaling(fabric)]
    return [chart for chart in candidates if chart.curves]


def _by_speed(costs: Sequence[TrainingCost]) -> charts.Chart:
    """Return the chart of every network's efficiency at other link speeds, by the cost model."""
    lines = []
    for n, cost in enumerate(costs):
        points = [(math.log10(s) + 2, ddp_cost.efficiency_at(cost.at_other_speeds, s * compare.GBIT)) for s in SPEEDS]
        lines.append(charts.Series(compare.title(cost), points, n % SERIES_COLOURS))
    over = "link speed: 10 Mbit/s, ten times as much at each mark"
    return charts.chart("efficiency", over, lines, target=ddp_cost.EFFICIENT)


def _by_size(fabric: Fabric) -> charts.Chart:
    def lines() -> Iterator[charts.Series]:
        bands = statistics.bandwidths(fabric)
        keys = list(dict.fromkeys((b.of.operation, b.of.backend, b.of.nodes) for b in bands))
        for n, key in enumerate(keys):
            points = [
                (math.log10(b.of.moved_bytes) - 3, b.bus / compare.GBIT)
                for b in bands
                if (b.of.operation, b.of.backend, b.of.nodes) == key
            ]
            yield charts.Series(f"{key[0]}, {key[1]}, {key[2]} nodes", points, n % SERIES_COLOURS)

    return charts.chart("bus bandwidth, Gbit/s", "size: 1 kB, ten times as much at each mark", list(lines()))


def _scaling(fabric: Fabric) -> charts.Chart:
    costs = statistics.costs(fabric)
    keys = list(dict.fromkeys(compare.title(cost) for cost in costs))
    lines = []
    for n, key in enumerate(keys):
        points = [(float(c.of.nodes), c.scaling) for c in costs if compare.title(c) == key and c.scaling is not None]
        if points:
            lines.append(charts.Series(key, [(1.0, 1.0), *points], n % SERIES_COLOURS))
    return charts.chart("scaling efficiency", "nodes", lines)
