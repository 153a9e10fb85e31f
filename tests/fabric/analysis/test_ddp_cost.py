"""Arithmetic of links and steps, against a study that measured both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.fabric.analysis import ddp_cost
from idletrain.fabric.analysis.ddp_cost import DdpStep

# Horovod's benchmark page: 128 servers with 4 Pascal GPUs each, 25 Gbit/s, batches of 64 a GPU; scaling efficiency on
# 512 GPUs 90 % for ResNet-101 and Inception-v3, 68 % for VGG-16. A ring crosses each server's link once in and once
# out, whatever the GPUs behind it. Gradients: 178.6 and 553.5 MB (research/papers.md, 5.3).
LINK = 25e9 / 8
SERVERS = 128
# Steps: the same page has 1656.82 images a second on 16 GPUs for ResNet-101, and none for VGG-16; for that TensorFlow's
# own benchmark of a P100 is taken (154 a second, from memory).
RESNET_101 = DdpStep(64 * 16 / 1656.82, 178.6e6, SERVERS)
VGG_16 = DdpStep(64 / 154, 553.5e6, SERVERS)
steps = st.builds(DdpStep, st.floats(1e-4, 100), st.floats(1e3, 1e10), st.integers(2, 1000), st.floats(0, 1))


def test_the_pattern_of_horovod_s_figures_comes_out() -> None:
    resnet, vgg = ddp_cost.efficiency_at(RESNET_101, LINK), ddp_cost.efficiency_at(VGG_16, LINK)
    assert resnet == pytest.approx(0.90, abs=0.03)
    assert vgg == pytest.approx(0.68, abs=0.03)


def test_vgg_needs_several_times_the_link_that_resnet_does() -> None:
    assert ddp_cost.break_even(RESNET_101) < LINK * 1.05
    assert ddp_cost.break_even(VGG_16) > 3 * LINK


@given(steps)
def test_at_the_break_even_a_step_is_as_efficient_as_wanted(step: DdpStep) -> None:
    speed = ddp_cost.break_even(step)
    assert ddp_cost.efficiency_at(step, speed) == pytest.approx(ddp_cost.EFFICIENT, rel=1e-6)
    assert ddp_cost.efficiency_at(step, 1.01 * speed) >= ddp_cost.EFFICIENT


@given(steps, st.floats(1e5, 1e11))
def test_a_faster_link_never_hurts(step: DdpStep, speed: float) -> None:
    slow, fast = ddp_cost.efficiency_at(step, speed), ddp_cost.efficiency_at(step, 2 * speed)
    assert 0 < slow <= fast <= 1


def test_one_node_needs_no_link() -> None:
    assert ddp_cost.break_even(DdpStep(1.0, 1e6, 1)) == 0


@pytest.mark.parametrize(
    ("operation", "nodes", "factor"),
    [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 4, 0.75), ("reduce-scatter", 4, 0.75)],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, nodes: int, factor: float) -> None:
    assert ddp_cost.bus_factor(operation, nodes) == factor
    assert ddp_cost.bus_factor("broadcast", nodes) == 1


def test_what_does_not_fit_behind_the_backward_pass_is_exposed() -> None:
    assert ddp_cost.exposed_seconds(DdpStep(0.3, 1, 2, overlap=1.0), 1.0) == pytest.approx(0.8)
    assert ddp_cost.exposed_seconds(DdpStep(3.0, 1, 2, overlap=1.0), 1.0) == 0
    assert ddp_cost.exposed_seconds(DdpStep(3.0, 1, 2, overlap=0.25), 1.0) == 0.75


@pytest.mark.parametrize(
    ("compute", "exchange", "step", "overlap"),
    [(1, 1, 2, 0), (1, 1, 1.5, 0.5), (1, 1, 1, 1), (1, 1, 3, 0), (1, 0, 1, 1)],
)
def test_overlap_is_what_was_hidden(compute: float, exchange: float, step: float, overlap: float) -> None:
    assert ddp_cost.overlap_of(compute, exchange, step) == overlap


@given(st.floats(1e-3, 10), st.floats(1e-3, 10), st.floats(0, 1))
def test_overlap_and_exposure_undo_each_other(compute: float, exchange: float, overlap: float) -> None:
    step = DdpStep(compute, 1, 2, overlap)
    exposed = ddp_cost.exposed_seconds(step, exchange)
    overlap = ddp_cost.overlap_of(compute, exchange, compute + exposed)
    assert ddp_cost.exposed_seconds(DdpStep(compute, 1, 2, overlap), exchange) == pytest.approx(exposed, abs=1e-9)
