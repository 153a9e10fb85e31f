"""A simulated fleet: as many nodes as it says, that stay and come back as long as the model says."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from idletrain.simulation.fleet import Fleet, changes_of


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_nodes_stay_and_return_as_long_as_the_model_says_on_average(shape: float) -> None:
    fleet = Fleet(nodes=20, stay_seconds=100.0, shape=shape, return_seconds=10.0)
    changes = list(itertools.islice(changes_of(fleet), 20_000))
    assert [change.at for change in changes] == sorted(change.at for change in changes)
    came = {change.node: change.at for change in changes if change.comes}
    stays = [change.at - came[change.node] for change in changes if not change.comes]
    assert statistics.mean(stays) == pytest.approx(100.0, rel=0.05)
    ended = {change.node: change.at for change in changes if not change.comes}
    pauses = [
        at - ended[f"{place}.{int(number) - 1}"]
        for node, at in came.items()
        for place, number in [node.split(".")]
        if number != "0"
    ]
    assert statistics.mean(pauses) == pytest.approx(10.0, rel=0.05)


def test_the_same_seed_is_the_same_fleet_and_another_is_another() -> None:
    first, again, other = (
        list(itertools.islice(changes_of(Fleet(nodes=3, stay_seconds=9.0, seed=seed)), 50)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert Fleet(nodes=1, spread=0.3, seed=1).pace("n0.0") == Fleet(nodes=1, spread=0.3, seed=1).pace("n0.0")


def test_nodes_differ_in_pace_by_the_spread() -> None:
    logs = [math.log(Fleet(nodes=1, spread=0.3).pace(f"n{n}.0")) for n in range(3000)]
    assert statistics.mean(logs) == pytest.approx(0.0, abs=0.02)
    assert statistics.stdev(logs) == pytest.approx(0.3, rel=0.05)
    assert Fleet(nodes=1).pace("n0.0") == 1.0


def test_where_none_goes_all_come_at_the_beginning_and_a_trace_is_followed() -> None:
    assert [(c.at, c.comes) for c in changes_of(Fleet(nodes=3))] == [(0.0, True)] * 3
    trace = ((0.0, "a", True), (5.0, "a", False))
    assert [tuple(change) for change in changes_of(Fleet(nodes=9, changes=trace))] == list(trace)
