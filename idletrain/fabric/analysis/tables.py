"""Tables of one fabric, and of two side by side: for a terminal, and the same rows for the HTML page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from idletrain.fabric.analysis import compare, ddp_cost, statistics
from idletrain.fabric.analysis.compare import Difference, rate_text
from idletrain.fabric.analysis.samples import Fabric
from idletrain.observe.charts import NOTHING, percent, size

LINK_ROWS = (
    ("round trip", "socket", "round trip"),
    ("round trip", "dask", "round trip, Dask's comm layer"),
    ("round trip", "dask tls", "round trip, Dask's comm layer, TLS"),
    ("round trip", "pull", "round trip, idletrain: pull"),
    ("round trip", "push", "round trip, idletrain: push"),
    ("one way", "socket", "one way, plain sockets"),
    ("both ways", "socket", "one way while the other is busy"),
    ("flows", "socket", "several connections"),
    ("incast", "socket", "all to one"),
    ("one way", "dask", "Dask's comm layer"),
    ("one way", "dask tls", "Dask's comm layer, TLS"),
    ("one way", "pull", "idletrain: pull"),
    ("one way", "push", "idletrain: push"),
)
MOST_WIDTH, NAME_WIDTH = 1000, 18  # of a table, and of its first column where room is short
INDENT, NO_BREAK = "   ", "\N{NO-BREAK SPACE}"
BACKENDS = ("gloo", "nccl", "mpi")  # of torch.distributed


@dataclass(frozen=True)
class TextTable:
    """A table: its title, its column headings, and its rows of texts; only the first column is no number."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


def seconds_text(seconds: float | None) -> str:
    """Format seconds in the unit that fits."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.2g} µs"


def tables(fabric: Fabric) -> list[TextTable]:
    """Return all tables of a fabric that are not empty."""
    everything = (
        _nodes(fabric),
        _links(fabric),
        _collectives(fabric),
        _fits(fabric),
        *_training(fabric),
        _stencil(fabric),
    )
    return [table for table in everything if table.lines]


def terminal_text(fabric: Fabric) -> RenderableType:
    """Render a fabric's tables for a terminal, then its faults, what was left out, and the verdict."""
    notes = [Text(f"fault: {fault}", style="bold red") for fault in fabric.faults]
    notes += [Text(f"left out: {missing}", style="dim") for missing in fabric.missing]
    return Group(
        *(FittedTable(table) for table in tables(fabric)), *notes, Text(compare.sentence(fabric), style="bold")
    )


def comparison_text(differences: Sequence[Difference]) -> RenderableType:
    """Render the comparison of two fabrics for a terminal."""
    return Group(FittedTable(comparison_tables(differences)), Text(compare.overall(differences), style="bold"))


def comparison_tables(differences: Sequence[Difference]) -> TextTable:
    """Return the table of a comparison: each figure of both fabrics, and its verdict."""
    lines = [
        (
            d.what,
            *(_value(v, d.unit) for v in (d.first, d.second)),
            f"{d.ratio - 1:+.1%}",
            f"{d.low - 1:+.1%} to {d.high - 1:+.1%}",
            f"{d.spread:.1%}",
            d.outcome.value if d.outcome is not compare.ComparisonOutcome.DIFFERENT else d.sentence.split(": ", 1)[1],
        )
        for d in differences
    ]
    return TextTable("comparison", ("figure", "first", "second", "change", "interval", "spread", "verdict"), lines)


def _value(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.3g} x"
    return seconds_text(value) if unit == "s" else rate_text(value)


@dataclass(frozen=True)
class FittedTable:
    """A table for a terminal: in columns where they fit side by side, else each line's values below its name."""

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table in the form that fits; this is rich's protocol."""
        for columns in (self._in_columns(narrow=False), self._in_columns(narrow=True)):
            if columns.__rich_measure__(console, options.update(max_width=MOST_WIDTH)).maximum <= options.max_width:
                yield columns
                return
        yield Text(self.table.title, style="italic")
        for name, *values in self.table.lines:
            yield Text(f" {name}")
            pairs = zip(self.table.columns[1:], values, strict=True)
            parts = [f"{column} {value}".strip().replace(" ", NO_BREAK) for column, value in pairs if value]
            own = textwrap.wrap("  ".join(parts), options.max_width - len(INDENT), break_on_hyphens=False)
            own = [line.replace(NO_BREAK, " ") for line in own]
            yield Text("\n".join(INDENT + line for line in own), style="dim", no_wrap=True)

    def _in_columns(self, *, narrow: bool) -> Table:
        """Return it in columns; narrow ones are as wide as their numbers, below headings of a word a line."""
        padding = (0, 1, 0, 0) if narrow else (0, 1)
        title = self.table.title
        columns = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=padding)
        for n, column in enumerate(self.table.columns):
            heading = column.replace(" ", "\n") if narrow else column
            columns.add_column(heading, justify="right" if n else "left", no_wrap=True)
        for name, *values in self.table.lines:
            columns.add_row("\n".join(textwrap.wrap(name, NAME_WIDTH)) if narrow else name, *values)
        return columns


