"""One sentence of a fabric, and whether two differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.errors import JobError
from idletrain.fabric.analysis import compare
from idletrain.fabric.analysis.compare import ComparisonOutcome
from idletrain.fabric.analysis.samples import Fabric, Point, StencilSample, TrainingSample

MBIT = 1e6 / 8


def fabric(rate: float, seed: int, noise: float = 0.01, count: int = 4, **about: Any) -> Fabric:
    """Links of a rate with noise, and steps that follow from them."""
    chance = np.random.default_rng(seed)
    nodes = [
        {"name": f"n{k}", "host": f"h{k}", "mtu": 1500, "cpu": "a", "cores": 2, "gpus": [], "torch": "2", "threads": 1}
        for k in range(count)
    ]
    links = [
        Point("one way", "socket", a, b, tuple(rate * chance.normal(1, noise, 20)))
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    exchange = 2e6 / rate
    compute, communicate, step = (
        tuple(t * chance.normal(1, noise, 15)) for t in (0.01, exchange, 0.01 + 0.9 * exchange)
    )
    training = [TrainingSample("gloo", "mlp", count, 32, 2_000_000, (2_000_000,), compute, communicate, step)]
    return Fabric({"preset": "quick", "version": "1", **about}, nodes, links, training=training)


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_same_fabric_twice_shows_no_significant_effect(seed: int) -> None:
    differences = compare.compare(fabric(100 * MBIT, seed), fabric(100 * MBIT, seed + 5000))
    assert {d.outcome for d in differences} == {ComparisonOutcome.NO_EFFECT}
    assert compare.overall(differences).startswith("No significant effect in 2 of 2 figures")


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_tenth_less_is_noticed(seed: int) -> None:
    differences = compare.compare(fabric(100 * MBIT, seed), fabric(90 * MBIT, seed + 5000))
    assert {d.outcome for d in differences} == {ComparisonOutcome.DIFFERENT}
    sentence = compare.overall(differences)
    assert "The two differ in 2 of 2 figures, most of all: step over computation, mlp" in sentence
    assert "worse" in sentence


def test_better_is_called_better() -> None:
    (link,) = [
        d for d in compare.compare(fabric(90 * MBIT, 1), fabric(100 * MBIT, 2)) if d.what == "one way over socket"
    ]
    assert link.ratio == pytest.approx(1.11, abs=0.02)
    assert "the second is 11% better" in link.sentence


def test_a_spread_beyond_the_difference_is_no_verdict() -> None:
    differences = compare.compare(fabric(100 * MBIT, 1, 0.3), fabric(90 * MBIT, 2, 0.3))
    (step,) = [d for d in differences if d.what.startswith("step")]
    assert step.outcome is ComparisonOutcome.NO_VERDICT
    assert "no verdict, as samples spread by" in step.sentence


def pushes(rate: float, cpu: float) -> Fabric:
    """Of two nodes, and how many seconds of processors a second of it takes."""
    point = Point("one way", "push", 0, 1, tuple(rate * (1 + k / 1000) for k in range(9)), 1, 10**6, cpu * 1e6 / rate)
    return replace(fabric(100 * MBIT, 1), points=[point], training=[])


def test_what_processors_took_longer_for_is_not_the_fabric_s_doing() -> None:
    (difference,) = compare.compare(pushes(1e6, 0.3), pushes(0.91e6, 0.45))
    assert difference.outcome is ComparisonOutcome.NO_VERDICT
    assert "processors differ by 15% of the time" in difference.sentence
    (difference,) = compare.compare(pushes(1e6, 0.3), pushes(0.91e6, 0.3))
    assert difference.outcome is ComparisonOutcome.DIFFERENT


@pytest.mark.parametrize(("hosts", "compared"), [(4, True), (2, True), (1, False)])
def test_a_stencil_is_compared_where_every_node_has_its_cores(hosts: int, compared: bool) -> None:
    one, steps = fabric(100 * MBIT, 1), tuple(np.random.default_rng(2).normal(1, 0.01, 15))
    nodes = [{**node, "host": k % hosts} for k, node in enumerate(one.nodes)]  # of two cores each
    both = replace(one, nodes=nodes, stencil=[StencilSample("gloo", "weak", True, 4, 1000, steps, steps, steps)])
    figures = [difference.what for difference in compare.compare(both, both)]
    assert any(what.startswith("stencil") for what in figures) == compared
    assert any(what.startswith("one way") for what in figures)


def test_too_few_samples_are_not_compared() -> None:
    few = [replace(one, step=one.step[:6]) for one in fabric(100 * MBIT, 1).training]
    differences = compare.compare(replace(fabric(100 * MBIT, 1), training=few), fabric(50 * MBIT, 2))
    assert {difference.what for difference in differences} == {"one way over socket"}


def test_two_without_common_figures_get_no_verdict() -> None:
    empty = replace(fabric(100 * MBIT, 1), points=[], training=[])
    assert compare.compare(empty, empty) == []
    assert compare.overall([]).startswith("No verdict")


def test_unlike_runs_are_refused_with_what_differs() -> None:
    first, second = fabric(100 * MBIT, 1), fabric(100 * MBIT, 2, count=3, preset="full")
    with pytest.raises(JobError) as caught:
        compare.compare(first, second)
    assert "cannot be compared" in str(caught.value)
    assert "preset (quick and full)" in str(caught.value)
    assert "number of nodes (4 and 3)" in str(caught.value)


def test_other_hardware_is_unlike_and_another_link_is_not() -> None:
    first, second = fabric(100 * MBIT, 1), fabric(100 * MBIT, 2)
    second = replace(second, nodes=[{**node, "cpu": "b", "mtu": 9000} for node in second.nodes])
    assert compare.unlike(first, second) == ["cpu (a and b)"]


def test_a_fabric_in_one_sentence() -> None:
    sentence = compare.sentence(fabric(100 * MBIT, 1))
    assert sentence.startswith("Between these 4 nodes, with links of 10")
    assert "0 of 1 trainings compute for at least 90% of their steps" in sentence
    assert "mlp, batch 32, gloo gives 9" in sentence
    assert "would need" in sentence


def test_a_fabric_that_is_fast_enough() -> None:
    sentence = compare.sentence(fabric(1e6 * MBIT, 1))
    assert "1 of 1 trainings" in sentence
    assert "the network has no significant effect" in sentence


def test_one_node_gets_no_verdict() -> None:
    assert compare.sentence(Fabric({}, [{"name": "a"}])).startswith("No verdict: there is no second node")


@pytest.mark.parametrize(("rate", "text"), [(12.5e6, "100 Mbit/s"), (125e6, "1 Gbit/s"), (3.125e9, "25 Gbit/s")])
def test_rates_are_reported_as_people_say_them(rate: float, text: str) -> None:
    assert compare.rate_text(rate) == text
