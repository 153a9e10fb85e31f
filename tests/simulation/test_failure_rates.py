"""Goodput at several rates of lost nodes."""

from __future__ import annotations

import pytest

from idletrain.simulation.engine import Work
from idletrain.simulation.failure_rates import PARTS, goodput_by_rate
from idletrain.simulation.fleet import Fleet
from idletrain.simulation.peers import PEERS

WORK = {
    "reissue": Work(policy="reissue", subnets=8, local_steps=100, step_seconds=0.5),
    "rolling": Work(policy="rolling", subnets=8, local_steps=100, step_seconds=0.5),
}


def test_every_training_has_a_point_for_each_rate_and_loses_by_it() -> None:
    lines = goodput_by_rate(WORK, Fleet(nodes=4, stay_seconds=1800, return_seconds=30), 3600)
    assert [*lines] == ["reissue", "rolling", *PEERS]
    for points in lines.values():
        rates, goodputs = zip(*points, strict=True)
        assert rates == (0.0, *(2 * part for part in PARTS))
        assert all(0 <= goodput <= 1 for goodput in goodputs)
        assert goodputs[-1] < goodputs[0]
    assert lines["rolling"][0][1] > 0.95
    assert lines["rolling"][-1][1] > lines["reissue"][-1][1]


def test_a_fleet_that_loses_nobody_is_simulated_about_a_loss_in_six_hours() -> None:
    lines = goodput_by_rate({"rolling": WORK["rolling"]}, Fleet(nodes=2), 600)
    assert [rate for rate, _ in lines["rolling"]][3] == pytest.approx(1 / 6)
