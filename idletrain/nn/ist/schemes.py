"""Divide the network in a round: a subnet is planned as a `SubnetSpec`, and placed and drawn by its kind's scheme.

A new kind of partition is a class with the methods of `PartitionScheme` and one line in `SCHEMES`. Specs stand in the
write-ahead log, so all subnets of a past round can be drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from idletrain.nn.ist.partition import Block, Mask, blocks, deal, draw, members, permutations

if TYPE_CHECKING:  # places travel with leases through the scheduler, which must not import torch
    from idletrain.nn.ist.groups import Layout


@dataclass(frozen=True, slots=True)
class SubnetSpec:
    """A subnet as its round plans it.

    Attributes:
        share: Share of every neuron group that it holds, in (0, 1].
        kind: Name of its scheme in `SCHEMES`, the same for all subnets of a round.
        copies: Number of the round's subnets that every neuron is in, the same for all of them.
        holders: Number of them that every residual block is in, the same for all; None where no block is left out.
    """

    share: float
    kind: str = "neurons"
    copies: int = 1
    holders: int | None = None

    @property
    def sharing(self) -> int:
        """The most of the round's subnets that train one number, of those that not all of them train."""
        return max(self.copies, self.holders or 0)


@dataclass(frozen=True, slots=True)
class SubnetPlace:
    """A subnet's place in its round's partition, small enough to be sent with a lease.

    Attributes:
        blocks: Its part of each neuron group.
        kind: Name of its scheme in `SCHEMES`.
        number: Its number among the round's subnets.
        subnets: Number of the round's subnets.
        copies: Number of them that every neuron is in.
        holders: Number of them that every residual block is in; None where no block is left out.
        listed: Its neurons one by one, as the packed bits of a mask; empty where the other attributes say which.
    """

    blocks: tuple[Block, ...] = ()
    kind: str = "neurons"
    number: int = 0
    subnets: int = 1
    copies: int = 1
    holders: int | None = None
    listed: bytes = b""


