"""Test the tables and the timeline of a plan."""

from __future__ import annotations

import io

from rich.console import Console

from idletrain.nn.outofcore.planning.drawing import plan_text, plan_timeline
from idletrain.nn.outofcore.planning.plan import make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink, Unit
from outofcore.made_up import MB

UNITS = tuple(Unit(f"block{i}", 0.1, 0.2, 0.1, 2 * MB, 2 * MB, 30 * MB) for i in range(4))
PROFILE = Profile(UNITS, SwapLink(400e6, 400e6), across_batch="its BatchNorm uses batch statistics")


def test_the_timeline_shows_forward_then_backward_and_the_link_at_work_beside_them() -> None:
    plan = make_memory_plan(PROFILE, 80 * MB)
    title, *lanes, legend = plan_timeline(PROFILE, plan, 48).split("\n")
    compute, write, read = (lane.split()[-1] for lane in lanes)
    assert "ms, peak" in title
    assert "idle" in legend
    assert len(compute) == len(write) == len(read) == 48
    assert compute.startswith("f")
    assert compute.rstrip(".").endswith("b")
    assert "s" in write[: compute.index("b")]
    assert "s" in read[compute.index("b") - 1 :]


def test_a_plan_without_a_link_has_one_lane() -> None:
    assert plan_timeline(PROFILE, make_memory_plan(PROFILE, 1000 * MB), 12).split("\n")[1].split() == [
        "compute",
        "ffffbbbbbbbb",
    ]


def test_the_table_names_every_unit_what_is_done_with_it_and_every_single_technique() -> None:
    plan = make_memory_plan(PROFILE, 80 * MB)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(plan_text(PROFILE, plan))
    text = console.export_text()
    for expected in (
        *(unit.name for unit in UNITS),
        "swap",
        "recompute all",
        "lacks",
        "its BatchNorm uses batch",
        "/s out",
    ):
        assert expected in text
