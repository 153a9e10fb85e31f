"""One sentence of a fabric, and whether two differ."""

from __future__ import annotations

import itertools
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
    assert "processors differ by 18%" in difference.sentence
    assert "measure both again when the machines are idle" in compare.overall([difference])
    (difference,) = compare.compare(pushes(1e6, 0.3), pushes(0.91e6, 0.3))
    assert difference.outcome is ComparisonOutcome.DIFFERENT


class BusyMachine:
    """A machine of two nodes beside other work, whose speed follows a course over a look's minute.

    Args:
        course: `calm`, `busy` all the time, `drift` to busier or calmer, or `bursts` of seconds.
        seed: Of its noise.
    """

    def __init__(self, course: str, seed: int) -> None:
        self._chance = chance = np.random.default_rng(seed)
        at, level, switches = 0.0, 0.0, []
        ends = chance.uniform(0, 0.5, 2)
        while at < 60:
            switches.append((at, level))
            at += chance.exponential(3.0)
            level = 0.0 if level else 0.5
        self._taken: dict[str, Any] = {
            "calm": lambda t: 0.0 * t,
            "busy": lambda t: ends[0] + 0.0 * t,
            "drift": lambda t: ends[0] + (ends[1] - ends[0]) * t / 60,
            "bursts": lambda t: np.array([level for at, level in switches])[
                np.searchsorted([at for at, _ in switches], t, "right") - 1
            ],
        }
        self._course = course

    def taken(self, at: Any) -> Any:
        """What others take of the processors at some seconds."""
        return self._taken[self._course](np.asarray(at))

    def slower(self, seconds: float, begin: float, end: float, count: int) -> tuple[float, ...]:
        """Samples of what takes so long on an idle machine, evenly between two moments."""
        at = np.linspace(begin, end, count)
        return tuple(seconds / (1 - self.taken(at)) * self._chance.lognormal(0, 0.02, count))

    def look(self) -> Fabric:
        """A quick look, in its order."""
        rates = [tuple(1 / t for t in self.slower(1e-9, at, at + 1, 20)) for at in (1.0, 2.0)]
        points = [Point("one way", "socket", n, 1 - n, rate) for n, rate in enumerate(rates)]
        points += [Point("round trip", "socket", n, 1 - n, self.slower(1e-4, n + 1, n + 1.01, 30)) for n in (0, 1)]
        pulls = [tuple(1 / t for t in self.slower(4e-9, 7, 9, 8))]
        points += [Point("one way", "pull", 0, 1, pulls[0])]
        parts = [self.slower(0.01, 25, 25.7, 8), self.slower(0.004, 26, 26.7, 8), self.slower(0.013, 27, 27.7, 8)]
        training = [TrainingSample("gloo", "mlp", 2, 32, 2_000_000, (2_000_000,), *parts)]
        quiet = float(max(self.taken([0.5, 3.5, 6.5, 10.0, 55.0])))
        pace = float(np.mean(self.slower(0.005, 0.0, 0.3, 30)))
        node = {"cpu": "a", "cores": 2, "torch": "2", "threads": 1, "host": "h", "others_share": quiet}
        nodes = [{**node, "name": f"n{n}", "pace_seconds": pace} for n in (0, 1)]
        return Fabric({"preset": "quick", "version": "1"}, nodes, points, training=training)


@pytest.mark.parametrize("course", ["busy", "drift", "bursts"])
def test_two_looks_at_the_same_links_of_a_busy_machine_differ_in_no_more_than_one_pair_of_twenty(course: str) -> None:
    """With the other work in one look or both; a pair differs if any of its figures does."""
    pairs = [
        (BusyMachine(course, 2 * n).look(), BusyMachine((course, "calm")[n % 2], 2 * n + 1).look()) for n in range(40)
    ]
    outcomes = [{d.outcome for d in compare.compare(*pair)} for pair in pairs]
    assert sum(ComparisonOutcome.DIFFERENT in of_pair for of_pair in outcomes) <= 2
    assert any(ComparisonOutcome.NO_VERDICT in of_pair for of_pair in outcomes)


@pytest.mark.parametrize(
    ("others", "pace", "outcome"),
    [
        (0.03, 1.03, ComparisonOutcome.DIFFERENT),
        (0.2, 1.0, ComparisonOutcome.NO_VERDICT),
        (0.0, 1.2, ComparisonOutcome.NO_VERDICT),
    ],
)
def test_what_processors_may_account_for_gets_no_verdict(
    others: float, pace: float, outcome: ComparisonOutcome
) -> None:
    first, second = (
        replace(one, nodes=[{**node, "others_share": share, "pace_seconds": seconds} for node in one.nodes])
        for one, share, seconds in ((fabric(100 * MBIT, 1), 0.0, 0.005), (fabric(90 * MBIT, 2), others, 0.005 * pace))
    )
    assert {d.outcome for d in compare.compare(first, second)} == {outcome}


def test_a_link_that_is_far_slower_is_noticed_beside_other_work() -> None:
    one, other = BusyMachine("busy", 1).look(), BusyMachine("calm", 2).look()
    points = [replace(p, samples=tuple(s / 10 for s in p.samples)) if p.what == "one way" else p for p in one.points]
    outcomes = {d.what: d.outcome for d in compare.compare(other, replace(one, points=points))}
    assert outcomes["one way over socket"] is ComparisonOutcome.DIFFERENT


def test_the_order_of_two_looks_changes_no_verdict() -> None:
    looks = [BusyMachine("bursts", seed).look() for seed in range(8)]
    for first, second in itertools.pairwise(looks):
        there, back = compare.compare(first, second), compare.compare(second, first)
        assert [d.outcome is ComparisonOutcome.DIFFERENT for d in there] == [
            d.outcome is ComparisonOutcome.DIFFERENT for d in back
        ]


def test_a_link_that_is_ten_times_faster_is_noticed_though_processors_have_more_to_do() -> None:
    slow, fast = pushes(125e6, 0.125), pushes(1250e6, 1.25)  # a second of a processor for 10^9 bytes
    assert [d.outcome for d in compare.compare(slow, fast)] == [ComparisonOutcome.DIFFERENT]
    assert [d.outcome for d in compare.compare(fast, slow)] == [ComparisonOutcome.DIFFERENT]


def test_a_slow_link_takes_so_little_of_processors_that_other_work_explains_no_tenth_of_it() -> None:
    slow, slower = pushes(100 * MBIT, 0.05), pushes(90 * MBIT, 0.05)
    others = [{**node, "others_share": 0.2} for node in slow.nodes]
    (difference,) = compare.compare(replace(slow, nodes=others), slower)
    assert difference.outcome is ComparisonOutcome.DIFFERENT
    (difference,) = compare.compare(replace(pushes(100 * MBIT, 0.9), nodes=others), pushes(90 * MBIT, 0.9))
    assert difference.outcome is ComparisonOutcome.NO_VERDICT


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
