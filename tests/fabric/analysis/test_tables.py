"""A fabric as tables."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console, RenderableType

from idletrain.fabric.analysis import compare, tables
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample


def example(rate: float = 12e6) -> Fabric:
    """Three nodes, of which the last is slow, with some of everything."""
    nodes: list[dict[str, Any]] = [
        {
            "name": f"n{k}",
            "address": f"10.0.0.{k}",
            "interface": "eth0",
            "host": f"h{k}",
            "mtu": 1500,
            "link_bits_per_second": 10**8,
            "gpus": [],
            "cpu": "a CPU",
            "cores": 2,
            "threads": 1,
            "pace_seconds": 0.001,
        }
        for k in range(3)
    ]
    points = []
    for a in range(3):
        for b in range(3):
            if a != b:
                slow = rate / 3 if 2 in (a, b) else rate
                points.append(Point("round trip", "socket", a, b, (0.0002,) * 5))
                points.append(Point("one way", "socket", a, b, (slow,) * 5, moved_bytes=10**8, cpu_seconds=0.1))
    points.append(Point("incast", "socket", 1, 0, (rate / 2, rate / 2), 2, 10**7))
    points.append(Point("one way", "pull", 0, 1, (rate,) * 3, moved_bytes=10**8, cpu_seconds=0.2))
    collectives = [
        CollectiveSample("gloo", "all-reduce", 3, size, (1e-3 + 1e-7 * size,) * 5) for size in (1000, 10**5, 10**6)
    ]
    training = [
        TrainingSample("gloo", "mlp", 1, 128, 2_700_000, (), (0.01,) * 5),
        TrainingSample("gloo", "mlp", 3, 128, 2_700_000, (2_700_000,), (0.01,) * 5, (0.3,) * 5, (0.3,) * 5),
        TrainingSample("gloo", "vgg16", 3, 2, 553_000_000, (), (0.5,) * 5),
    ]
    stencil = [
        StencilSample("gloo", "weak", True, n, 1000 * n, (0.01,), (0.002,), (0.012 + 0.001 * n,)) for n in (1, 3)
    ]
    about = {"preset": "quick", "version": "1", "date": "2026-01-01", "seconds": 30.0}
    return Fabric(about, nodes, points, collectives, training, stencil, ["n1 is odd"], ["NCCL: no GPU"])


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(what)
    return out.getvalue()


def test_everything_measured_is_in_the_tables() -> None:
    titles = [rows.title for rows in tables.tables(example())]
    assert titles == [
        "nodes",
        "links",
        "collectives",
        "fit: seconds = alpha + beta * bytes",
        "data-parallel training",
        "break-even: the link speed for 90% efficiency",
        "stencil: a 3-D halo exchange with 6 neighbours",
    ]
    assert all(len(line) == len(rows.columns) for rows in tables.tables(example()) for line in rows.lines)


def test_a_terminal_shows_faults_gaps_and_the_verdict_last() -> None:
    text = printed(tables.terminal_text(example()))
    assert "fault: n1 is odd" in text
    assert "left out: NCCL: no GPU" in text
    assert "outlier: n2" in text
    assert "(computed)" in text
    assert text.strip().splitlines()[-1].startswith("Between these 3 nodes")


def test_what_was_not_measured_has_no_table() -> None:
    assert [rows.title for rows in tables.tables(Fabric({}, [{"name": "a"}]))] == ["nodes"]


def test_two_beside_each_other() -> None:
    text = printed(tables.comparison_text(compare.compare(example(), example())))
    assert "no significant effect" in text
    assert "+0.0%" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (math.nan, "-"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (1e-8, "0.01 µs")],
)
def test_seconds_are_reported_in_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert tables.seconds_text(seconds) == text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_fit_the_terminal_and_no_value_is_broken_in_two(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(tables.terminal_text(example()))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    shown = [table for table in tables.tables(example()) if table.title != "nodes"]
    for value in {value for table in shown for line in table.lines for value in line[1:]}:
        assert value in text, value


def test_a_terminal_that_is_wide_enough_has_every_line_in_columns() -> None:
    lines = printed(tables.terminal_text(example())).splitlines()
    assert sum(line.lstrip().startswith("all-reduce, gloo") for line in lines) == 4  # three sizes and the fit
    assert not any(line.startswith(tables.INDENT + "size") for line in lines)
