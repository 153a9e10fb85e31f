"""Split every neuron group into disjoint blocks, one per subnet, in each round (IST, arXiv 1910.02120, section 3).

A partition is a pure function of the seed, the round and the shares. Every process computes it, so no indices are sent:
only a subnet's blocks are, a few numbers however many subnets there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from idletrain.nn.ist.randomness import generator

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Block:
    """A subnet's part of one group: a range of the group's neurons in a round's order.

    Attributes:
        start: Place of its first neuron in the order.
        count: Number of its neurons.
        covered: Number of neurons that all subnets of the round have together.
    """

    start: int
    count: int
    covered: int


def widths(size: int, shares: Sequence[float]) -> list[int]:
    """Divide a group's neurons among subnets by largest remainder, at least one each; return every subnet's number.

    Args:
        size: Number of neurons in the group.
        shares: Each subnet's share of every group, in (0, 1]; their sum is at most 1.

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
    for k in by_remainder[: max(0, total - sum(result))]:
        result[k] += 1
    while sum(result) > total:  # subnets with less than one neuron were rounded up to one
        result[result.index(max(result))] -= 1
    return result


def blocks(sizes: Sequence[int], shares: Sequence[float]) -> list[tuple[Block, ...]]:
    """Return every subnet's block of every group.

    Args:
        sizes: Number of neurons of each group.
        shares: Each subnet's share of every group.

    Raises:
        ValueError: as `widths`.
    """
    groups = []
    for size in sizes:
        counts = widths(size, shares)
        starts = itertools.accumulate(counts, initial=0)
        groups.append([Block(start, count, sum(counts)) for start, count in zip(starts, counts, strict=False)])
    return [tuple(group[k] for group in groups) for k in range(len(shares))]


def permutations(
    seed: int, round_: int, sizes: Sequence[int], subnet: Sequence[Block], fixed: Sequence[bool] = ()
) -> list[NDArray[np.int64]]:
    """Return every group's neurons `[size]` in a round's order, the same for all subnets.

    Shares with a sum below 1 leave neurons out. A permutation is then used for as many rounds as it takes to train each
    of its neurons once. `fixed` groups keep one permutation for all rounds.
    """
    result = []
    for group, (size, block) in enumerate(zip(sizes, subnet, strict=True)):
        rounds_to_cover = -(-size // block.covered)
        cycle, turn = divmod(round_, rounds_to_cover)
        cycle = 0 if fixed and fixed[group] else cycle
        order = generator(seed, "partition", group, cycle).permutation(size)
        result.append(np.roll(order, -turn * block.covered))
    return result


def members(orders: Sequence[NDArray[np.int64]], subnet: Sequence[Block]) -> Mask:
    """Return a subnet's mask `[sum of sizes]` over the neurons of all groups, one group after another."""
    mask = np.zeros(sum(len(order) for order in orders), dtype=np.bool_)
    offset = 0
    for order, block in zip(orders, subnet, strict=True):
        mask[offset + order[block.start : block.start + block.count]] = True
        offset += len(order)
    return mask


def draw(
    seed: int, round_: int, sizes: Sequence[int], shares: Sequence[float], fixed: Sequence[bool] = ()
) -> list[Mask]:
    """Draw every subnet's neurons for one round.

    Args:
        seed: The run's seed.
        round_: The round, from 0.
        sizes: Number of neurons of each group.
        shares: Each subnet's share of every group.
        fixed: For each group, True to keep one permutation for all rounds; none is fixed if empty.

    Returns:
        For every subnet, the mask that `members` returns.
    """
    subnets = blocks(sizes, shares)
    orders = permutations(seed, round_, sizes, subnets[0], fixed)
    return [members(orders, subnet) for subnet in subnets]
