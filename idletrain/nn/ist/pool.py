"""Hand out neurons to subnets that begin and end at any time: each gets what no other holds and few have trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.randomness import generator


class NeuronPool:
    """The neurons of all groups, one group after another: who is free, and how far each was trained.

    A draw is a pure function of the seed, its labels, and the draws and returns before it.

    Args:
        seed: The run's seed.
        sizes: Number of neurons of each group.

    Attributes:
        steps: Local steps that each neuron has been trained for `[neurons]`.
        is_free: Whether no subnet holds it `[neurons]`.
    """

    def __init__(self, seed: int, sizes: Sequence[int]) -> None:
        self._seed, self._sizes = seed, tuple(sizes)
        self.steps = np.zeros(sum(sizes), dtype=np.int64)
        self.is_free = np.ones(sum(sizes), dtype=np.bool_)

    def draw(self, counts: Sequence[int], *labels: int) -> Mask:
        """Take neurons out of the pool: those with the fewest steps first, in random order where these are equal.

        Args:
            counts: How many of each group.
            labels: What the draw is for; two draws with the same labels are alike.

        Returns:
            The mask of the drawn neurons `[neurons]`.

        Raises:
            ValueError: a group has fewer free neurons.
        """
        drawn = np.zeros_like(self.is_free)
        start = 0
        for group, (size, count) in enumerate(zip(self._sizes, counts, strict=True)):
            free = start + np.flatnonzero(self.is_free[start : start + size])
            if count > len(free):
                raise ValueError(f"{count} of {len(free)} free neurons of group {group}")
            order = generator(self._seed, "pool", group, *labels).permutation(free)
            drawn[order[np.argsort(self.steps[order], kind="stable")][:count]] = True
            start += size
        self.is_free &= ~drawn
        return drawn

    def give_back(self, members: Mask, steps: int) -> None:
        """Put neurons back that were trained for so many more steps."""
        self.steps[members] += steps
        self.is_free |= members
