"""Divide the network in a round: a subnet is planned as a `SubnetSpec`, and placed and drawn by its kind's scheme.

A new kind of partition is a class with the methods of `PartitionScheme` and one line in `SCHEMES`. Specs stand in the
write-ahead log, so all subnets of a past round can be drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    """

    share: float
    kind: str = "neurons"
    copies: int = 1


@dataclass(frozen=True, slots=True)
class SubnetPlace:
    """A subnet's place in its round's partition, small enough to be sent with a lease.

    Attributes:
        blocks: Its part of each neuron group.
        kind: Name of its scheme in `SCHEMES`.
        number: Its number among the round's subnets.
        subnets: Number of the round's subnets.
        copies: Number of them that every residual block is in.
    """

    blocks: tuple[Block, ...] = ()
    kind: str = "neurons"
    number: int = 0
    subnets: int = 1
    copies: int = 1


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

    The blocks are the neurons of the layout's only group, and their parameters have rows of one neuron each.
    """

    def places(self, sizes: Sequence[int], specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        """See `PartitionScheme`."""
        del sizes  # the numbers of subnets and copies say all
        subnets, copies = len(specs), specs[0].copies
        return [SubnetPlace(kind="blocks", number=k, subnets=subnets, copies=copies) for k in range(subnets)]

    def masks(self, seed: int, round_: int, layout: Layout, specs: Sequence[SubnetSpec]) -> list[Mask]:
        """See `PartitionScheme`."""
        return list(deal(seed, round_, block_sizes(layout), len(specs), specs[0].copies))

    def mask(self, seed: int, round_: int, layout: Layout, place: SubnetPlace) -> Mask:
        """See `PartitionScheme`."""
        held: Mask = deal(seed, round_, block_sizes(layout), place.subnets, place.copies)[place.number]
        return held


SCHEMES: Mapping[str, PartitionScheme] = {"neurons": NeuronScheme(), "blocks": BlockScheme()}


def block_sizes(layout: Layout) -> list[int]:
    """Return the number of parameters of each block of a layout by depth, of those that train."""
    sizes = [0] * len(layout.skippable)
    for tensor in layout.tensors:
        if tensor.neurons and tensor.neurons[0] is not None and tensor.trainable:
            sizes[int(tensor.neurons[0][0])] += math.prod(tensor.shape)
    return sizes


def by_neurons(shares: Sequence[float], copies: int = 1) -> tuple[SubnetSpec, ...]:
    """Return the specs of subnets with these shares of every group; each neuron is in `copies` of them."""
    return tuple(SubnetSpec(share, copies=copies) for share in shares)


def by_blocks(subnets: int, copies: int = 1) -> tuple[SubnetSpec, ...]:
    """Return the specs of subnets of residual blocks, of which each is in `copies` of them."""
    return (SubnetSpec(min(1.0, copies / subnets), "blocks", copies),) * subnets


def scheme_of(specs: Sequence[SubnetSpec]) -> PartitionScheme:
    """Return the scheme of a round's subnets."""
    return SCHEMES[specs[0].kind]
