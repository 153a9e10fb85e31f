"""Draws from a pool: never twice at once, the least trained first, and all alike where the seed is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.ist.pool import NeuronPool


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(4, 30), min_size=1, max_size=4),
    lanes=st.integers(1, 4),
    order=st.lists(st.integers(0, 3), max_size=30),
    seed=st.integers(0, 5),
)
def test_each_neuron_is_with_one_subnet_and_the_least_trained_go_first(
    sizes: list[int], lanes: int, order: list[int], seed: int
) -> None:
    pool, again = NeuronPool(seed, sizes), NeuronPool(seed, sizes)
    counts = [size // (lanes + 1) or 0 for size in sizes]
    held = [pool.draw(counts, lane, 0) for lane in range(lanes)]
    assert all((mask == again.draw(counts, lane, 0)).all() for lane, mask in enumerate(held))
    for number, chosen in enumerate(order, start=1):
        lane = chosen % lanes
        pool.give_back(held[lane], number)
        before = pool.is_free.copy()
        held[lane] = pool.draw(counts, lane, number)
        assert (np.sum(held, axis=0) <= 1).all()
        assert (pool.is_free == (np.sum(held, axis=0) == 0)).all()
        start = 0
        for size, count in zip(sizes, counts, strict=True):
            own = slice(start, start + size)
            assert held[lane][own].sum() == count
            left = before[own] & ~held[lane][own]
            if count and left.any():
                assert pool.steps[own][held[lane][own]].max() <= pool.steps[own][left].min()
            start += size


def test_neurons_that_are_trained_alike_come_in_random_order() -> None:
    """So any two neurons meet: a draw is not what was drawn together before."""
    pool = NeuronPool(0, [12])
    held = [pool.draw([4], lane, 0) for lane in range(2)]
    together: set[frozenset[int]] = set()
    for number in range(1, 60):
        lane = number % 2
        pool.give_back(held[lane], 5)
        held[lane] = pool.draw([4], lane, number)
        together.add(frozenset(np.flatnonzero(held[lane]).tolist()))
    assert len(together) > 50
    assert pool.steps.max() - pool.steps.min() <= 10


def test_more_than_what_is_free_is_an_error() -> None:
    pool = NeuronPool(0, [6, 3])
    pool.draw([2, 2], 0)
    with pytest.raises(ValueError, match="2 of 1 free neurons of group 1"):
        pool.draw([2, 2], 1)
