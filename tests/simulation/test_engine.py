"""Simulated runs: what follows from simple fleets by arithmetic, and the promises that hold in all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from idletrain.simulation.engine import Outcome, Policy, Simulation, Work
from idletrain.simulation.fleet import Fleet

POLICIES: tuple[Policy, ...] = ("reissue", "salvage", "rolling")


def work(policy: Policy = "reissue", **changes: Any) -> Work:
    settings = {"subnets": 4, "local_steps": 100, "step_seconds": 0.1, "pull_seconds": 0.5, "push_seconds": 0.5}
    return Work(policy=policy, **(settings | {"commit_seconds": 0.25, "progress_seconds": 2.0} | changes))


def simulate(work: Work, fleet: Fleet, seconds: float) -> Outcome:
    return Simulation(work, fleet).run(seconds)


def test_a_calm_round_takes_a_pull_all_steps_a_push_and_a_commit() -> None:
    outcome = simulate(work(), Fleet(nodes=4), 10 * (0.5 + 10 + 0.5 + 0.25) + 0.01)
    assert outcome.rounds == 10
    assert outcome.steps == 10 * 4 * 100
    assert outcome.steps_a_neuron == 1000
    assert outcome.goodput == pytest.approx(10 / 11.25, abs=0.001)
    assert outcome.lost == 0


def test_without_rounds_calm_nodes_train_all_the_time_once_they_have_begun() -> None:
    outcome = simulate(work("rolling", subnets=8, commit_seconds=0.02), Fleet(nodes=4), 600)
    assert outcome.goodput > (600 - 0.5 - 10) / 600  # the first pull, and what is under way at the end
    assert outcome.steps_a_neuron == pytest.approx(outcome.steps / 8 / 1.5, rel=0.01)


def test_one_slow_node_holds_a_round_up_and_no_lane() -> None:
    trace = tuple((0.0, name, True) for name in "abcd")
    fleet = Fleet(nodes=4, changes=trace)
    slow = {policy: _with_slow_node(policy, fleet) for policy in ("reissue", "rolling")}
    assert slow["reissue"].goodput < 0.6
    assert slow["rolling"].goodput > 0.9


def _with_slow_node(policy: Policy, fleet: Fleet) -> Any:
    class OneSlow(Fleet):
        def pace(self, node: str) -> float:
            return 20.0 if node == "a" else 1.0

    return simulate(work(policy, subnets=4 if policy == "reissue" else 8), OneSlow(nodes=4, changes=fleet.changes), 900)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("notice", [0.0, 20.0])
def test_under_churn_steps_count_once_and_the_same_seed_gives_the_same_run(policy: Policy, notice: float) -> None:
    fleet = Fleet(nodes=6, stay_seconds=60.0, return_seconds=15.0, notice_seconds=notice, spread=0.2)
    one, again = (simulate(work(policy, subnets=8), fleet, 900) for _ in range(2))
    assert one == again
    assert one.lost > 50
    assert 0.2 < one.goodput < 1.0
    assert one.useful_seconds < one.alive_seconds
    trained = one.useful_seconds / 0.1
    assert one.steps == pytest.approx(trained, rel=0.2), "of nodes with a pace of about one"


@pytest.mark.parametrize("policy", POLICIES)
def test_more_losses_make_a_lower_goodput(policy: Policy) -> None:
    subnets = 10 if policy == "rolling" else 8  # in rounds, more than nodes take two turns
    found = [
        simulate(work(policy, subnets=subnets), Fleet(nodes=8, stay_seconds=stay, return_seconds=5.0), 1800).goodput
        for stay in (math.inf, 600.0, 60.0)
    ]
    assert found == sorted(found, reverse=True)


def test_without_rounds_the_goodput_under_churn_is_the_highest() -> None:
    fleet = Fleet(nodes=8, stay_seconds=120.0, return_seconds=10.0, spread=0.2)
    found = {policy: simulate(work(policy, subnets=10, commit_seconds=0.02), fleet, 1800) for policy in POLICIES}
    assert found["rolling"].goodput > 1.1 * max(found["reissue"].goodput, found["salvage"].goodput)


def test_a_thousand_nodes_take_seconds() -> None:
    """No event looks at all nodes: ten times as many take ten times as long."""
    simulation = Simulation(work(subnets=1000), Fleet(nodes=1000))
    outcome = simulation.run(25.0)
    assert outcome.rounds == 2
    assert outcome.events < 20 * 1000
