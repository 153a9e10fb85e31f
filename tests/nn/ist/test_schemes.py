"""Partition schemes: a subnet's spec and place say all that is needed to draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from idletrain.nn import models
from idletrain.nn.ist import schemes
from idletrain.nn.ist.blocks import block_layout, find_blocks
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.schemes import (
    SCHEMES,
    NeuronScheme,
    SubnetPlace,
    SubnetSpec,
    block_sizes,
    by_blocks,
    by_neurons,
)
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared


class TwiceScheme(NeuronScheme):
    """Gives every neuron to two subnets: each pair of neighbours holds the same neurons."""

    def places(self, sizes: Sequence[int], specs: Sequence[SubnetSpec]) -> list[SubnetPlace]:
        own = super().places(sizes, specs[::2])
        return [SubnetPlace(own[k // 2].blocks, "twice") for k in range(len(specs))]

    def masks(self, seed: int, round_: int, layout: Layout, specs: Sequence[SubnetSpec]) -> list[Mask]:
        return [self.mask(seed, round_, layout, place) for place in self.places(layout.sizes, specs)]


def test_a_place_alone_gives_the_subnet_that_the_whole_round_has(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(widths=(6, 20, 30, 3))
    program, network = prepared.program, Network.of(prepared.program, prepared.network)
    specs = by_neurons((0.5, 0.3, 0.2))
    for subnet, place in zip(program.subnets(7, specs), program.places(specs), strict=True):
        again = program.subnet(7, place)
        assert again.shapes == subnet.shapes
        assert torch.equal(network.pull(again), network.pull(subnet))


def test_a_place_alone_gives_the_blocks_that_the_subnet_has_in_the_whole_round() -> None:
    module = nn.Sequential(*(models.ResidualBlock(4, hidden) for hidden in (4, 8, 8, 16)))
    layout = block_layout(module, find_blocks(module, torch.rand(2, 4, 6, 6))[0])
    specs, scheme = by_blocks(3, 2), SCHEMES["blocks"]
    masks = scheme.masks(5, 7, layout, specs)
    assert block_sizes(layout) == [sum(p.numel() for p in block.parameters()) for block in module]
    assert np.array_equal(np.sum(masks, axis=0), [2] * 4)
    assert {spec.share for spec in specs} == {2 / 3}
    for mask, place in zip(masks, scheme.places(layout.sizes, specs), strict=True):
        assert np.array_equal(scheme.mask(5, 7, layout, place), mask)


def test_a_new_kind_of_partition_is_one_class_and_one_line_in_the_table(
    small_program: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(schemes.SCHEMES, "twice", TwiceScheme())  # type: ignore[arg-type]
    prepared = small_program(widths=(6, 20, 30, 3))
    program, network = prepared.program, Network.of(prepared.program, prepared.network)
    specs = [SubnetSpec(0.5, "twice")] * 4
    first, copy, other, _ = (network.pull(subnet) for subnet in program.subnets(0, specs))
    assert torch.equal(first, copy)
    assert not torch.equal(first, other)
    assert torch.equal(network.pull(program.subnet(0, program.places(specs)[2])), other)
