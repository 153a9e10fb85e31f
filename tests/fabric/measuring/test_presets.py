"""Who is measured with whom, and how much."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.fabric.measuring import presets
from idletrain.fabric.measuring.presets import ALL_PAIRS, FULL, QUICK


@given(st.integers(0, 40))
def test_every_pair_of_few_nodes_and_some_of_many(nodes: int) -> None:
    pairs = presets.pairs(nodes)
    assert len(set(pairs)) == len(pairs)
    assert all(a != b for a, b in pairs)
    assert {(b, a) for a, b in pairs} == set(pairs)
    if nodes <= ALL_PAIRS:
        assert len(pairs) == max(0, nodes * (nodes - 1))
    else:
        assert len(pairs) <= 2 * presets.PARTNERS * nodes


@given(st.integers(ALL_PAIRS + 1, 1000))
def test_of_many_nodes_each_sends_and_receives_as_often_as_any_other(nodes: int) -> None:
    pairs = presets.pairs(nodes)
    sent, received = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    assert len(set(sent.values())) == len(set(received.values())) == 1
    assert sent[0] >= 2


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [
        (1, 1, []),
        (2, 1, [(0, 1), (1, 0)]),
        (3, 1, [(0, 1), (1, 2), (2, 0)]),
        (3, 2, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
        (4, 0, [(0, 1), (2, 3)]),
        (3, 0, [(0, 1), (2, 0)]),
    ],
)
def test_partners_are_next_to_each_other(nodes: int, count: int, expected: list[tuple[int, int]]) -> None:
    assert presets.partners(nodes, count) == expected


def test_streams_share_the_time_there_is_within_their_limits() -> None:
    assert presets.stream_seconds(QUICK, 2) == 1.0
    assert presets.stream_seconds(QUICK, 8) == 0.17
    assert presets.stream_seconds(FULL, 8) == 3.0
    assert presets.stream_seconds(QUICK, 1000) == 0.17


@given(st.floats(0, 1e12))
def test_a_transfer_is_whole_values_between_its_limits(rate: float) -> None:
    size = presets.transfer_bytes(QUICK, rate)
    assert size % 4 == 0
    assert 64_000 <= size <= 8_000_000


@pytest.mark.parametrize(
    ("preset", "nodes", "expected"),
    [(QUICK, 1, [1]), (QUICK, 8, [1, 8]), (FULL, 8, [1, 2, 4, 8]), (FULL, 6, [1, 2, 4, 6]), (FULL, 1, [1])],
)
def test_scaling_is_measured_at_one_and_all_nodes(
    preset: presets.FabricPreset, nodes: int, expected: list[int]
) -> None:
    assert presets.worlds(preset, nodes) == expected


@given(st.floats(1e-6, 1e3), st.floats(0.1, 100))
def test_repeats_keep_to_the_budget_or_do_not_begin(once: float, budget: float) -> None:
    count = presets.repeats(QUICK, once, budget)
    least, most = QUICK.repeats
    assert count == 0 or least <= count <= most
    assert (count == 0) == (once * least > 3 * budget)
    assert count <= least or count * once <= budget * 1.001


def test_backends_are_those_that_all_nodes_have() -> None:
    plain: dict[str, Any] = {"host": "a", "gloo": True, "nccl": False, "gpus": []}
    gpu: dict[str, Any] = {"host": "b", "gloo": True, "nccl": True, "gpus": ["H100"]}
    other = {**gpu, "host": "c"}
    assert [name for name, _ in presets.backends([plain, gpu], FULL)] == ["gloo"]
    assert [name for name, _ in presets.backends([gpu, other], QUICK)] == ["gloo", "nccl"]
    assert presets.backends([gpu], FULL)[2] == ("nccl staged", presets.STAGED)


def test_nccl_wants_a_gpu_for_each_worker_of_a_machine() -> None:
    one: dict[str, Any] = {"host": "a", "gloo": True, "nccl": True, "gpus": ["H100"]}
    two = {**one, "gpus": ["H100", "H100"]}
    assert [name for name, _ in presets.backends([one, one], QUICK)] == ["gloo"]
    assert [name for name, _ in presets.backends([two, two], QUICK)] == ["gloo", "nccl"]


@given(st.integers(1, 300))
def test_a_grid_is_cut_among_all_nodes(nodes: int) -> None:
    x, y, z = presets.dims(nodes)
    assert x * y * z == nodes
    assert x >= y >= z


@pytest.mark.parametrize(("nodes", "cut"), [(2, (2, 1, 1)), (4, (2, 2, 1)), (8, (2, 2, 2)), (12, (3, 2, 2))])
def test_parts_of_a_grid_are_as_alike_as_can_be(nodes: int, cut: tuple[int, int, int]) -> None:
    assert presets.dims(nodes) == cut


@given(st.integers(1, 100))
def test_neighbours_know_each_other(nodes: int) -> None:
    cut = presets.dims(nodes)
    for rank in range(nodes):
        for axis, side, other in presets.neighbours(rank, cut):
            assert 0 <= other < nodes
            assert (axis, -side, rank) in presets.neighbours(other, cut)


def test_a_node_inside_a_grid_has_six() -> None:
    assert len(presets.neighbours(13, (3, 3, 3))) == 6
    assert presets.neighbours(0, (1, 1, 1)) == []
