"""Split every neuron group into blocks, one per subnet, in each round.

They are disjoint (IST, arXiv 1910.02120, section 3), or overlap so that every neuron is in the same number of subnets
(arXiv 2507.09029).

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
    """A subnet's part of one group: a range of the group's neurons in a round's order, which continues at its begin.

    Attributes:
        start: Place of its first neuron in the order.
        count: Number of its neurons.
        neurons_used: Number of neurons that the round's subnets have together; those behind it rest.
    """

    start: int
    count: int
    neurons_used: int


def widths(size: int, shares: Sequence[float], copies: int = 1) -> list[int]:
    """Divide a group's neurons among subnets by largest remainder, at least one each; return every subnet's number.

    Args:
        size: Number of neurons in the group.
        shares: Each subnet's share of every group, in (0, 1]; their sum is at most `copies`.
        copies: Number of subnets that every neuron in use is in; at most the number of subnets.

    Raises:
        ValueError: there are more subnets than neurons and copies allow, or the shares add up to more than `copies`.
    """
    if len(shares) > size * copies:
        raise ValueError(f"{len(shares)} subnets cannot share {size} neurons in {copies} copies")
    if sum(shares) > copies + 1e-9:
        raise ValueError(f"shares add up to {sum(shares):.3f}, more than {copies} networks")
    result = _widths_of_shares(size, shares, copies)
    return result if copies == 1 else _covering_alike(result, copies)


def _widths_of_shares(size: int, shares: Sequence[float], copies: int) -> list[int]:
    total = min(size * copies, max(len(shares), round(size * sum(shares))))
    result = [max(1, math.floor(size * share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (math.floor(size * shares[k]) - size * shares[k], k))
    for k in by_remainder[: max(0, total - sum(result))]:
        result[k] += 1
    while sum(result) > total:  # subnets with less than one neuron were rounded up to one
        result[result.index(max(result))] -= 1
    return result


def _covering_alike(counts: list[int], copies: int) -> list[int]:
    """Return the counts, lowered or raised by as little as lets as many subnets as copies have every neuron in use."""
    used = -(-len(counts) // copies)  # the fewest, with one neuron for every subnet
    while sum(min(count, used + 1) for count in counts) >= copies * (used + 1):
        used += 1
    counts = [min(count, used) for count in counts]
    while sum(counts) > copies * used:
        counts[counts.index(max(counts))] -= 1
    while sum(counts) < copies * used:
        counts[counts.index(min(counts))] += 1
    return counts


def blocks(sizes: Sequence[int], shares: Sequence[float], copies: int = 1) -> list[tuple[Block, ...]]:
    """Return every subnet's block of every group.

    Blocks follow each other around the circle of the neurons in use, `copies` times (the rule of McNaughton, 1959): no
    block is longer than the circle, so every neuron is in exactly `copies` of them.

    Args:
        sizes: Number of neurons of each group.
        shares: Each subnet's share of every group.
        copies: Number of subnets that every neuron in use is in.

    Raises:
        ValueError: as `widths`.
    """
    groups = []
    for size in sizes:
        counts = widths(size, shares, copies)
        used = sum(counts) // copies
        starts = itertools.accumulate(counts, initial=0)
        groups.append([Block(start % used, count, used) for start, count in zip(starts, counts, strict=False)])
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
        rounds_to_cover = -(-size // block.neurons_used)
        cycle, turn = divmod(round_, rounds_to_cover)
        cycle = 0 if fixed and fixed[group] else cycle
        order = generator(seed, "partition", group, cycle).permutation(size)
        result.append(np.roll(order, -turn * block.neurons_used))
    return result


def members(orders: Sequence[NDArray[np.int64]], subnet: Sequence[Block]) -> Mask:
    """Return a subnet's mask `[sum of sizes]` over the neurons of all groups, one group after another."""
    mask = np.zeros(sum(len(order) for order in orders), dtype=np.bool_)
    offset = 0
    for order, block in zip(orders, subnet, strict=True):
        places = (block.start + np.arange(block.count)) % block.neurons_used
        mask[offset + order[places]] = True
        offset += len(order)
    return mask


def draw(
    seed: int,
    round_: int,
    sizes: Sequence[int],
    shares: Sequence[float],
    fixed: Sequence[bool] = (),
    copies: int = 1,
) -> list[Mask]:
    """Draw every subnet's neurons for one round.

    Args:
        seed: The run's seed.
        round_: The round, from 0.
        sizes: Number of neurons of each group.
        shares: Each subnet's share of every group.
        fixed: For each group, True to keep one permutation for all rounds; none is fixed if empty.
        copies: Number of subnets that every neuron in use is in.

    Returns:
        For every subnet, the mask that `members` returns.
    """
    subnets = blocks(sizes, shares, copies)
    orders = permutations(seed, round_, sizes, subnets[0], fixed)
    return [members(orders, subnet) for subnet in subnets]


def deal(seed: int, round_: int, sizes: Sequence[int], subnets: int, copies: int = 1) -> NDArray[np.bool_]:
    """Deal a network's residual blocks to the subnets of one round; return who has which `[subnets, blocks]`.

    Each block, the largest first and those of one size in random order, goes to the subnets with the fewest
    parameters so far. So no subnet is empty, and any two pairs of blocks of the same sizes meet with the same chance.
    How many parameters the largest subnet has is the same in every round.

    Args:
        seed: The run's seed.
        round_: The round, from 0.
        sizes: Number of parameters of each block.
        subnets: Number of subnets.
        copies: Number of subnets that every block is in, at most all.

    Raises:
        ValueError: there are more subnets than blocks and copies allow.
    """
    if subnets > len(sizes) * copies:
        raise ValueError(f"{subnets} subnets cannot share {len(sizes)} blocks in {copies} copies")
    random = generator(seed, "blocks", round_)
    shuffled = random.permutation(len(sizes))
    held = np.zeros((subnets, len(sizes)), dtype=np.bool_)
    parameters = np.zeros(subnets, dtype=np.int64)
    for block in shuffled[np.argsort([-sizes[block] for block in shuffled], kind="stable")]:
        chosen = np.lexsort((random.random(subnets), parameters))[:copies]
        held[chosen, block] = True
        parameters[chosen] += max(1, sizes[block])
    return held
