"""Disjoint blocks that cover, for any sizes and shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.ist.partition import blocks, deal, draw, members, permutations, widths

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


@st.composite
def overlaps(draw_: st.DrawFn) -> tuple[list[int], list[float], int]:
    """Group sizes, unequal shares that cover all or a part of every group, and copies."""
    subnets = draw_(st.integers(1, 8))
    copies = draw_(st.integers(1, subnets))
    sizes = draw_(st.lists(st.integers(-(-subnets // copies), 60), min_size=1, max_size=4))
    shares = draw_(st.lists(st.floats(0.01, 1), min_size=subnets, max_size=subnets))
    return sizes, [share * min(1, copies / sum(shares)) for share in shares], copies


@settings(deadline=None)
@given(overlaps(), st.integers(0, 1000), st.integers(0, 2**40))
def test_every_neuron_in_use_is_in_as_many_subnets_as_copies(
    overlap: tuple[list[int], list[float], int], round_: int, seed: int
) -> None:
    sizes, shares, copies = overlap
    masks = draw(seed, round_, sizes, shares, copies=copies)
    counts = np.sum(masks, axis=0)
    assert set(np.unique(counts)) <= {0, copies}
    for group, size in zip(np.split(counts, np.cumsum(sizes)[:-1]), sizes, strict=True):
        assert group.any()
        if abs(sum(shares) - copies) < 1e-9 and max(shares) <= 1 - 1 / size:
            assert (group == 0).sum() <= copies  # each width may be rounded down by less than one neuron
    for mask in masks:
        assert all(part.any() for part in np.split(mask, np.cumsum(sizes)[:-1]))


@pytest.mark.parametrize(("subnets", "copies"), [(4, 2), (8, 3), (5, 5)])
def test_equal_shares_that_add_up_to_the_copies_use_every_neuron(subnets: int, copies: int) -> None:
    for size in (8, 30, 61):
        masks = draw(0, 0, [size], [copies / subnets] * subnets, copies=copies)
        assert np.array_equal(np.sum(masks, axis=0), np.full(size, copies))
        assert np.ptp([mask.sum() for mask in masks]) <= 1


def test_any_two_neurons_meet_equally_often() -> None:
    rounds, size, subnets, copies = 4000, 8, 4, 2
    met = np.zeros((size, size))
    for round_ in range(rounds):
        for mask in draw(1, round_, [size], [copies / subnets] * subnets, copies=copies):
            met += np.outer(mask, mask)
    pairs = met[~np.eye(size, dtype=bool)] / rounds
    expected = subnets * 4 * 3 / (size * (size - 1))  # four subnets of four of the eight
    assert np.abs(pairs - expected).max() < 0.1 * expected


def test_one_copy_is_a_disjoint_partition_with_the_same_blocks() -> None:
    assert blocks([20, 7], [0.5, 0.3, 0.2], copies=1) == blocks([20, 7], [0.5, 0.3, 0.2])


def test_more_subnets_than_neurons_and_copies_allow_are_refused() -> None:
    assert widths(2, [0.5] * 4, copies=2) == [1] * 4
    with pytest.raises(ValueError, match="5 subnets cannot share 2 neurons in 2 copies"):
        widths(2, [0.4] * 5, copies=2)


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
        result = widths(size, shares)
        assert min(result) >= 1
        assert sum(result) == min(size, max(len(shares), round(size * sum(shares))))
        if all(size * share >= 1 for share in shares):
            assert all(abs(width - size * share) <= 1 for width, share in zip(result, shares, strict=True))


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


@st.composite
def depths(draw_: st.DrawFn) -> tuple[list[int], int, int]:
    """Sizes of residual blocks, subnets and copies."""
    subnets = draw_(st.integers(1, 8))
    copies = draw_(st.integers(1, subnets))
    sizes = draw_(st.lists(st.integers(1, 10**6), min_size=-(-subnets // copies), max_size=30))
    return sizes, subnets, copies


@settings(deadline=None)
@given(depths(), st.integers(0, 1000), st.integers(0, 2**40))
def test_every_residual_block_is_in_as_many_subnets_as_copies_and_no_subnet_is_empty(
    depth: tuple[list[int], int, int], round_: int, seed: int
) -> None:
    sizes, subnets, copies = depth
    held = deal(seed, round_, sizes, subnets, copies)
    assert held.shape == (subnets, len(sizes))
    assert (held.sum(axis=0) == copies).all()
    assert held.any(axis=1).all()
    assert np.array_equal(held, deal(seed, round_, sizes, subnets, copies))


@settings(deadline=None)
@given(depths(), st.integers(0, 1000))
def test_subnets_of_residual_blocks_differ_by_no_more_than_the_largest_and_are_alike_in_every_round(
    depth: tuple[list[int], int, int], round_: int
) -> None:
    sizes, subnets, copies = depth
    first, other = (deal(3, r, sizes, subnets, copies) @ np.array(sizes) for r in (0, round_))
    assert first.max() - first.min() <= max(sizes)
    assert sorted(first) == sorted(other)


def test_any_two_residual_blocks_of_one_size_meet_with_the_same_chance() -> None:
    rounds, count = 3000, 6
    meetings = np.zeros((count, count))
    for round_ in range(rounds):
        held = deal(1, round_, [7] * count, 4, 2).astype(int)
        meetings += held.T @ held
    pairs = meetings[np.triu_indices(count, 1)] / rounds
    assert pairs.std() < 0.03 * pairs.mean() + 0.02
    assert pairs.min() > 0.2


def test_more_subnets_than_residual_blocks_and_copies_allow_are_refused() -> None:
    with pytest.raises(ValueError, match="5 subnets cannot share 2 blocks in 2 copies"):
        deal(0, 0, [1, 1], 5, 2)
