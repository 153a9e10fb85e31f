"""Disjoint blocks that cover, for any sizes and shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.ist.partition import blocks, draw, members, permutations, widths

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@st.composite
def splits(draw_: st.DrawFn, total: float | None = None) -> tuple[list[int], list[float]]:
    """Group sizes and shares, as many as the smallest group has neurons at most, adding up to `total`."""
    sizes = draw_(SIZES)
    weights = draw_(st.lists(st.floats(0.05, 1), min_size=1, max_size=min(*sizes, 8)))
    whole = draw_(st.floats(0.05, 1)) if total is None else total
    return sizes, [whole * weight / sum(weights) for weight in weights]


@settings(deadline=None)
@given(splits(total=1.0), st.integers(0, 1000), st.integers(0, 2**40))
def test_blocks_are_disjoint_cover_every_neuron_and_are_never_empty(
    split: tuple[list[int], list[float]], round_: int, seed: int
) -> None:
    sizes, shares = split
    masks = draw(seed, round_, sizes, shares)
    assert np.array_equal(np.sum(masks, axis=0), np.ones(sum(sizes)))
    for mask in masks:
        assert all(part.any() for part in np.split(mask, np.cumsum(sizes)[:-1]))


@settings(deadline=None)
@given(splits(), st.integers(0, 20), st.integers(0, 2**40))
def test_shares_below_one_reach_every_neuron_within_a_cycle(
    split: tuple[list[int], list[float]], cycle: int, seed: int
) -> None:
    sizes, shares = split
    offset = 0
    for size in sizes:
        turns = -(-size // sum(widths(size, shares)))
        rounds = [draw(seed, cycle * turns + turn, sizes, shares) for turn in range(turns)]
        seen = np.zeros(size)
        for masks in rounds:
            block = np.sum(masks, axis=0)[offset : offset + size]
            assert block.max() <= 1
            seen += block
        assert seen.min() >= 1
        offset += size


@settings(deadline=None)
@given(splits())
def test_widths_follow_the_shares_to_within_a_neuron_or_the_floor_of_one(split: tuple[list[int], list[float]]) -> None:
    sizes, shares = split
    for size in sizes:
        got = widths(size, shares)
        assert min(got) >= 1
        assert sum(got) == min(size, max(len(shares), round(size * sum(shares))))
        if all(size * share >= 1 for share in shares):
            assert all(abs(width - size * share) <= 1 for width, share in zip(got, shares, strict=True))


def test_a_draw_is_a_function_of_seed_and_round() -> None:
    first = draw(3, 5, [20, 30], [0.5, 0.5])
    assert np.array_equal(first, draw(3, 5, [20, 30], [0.5, 0.5]))
    assert not np.array_equal(first, draw(3, 6, [20, 30], [0.5, 0.5]))
    assert not np.array_equal(first, draw(4, 5, [20, 30], [0.5, 0.5]))


@settings(deadline=None)
@given(splits(), st.integers(0, 1000), st.integers(0, 2**40))
def test_a_subnet_is_drawn_from_its_own_blocks_as_among_all(
    split: tuple[list[int], list[float]], round_: int, seed: int
) -> None:
    sizes, shares = split
    for mask, mine in zip(draw(seed, round_, sizes, shares), blocks(sizes, shares), strict=True):
        assert np.array_equal(mask, members(permutations(seed, round_, sizes, mine), mine))


def test_a_draw_is_the_same_on_every_version() -> None:
    """Runs are resumed by newer versions: what round 0 of seed 0 draws must not change."""
    members = [np.flatnonzero(mask).tolist() for mask in draw(0, 0, [8], [0.5, 0.5])]
    assert members == [[0, 2, 3, 6], [1, 4, 5, 7]]


def test_more_subnets_than_neurons_are_refused() -> None:
    with pytest.raises(ValueError, match="3 subnets cannot share 2 neurons"):
        widths(2, [0.3, 0.3, 0.3])


def test_shares_above_the_network_are_refused() -> None:
    with pytest.raises(ValueError, match=r"add up to 1\.200"):
        widths(10, [0.6, 0.6])