class PartitionScheme(Protocol):
    """One way to divide a network's neurons among the subnets of a round; pure functions of seed, round and specs."""

    def places(self, sizes: Sequence[int], specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        """Return every subnet's place, for groups of these sizes."""

    def masks(self, seed: int, round_: int, layout: Layout, specs: Sequence[SubnetSpec]) -> list[Mask]:
        """Return every subnet's mask over the neurons of all groups, one group after another."""

    def mask(self, seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
        """Return one subnet's mask without drawing the others."""


class NeuronScheme:
    """Gives every subnet random neurons of each group.

    Each neuron is in one subnet (IST, arXiv 1910.02120), or in as many as there are copies (arXiv 2507.09029): then any
    two neurons of a group meet with the same chance, since a round's order of them is random.
    """

    def places(self, sizes: Sequence[int], specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        """See `PartitionScheme`."""
        return [SubnetPlace(own) for own in blocks(sizes, [spec.share for spec in specs], specs[0].copies)]

    def masks(self, seed: int, round_: int, layout: Layout, specs: Sequence[SubnetSpec]) -> list[Mask]:
        """See `PartitionScheme`."""
        return draw(seed, round_, layout.sizes, [spec.share for spec in specs], layout.fixed, specs[0].copies)

    def mask(self, seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
        """See `PartitionScheme`."""
        orders = permutations(seed, round_, layout.sizes, place.blocks, layout.fixed)
        return members(orders, place.blocks)


class BlockScheme:
    """Gives every subnet whole residual blocks, whose parameters add up to about as many in each (see `deal`).

    The blocks are the neurons of the layout's first group. Where it has others, too, those within a block are divided
    among the subnets that have the block, as `NeuronScheme` does, and those outside among all.
    """

    def places(self, sizes: Sequence[int], specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        """See `PartitionScheme`."""
        del sizes  # a few numbers say all
        subnets, spec = len(specs), specs[0]
        return [SubnetPlace((), "blocks", k, subnets, spec.copies, spec.holders) for k in range(subnets)]

    def masks(self, seed: int, round_: int, layout: Layout, specs: Sequence[SubnetSpec]) -> list[Mask]:
        """See `PartitionScheme`."""
        places = self.places(layout.sizes, specs)
        held = _held(seed, round_, layout, places[0])
        return [_of_subnet(seed, round_, layout, held, place) for place in places]

    def mask(self, seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
        """See `PartitionScheme`."""
        return _of_subnet(seed, round_, layout, _held(seed, round_, layout, place), place)


def _held(seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
    """Return which of a round's subnets have which blocks `[subnets, blocks]`."""
    return deal(seed, round_, block_sizes(layout), place.subnets, place.holders or place.subnets)


def _of_subnet(seed: int, round_: int, layout: Layout, held: Mask, place: SubnetPlace) -> Mask:
    """Return the mask of a subnet that has these blocks, over them and over the neurons of all other groups."""
    parts = [
        _part_of(group.size, None if group.within is None else held[:, group.within], place)
        for group in layout.groups[1:]
    ]
    orders = permutations(seed, round_, layout.sizes[1:], parts, layout.fixed[1:])
    return np.concatenate([held[place.number], members(orders, parts)])


def _part_of(size: int, holds: Mask | None, place: SubnetPlace) -> Block:
    """Return a subnet's part of a group of neurons, divided equally among the subnets that hold its block.

    Args:
        size: Number of neurons of the group.
        holds: Which of the round's subnets have the group's block `[subnets]`; None if it is in no block.
        place: The subnet.
    """
    holders = np.arange(place.subnets) if holds is None else np.flatnonzero(holds)
    at = np.flatnonzero(holders == place.number)
    if not len(at):
        return Block(0, 0, size)
    share = min(1.0, place.copies / len(holders))
    return blocks([size], [share] * len(holders), place.copies)[int(at[0])][0]


SCHEMES: Mapping[str, PartitionScheme] = {"neurons": NeuronScheme(), "blocks": BlockScheme()}


def listed(members: Mask) -> SubnetPlace:
    """Return the place of a subnet that no partition of a round has: it lists its neurons."""
    return SubnetPlace(listed=np.packbits(members).tobytes())


def mask_of(seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
    """Return the mask of the subnet at a place, over the neurons of all groups, one group after another."""
    if place.listed:
        bits = np.frombuffer(place.listed, np.uint8)
        return np.unpackbits(bits, count=sum(layout.sizes)).astype(np.bool_)
    return SCHEMES[place.kind].mask(seed, round_, layout, place)


def block_sizes(layout: Layout) -> list[int]:
    """Return the number of parameters of each block of a layout by depth, of those that train."""
    owners = [*range(len(layout.skippable)), *(group.within for group in layout.groups[1:] for _ in range(group.size))]
    sizes = [0] * len(layout.skippable)
    for tensor in layout.tensors:
        if tensor.neurons and tensor.neurons[0] is not None and tensor.trainable:
            block = owners[int(tensor.neurons[0][0])] if tensor.neurons[0][0] >= 0 else None
            if block is not None:
                sizes[block] += math.prod(tensor.shape)
    return sizes


def holders_of(layout: Layout, subnets: int, copies: int) -> int | None:
    """Return how many of a round's subnets have each residual block of a layout; None without blocks."""
    if not layout.skippable:
        return None
    return copies if len(layout.groups) == 1 else holders_within(subnets, copies)


def holders_within(subnets: int, copies: int) -> int:
    """Return how many of a round's subnets have each residual block where they divide its neurons, too.

    It is the geometric mean of copies and subnets: a subnet has as large a part of the blocks as of each one's neurons.
    """
    return max(copies, round(math.sqrt(subnets * copies)))


def survival(holders: int | None, subnets: int) -> float:
    """Return the share of a round's subnets that have each residual block."""
    return 1.0 if holders is None else min(1.0, holders / subnets)


def specs_of(layout: Layout, shares: Sequence[float], copies: int) -> tuple[SubnetSpec, ...]:
    """Return the specs of a round whose subnets have these shares, and each neuron is in `copies` of them."""
    if holders := holders_of(layout, len(shares), copies):
        return by_blocks(len(shares), copies, holders)
    return by_neurons(shares, copies)


def by_neurons(shares: Sequence[float], copies: int = 1) -> tuple[SubnetSpec, ...]:
    """Return the specs of subnets with these shares of every group; each neuron is in `copies` of them."""
    return tuple(SubnetSpec(share, copies=copies) for share in shares)


def by_blocks(subnets: int, copies: int = 1, holders: int | None = None) -> tuple[SubnetSpec, ...]:
    """Return the specs of subnets of residual blocks, of which each is in `holders` of them, its neurons in `copies`.

    Without `holders`, blocks stay whole, and each is in `copies` of them.
    """
    return (SubnetSpec(min(1.0, copies / subnets), "blocks", copies, holders or copies),) * subnets


def scheme_of(specs: Sequence[SubnetSpec]) -> PartitionScheme:
    """Return the scheme of a round's subnets."""
    return SCHEMES[specs[0].kind]