def _nodes(fabric: Fabric) -> TextTable:
    columns = (
        "node",
        "address",
        "interface",
        "MTU",
        "link",
        "congestion",
        "kernel",
        "CPU",
        "GPUs",
        "GPUDirect",
        "torch",
        "collectives",
        "training step",
    )
    lines = []
    for node in fabric.nodes:
        link = node.get("link_bits_per_second")
        lines.append(
            (
                str(node["name"]),
                str(node.get("address", NOTHING)),
                str(node.get("interface", NOTHING)),
                str(node.get("mtu") or NOTHING),
                rate_text(link / 8) if link else NOTHING,
                str(node.get("congestion", NOTHING)),
                str(node.get("kernel", NOTHING)),
                f"{node.get('cpu', NOTHING)}, {node.get('cores', NOTHING)} cores",
                ", ".join(node.get("gpus", ())) or "none",
                str(node.get("gpudirect", NOTHING)),
                str(node.get("torch", NOTHING)),
                ", ".join(backend for backend in BACKENDS if node.get(backend)) or "none",
                seconds_text(node.get("pace_seconds")),
            )
        )
    return TextTable("nodes", columns, lines)


def _links(fabric: Fabric) -> TextTable:
    lines = []
    for what, transport, title in LINK_ROWS:
        points = statistics.points_of_kind(fabric, what, transport)
        if points and what == "round trip":
            pooled = [sample for point in points for sample in point.samples]
            slowest = max(points, key=lambda point: statistics.median(point.samples))
            pair = _pair(fabric, slowest.source, slowest.target)
            lines.append(
                (
                    title,
                    seconds_text(statistics.median(pooled)),
                    f"p99 {seconds_text(statistics.p99(pooled))}",
                    f"{pair}: {seconds_text(statistics.median(slowest.samples))}",
                    NOTHING,
                )
            )
        elif points:
            slowest = min(points, key=statistics.rate)
            cpu = statistics.cpu_per_gb(point for point in points if point.cpu_seconds)
            lines.append(
                (
                    title,
                    rate_text(statistics.median([statistics.rate(point) for point in points])),
                    f"{len(points)} measured",
                    f"{_pair(fabric, slowest.source, slowest.target)}: {rate_text(statistics.rate(slowest))}",
                    f"{cpu:.2f} s/GB" if cpu is not None else NOTHING,
                )
            )
    if (link := statistics.link_rate(fabric)) is not None:
        lines.append(("one way, headers included", rate_text(link), "", "", NOTHING))
    for node, share in statistics.outlier_nodes(fabric):
        lines.append(
            (f"outlier: {fabric.name(node)}", f"{share:.0%} of the others", "", "check its cable and card", NOTHING)
        )
    return TextTable("links", ("measurement", "typical", "", "slowest", "CPU, both ends"), lines)


def _pair(fabric: Fabric, source: int, target: int) -> str:
    return f"{fabric.name(source)} to {fabric.name(target)}"


def _collectives(fabric: Fabric) -> TextTable:
    lines = [
        (
            f"{b.of.operation}, {b.of.backend}, {b.of.nodes} nodes",
            size(b.of.moved_bytes),
            seconds_text(b.median),
            seconds_text(b.p99),
            rate_text(b.algorithm),
            rate_text(b.bus),
            percent(b.line_share),
        )
        for b in statistics.bandwidths(fabric)
    ]
    columns = ("operation", "size", "median", "p99", "algorithm bandwidth", "bus bandwidth", "of line rate")
    return TextTable("collectives", columns, lines)


def _fits(fabric: Fabric) -> TextTable:
    lines = [
        (
            f"{operation}, {backend}, {nodes} nodes",
            f"{seconds_text(line.alpha)} ± {seconds_text(line.alpha_error)}",
            f"{line.beta * 1e9:.3g} ± {line.beta_error * 1e9:.2g} ns",
        )
        for (backend, operation, nodes), line in statistics.linear_fits(fabric).items()
    ]
    return TextTable("fit: seconds = alpha + beta * bytes", ("operation", "alpha", "beta, a byte"), lines)


def _training(fabric: Fabric) -> tuple[TextTable, TextTable]:
    costs = statistics.costs(fabric)
    lines = [
        (
            compare.title(cost),
            str(cost.of.nodes),
            seconds_text(cost.compute),
            seconds_text(cost.communicate),
            seconds_text(cost.step) + ("" if cost.measured else " (computed)"),
            seconds_text(cost.exposed),
            percent(cost.overlap),
            percent(cost.efficiency),
            percent(cost.scaling),
            f"{cost.samples_per_second:.3g}",
        )
        for cost in costs
    ]
    columns = ("network", "nodes", "compute", "exchange", "step", "exposed", "overlap", "efficiency", "scaling")
    steps = TextTable("data-parallel training", (*columns, "samples/s"), lines)
    needs = [
        (
            compare.title(cost),
            str(cost.of.nodes),
            size(cost.of.gradient_bytes),
            f"{1 - cost.efficiency:.0%}",
            rate_text(cost.needed),
        )
        for cost in statistics.largest_world(costs)
    ]
    title = f"break-even: the link speed for {ddp_cost.EFFICIENT:.0%} efficiency"
    return steps, TextTable(
        title, ("network", "nodes", "gradient", "exchange's share of a step", "needed link speed"), needs
    )


def _stencil(fabric: Fabric) -> TextTable:
    lines = [
        (
            f"{sample.scaling}, {'exchange first' if sample.blocking else 'exchange hidden'}, {sample.backend}",
            str(sample.nodes),
            f"{sample.cells:,}",
            seconds_text(statistics.median(sample.compute)),
            seconds_text(statistics.median(sample.halo)),
            seconds_text(statistics.median(sample.step)),
            percent(statistics.stencil_efficiency(fabric, sample)),
        )
        for sample in fabric.stencil
    ]
    columns = ("scaling", "nodes", "cells", "compute", "halo", "step", "efficiency")
    return TextTable("stencil: a 3-D halo exchange with 6 neighbours", columns, lines)
