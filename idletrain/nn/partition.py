"""A round's split of every neuron group into disjoint blocks, one a subnet (IST, arXiv 1910.02120, section 3).

Pure: a function of the seed, the round and the shares. Every process draws it for itself, so no index travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from idletrain.nn.randomness import generator

Mask = NDArray[np.bool_]


def widths(size: int, shares: Sequence[float]) -> list[int]:
    """Neurons of a group of `size` for every subnet, by largest remainder, at least one each.

    Args:
        size: Neurons in the group.
        shares: Each subnet's share of every group, in (0, 1]; they add up to at most 1.

    Raises:
        ValueError: there are more subnets than neurons, or the shares add up to more than 1.
    """
    if len(shares) > size:
        raise ValueError(f"{len(shares)} subnets cannot share {size} neurons")
    if sum(shares) > 1 + 1e-9:
        raise ValueError(f"shares add up to {sum(shares):.3f}, more than the network")
    total = min(size, max(len(shares), round(size * sum(shares))))
    result = [max(1, math.floor(size * share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (math.floor(size * shares[k]) - size * shares[k], k))
    for k in by_remainder:
        result[k] += sum(result) < total
    while sum(result) > total:  # the floor of one neuron was given to subnets too narrow for it
        result[result.index(max(result))] -= 1
    return result


def draw(seed: int, round_: int, sizes: Sequence[int], shares: Sequence[float]) -> list[Mask]:
    """The members of every subnet in one round.

    Shares that add up to less than 1 leave neurons out; a permutation is then used for as many rounds as
    it takes to reach all of it, so that every neuron has its turn.

    Args:
        seed: The run's seed.
        round_: The round, from 0.
        sizes: Neurons of each group.
        shares: Each subnet's share of every group.

    Returns:
        For every subnet a mask `[sum(sizes)]` over the neurons of all groups, one group after another.
    """
    masks = [np.zeros(sum(sizes), dtype=np.bool_) for _ in shares]
    offset = 0
    for group, size in enumerate(sizes):
        counts = widths(size, shares)
        covered = sum(counts)
        rounds_to_cover = -(-size // covered)
        cycle, turn = divmod(round_, rounds_to_cover)
        order = np.roll(generator(seed, "partition", group, cycle).permutation(size), -turn * covered)
        start = 0
        for mask, count in zip(masks, counts, strict=True):
            mask[offset + order[start : start + count]] = True
            start += count
        offset += size
    return masks
