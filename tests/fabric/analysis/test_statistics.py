"""From samples to figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.fabric.analysis import statistics
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample
from idletrain.fabric.measuring.presets import OPERATIONS

MTU = 1500
PAYLOAD = (MTU - 52) / (MTU + 14)  # of what is on the wire


def nodes(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"n{k}", "mtu": MTU, **more} for k in range(count)]


def link(source: int, target: int, rate: float) -> Point:
    return Point("one way", "socket", source, target, (rate, rate), moved_bytes=10**9, cpu_seconds=0.5)


def links(count: int, rate: float, odd: dict[int, float] | None = None) -> list[Point]:
    odd = odd or {}
    return [link(a, b, min(odd.get(a, rate), odd.get(b, rate))) for a in range(count) for b in range(count) if a != b]


def test_a_link_s_rate_is_on_the_wire() -> None:
    fabric = Fabric({}, nodes(3), links(3, 12.5e6 * PAYLOAD))
    assert statistics.link_rate(fabric) == pytest.approx(12.5e6)
    assert statistics.link_rate(Fabric({}, nodes(1))) is None


def test_a_line_s_rate_is_the_slowest_card_s_or_what_was_measured() -> None:
    points = links(2, 12.5e6 * PAYLOAD)
    cards = [{**node, "link_bits_per_second": speed} for node, speed in zip(nodes(2), (10**9, 10**8), strict=True)]
    assert statistics.line_rate(Fabric({}, cards, points)) == 10**8 / 8
    assert statistics.line_rate(Fabric({}, nodes(2), points)) == pytest.approx(12.5e6)


def test_a_card_s_speed_says_nothing_of_nodes_on_one_machine() -> None:
    points = links(2, 12.5e6 * PAYLOAD)
    one_machine = nodes(2, link_bits_per_second=10**9, host="h")
    assert statistics.line_rate(Fabric({}, one_machine, points)) == pytest.approx(12.5e6)


def test_bytes_within_a_machine_say_nothing_of_the_links_between_several() -> None:
    two_by_two = [{**node, "host": f"h{n // 2}", "link_bits_per_second": 10**9} for n, node in enumerate(nodes(4))]
    points = [
        link(a, b, 3e9 if a // 2 == b // 2 else 124e6 * PAYLOAD) for a in range(4) for b in range(4) if a != b
    ] + [Point("incast", "socket", 1, 0, (1e9, 60e6, 60e6), 3)]
    assert statistics.line_rate(Fabric({}, two_by_two, points)) == 10**9 / 8
    unknown = [{**node, "link_bits_per_second": None} for node in two_by_two]
    assert statistics.line_rate(Fabric({}, unknown, points)) == pytest.approx(124e6)


def test_a_line_s_rate_is_no_less_than_what_the_slowest_node_s_link_was_seen_to_carry() -> None:
    cards = nodes(3, link_bits_per_second=10**8)
    points = [
        *links(3, 10e6 * PAYLOAD, odd={2: 5e6 * PAYLOAD}),
        Point("flows", "socket", 0, 1, (10e6 * PAYLOAD,) * 3, 3),
        Point("incast", "socket", 0, 2, (4e6 * PAYLOAD,) * 2, 2),
    ]
    assert statistics.line_rate(Fabric({}, nodes(3), points)) == pytest.approx(8e6)
    assert statistics.line_rate(Fabric({}, nodes(3), points[:-1])) == pytest.approx(5e6)
    assert statistics.line_rate(Fabric({}, cards, points)) == 10**8 / 8
    assert statistics.line_rate(Fabric({}, cards[:2], points[-2:-1])) == pytest.approx(30e6)  # such a card is virtual
    assert statistics.line_rate(Fabric({}, nodes(3))) is None


def test_connections_at_once_are_added_up_and_transfers_are_not() -> None:
    assert statistics.rate(Point("incast", "socket", 1, 0, (3.0, 4.0, 5.0))) == 12
    assert statistics.rate(Point("one way", "socket", 1, 0, (3.0, 4.0, 5.0))) == 4
    assert statistics.rate(Point("one way", "socket", 1, 0, (0.0, 3.0, 5.0, 9.0, 4.0))) == 4
    assert statistics.rate(Point("one way", "dask", 1, 0, (3.0, 4.0, 50.0))) == 4


def test_cpu_seconds_are_reported_per_gigabyte() -> None:
    assert statistics.cpu_per_gb(links(2, 1.0)) == pytest.approx(0.5)
    assert statistics.cpu_per_gb([]) is None


def test_the_odd_node_is_found() -> None:
    fabric = Fabric({}, nodes(8), links(8, 100.0, {5: 40.0}))
    assert statistics.outlier_nodes(fabric) == [(5, pytest.approx(0.4))]


def test_small_differences_are_not_odd_and_neither_is_one_of_two() -> None:
    assert statistics.outlier_nodes(Fabric({}, nodes(8), links(8, 100.0, {5: 95.0}))) == []
    assert statistics.outlier_nodes(Fabric({}, nodes(2), links(2, 100.0))) == []


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7), st.integers(0, 100))
def test_a_line_through_times_is_found_again(alpha: float, beta: float, seed: int) -> None:
    sizes = [1e3 * 4**i for i in range(9)]
    noise = np.random.default_rng(seed).normal(1, 0.01, len(sizes))
    fit = statistics.fitted([(s, [(alpha + beta * s) * n]) for s, n in zip(sizes, noise, strict=True)])
    assert fit is not None
    assert abs(fit.beta - beta) < max(6 * fit.beta_error, 0.05 * beta)
    assert abs(fit.alpha - alpha) < max(6 * fit.alpha_error, 0.05 * alpha)


def test_a_line_needs_three_sizes() -> None:
    assert statistics.fitted([]) is None
    assert statistics.fitted([(1, [1.0]), (2, [2.0])]) is None


def test_bandwidths_are_those_of_nccl_tests() -> None:
    operations = [CollectiveSample("gloo", "all-reduce", 4, 1_000_000, (0.1, 0.2, 0.3))]
    (bandwidth,) = statistics.bandwidths(Fabric({}, nodes(2), links(2, 10e6 * PAYLOAD), operations))
    assert bandwidth.median == 0.2
    assert bandwidth.algorithm == pytest.approx(5e6)
    assert bandwidth.bus == pytest.approx(7.5e6)
    assert bandwidth.line_share == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("operation", "share"), [("broadcast", 0.5), ("all-gather", 0.375), ("reduce-scatter", 0.375), ("all-reduce", 0.75)]
)
def test_the_share_of_the_line_is_what_each_node_s_link_carries(operation: str, share: float) -> None:
    """A broadcast's bytes go over each link once, an all-reduce's almost twice, others' but for a node's own part."""
    operations = [CollectiveSample("gloo", operation, 4, 1_000_000, (0.2,))]
    (bandwidth,) = statistics.bandwidths(Fabric({}, nodes(4), links(4, 10e6 * PAYLOAD), operations))
    assert bandwidth.line_share == pytest.approx(share)


@given(st.sampled_from(OPERATIONS), st.integers(2, 16), st.floats(1e-6, 10.0), st.floats(1e5, 1e10))
def test_no_operation_uses_more_than_the_line(operation: str, count: int, seconds: float, rate: float) -> None:
    operations = [CollectiveSample("gloo", operation, count, 4_000_000, (seconds,))]
    (bandwidth,) = statistics.bandwidths(Fabric({}, nodes(count), [link(0, 1, rate)], operations))
    assert bandwidth.line_share is not None
    assert 0 < bandwidth.line_share <= 1


def trained(nodes: int, compute: float, exchange: float | None = None, step: float | None = None) -> TrainingSample:
    return TrainingSample(
        "gloo",
        "mlp",
        nodes,
        32,
        4_000_000,
        (),
        (compute,) * 3,
        (exchange,) * 3 if exchange else (),
        (step,) * 3 if step else (),
    )


def test_what_was_measured_of_steps() -> None:
    fabric = Fabric({}, nodes(4), training=[trained(1, 0.8), trained(4, 1.0, 0.5, 1.25)])
    (cost,) = statistics.costs(fabric)
    assert cost.measured
    assert cost.exposed == pytest.approx(0.25)
    assert cost.overlap == pytest.approx(0.5)
    assert cost.efficiency == pytest.approx(0.8)
    assert cost.scaling == pytest.approx(0.64)
    assert cost.samples_per_second == pytest.approx(4 * 32 / 1.25)


def test_what_a_network_needs_is_the_same_whatever_link_it_was_measured_over() -> None:
    """Over slow links next to nothing of an exchange can be hidden, which says nothing of faster ones."""
    slow, slower = (trained(2, 0.01, seconds, 0.004 + seconds) for seconds in (0.3, 3.0))
    (over_slow,), (over_slower,) = (statistics.costs(Fabric({}, nodes(2), training=[one])) for one in (slow, slower))
    assert over_slow.efficiency > over_slower.efficiency
    assert over_slow.needed == over_slower.needed


def test_steps_that_were_too_slow_are_computed_by_the_fit() -> None:
    operations = [
        CollectiveSample("gloo", "all-reduce", 4, size, (0.001 + 1e-7 * size,) * 3) for size in (1000, 10_000, 100_000)
    ]
    fabric = Fabric({}, nodes(4), collectives=operations, training=[trained(4, 1.0)])
    (cost,) = statistics.costs(fabric)
    assert not cost.measured
    assert cost.communicate == pytest.approx(0.401, rel=0.01)
    assert cost.step == pytest.approx(1.2005, rel=0.01)


def test_without_a_fit_the_links_decide_and_without_links_nothing_is_said() -> None:
    training = [trained(4, 1.0)]
    (cost,) = statistics.costs(Fabric({}, nodes(4), links(4, 6e6 * PAYLOAD), training=training))
    assert cost.communicate == pytest.approx(1.5 * 4 / 6)
    assert statistics.costs(Fabric({}, nodes(4), training=training)) == []


def test_of_several_worlds_the_largest_counts() -> None:
    fabric = Fabric({}, nodes(4), training=[trained(2, 1.0, 0.1, 1.1), trained(4, 1.0, 0.2, 1.2)])
    assert [cost.of.nodes for cost in statistics.largest_world(statistics.costs(fabric))] == [4]


def test_a_stencil_s_efficiency_is_cells_a_second_and_node() -> None:
    one, four = (StencilSample("gloo", "weak", True, n, 1000 * n, (), (), (t,)) for n, t in ((1, 0.1), (4, 0.2)))
    gpu = replace(one, backend="nccl", step=(0.01,))
    fabric = Fabric({}, nodes(4), stencil=[gpu, one, four])
    assert statistics.stencil_efficiency(fabric, four) == pytest.approx(0.5)
    assert statistics.stencil_efficiency(Fabric({}, nodes(4), stencil=[four]), four) is None


def test_spread_and_percentiles_of_few_samples() -> None:
    assert statistics.spread([1.0, 1.0, 1.0]) == 0
    assert statistics.spread([0.0]) == 0
    assert math.isnan(statistics.median([]))
    assert math.isnan(statistics.p99([]))
