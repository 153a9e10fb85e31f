"""Data parallel training on a simulated fleet, against what arithmetic gives."""

from __future__ import annotations

import pytest

from idletrain.simulation.fleet import Fleet
from idletrain.simulation.peers import DataParallel, data_parallel

WAY = DataParallel(step_seconds=1.0, pause_seconds=10.0, checkpoint_seconds=60.0)


def test_a_loss_costs_what_was_trained_since_the_last_checkpoint_and_a_pause() -> None:
    trace = ((0.0, "a", True), (0.0, "b", True), (150.0, "b", False))
    outcome = data_parallel(WAY, Fleet(nodes=2, changes=trace), 300.0)
    assert outcome.alive_seconds == 300 + 150
    assert outcome.useful_seconds == 2 * 120 + (300 - 160)
    assert (outcome.steps, outcome.lost) == (120 + 140, 1)


def test_where_only_a_step_is_lost_a_loss_costs_a_part_of_one_and_the_pause() -> None:
    trace = ((0.0, "a", True), (0.0, "b", True), (150.5, "b", False))
    model = DataParallel(step_seconds=1.0, pause_seconds=2.0)
    outcome = data_parallel(model, Fleet(nodes=2, changes=trace), 300.0)
    assert outcome.useful_seconds == pytest.approx(2 * 150 + (300 - 152.5))


def test_a_calm_fleet_loses_nothing() -> None:
    outcome = data_parallel(WAY, Fleet(nodes=5), 1000.0)
    assert (outcome.goodput, outcome.steps) == (1.0, 1000)


def test_many_losses_cost_about_what_young_s_formula_says() -> None:
    fleet = Fleet(nodes=10, stay_seconds=4000.0, return_seconds=1.0)
    outcome = data_parallel(WAY, fleet, 200_000.0)
    between = 4000.0 / 10
    assert outcome.goodput == pytest.approx(1 - (60.0 / 2 + 10.0) / between, abs=0.02)
