"""Partition schemes: a subnet's spec and place say all that is needed to draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.cuts import CutSettings, cuts_or_whole
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
    specs_of,
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


@pytest.mark.parametrize(("subnets", "copies", "holders"), [(4, 1, 2), (8, 1, 3), (4, 2, 3), (2, 1, 1)])
def test_neurons_of_a_block_are_divided_among_the_subnets_that_have_it(subnets: int, copies: int, holders: int) -> None:
    layout = narrow_residual_layout(hidden=(12, 16, 16, 24))
    specs, scheme = specs_of(layout, [copies / subnets] * subnets, copies), SCHEMES["blocks"]
    assert specs[0] == SubnetSpec(copies / subnets, "blocks", copies, holders)
    masks = np.array(scheme.masks(5, 7, layout, specs))
    held, inner = masks[:, :4], masks[:, 4:]
    assert np.array_equal(held.sum(axis=0), [holders] * 4)
    assert np.array_equal(inner.sum(axis=0), [copies] * (12 + 16 + 16 + 24))
    for block, (start, end) in enumerate([(0, 12), (12, 28), (28, 44), (44, 68)]):
        counts = inner[:, start:end].sum(axis=1)
        assert (counts[~held[:, block]] == 0).all()
        assert np.ptp(counts[held[:, block]]) <= 1
    for mask, place in zip(masks, scheme.places(layout.sizes, specs), strict=True):
        assert np.array_equal(scheme.mask(5, 7, layout, place), mask)
    assert not all(np.array_equal(masks, scheme.masks(5, other, layout, specs)) for other in range(8, 16))


def test_neurons_outside_of_all_blocks_are_divided_among_all_subnets() -> None:
    layout = narrow_residual_layout(hidden=(12, 12), head=20)
    masks = np.array(SCHEMES["blocks"].masks(0, 0, layout, specs_of(layout, [0.25] * 4, 1)))
    assert [int(mask[-20:].sum()) for mask in masks] == [5] * 4
    assert np.array_equal(masks.sum(axis=0), [2] * 2 + [1] * 44)


def narrow_residual_layout(hidden: Sequence[int], head: int = 0) -> Layout:
    """The layout of residual blocks with so many hidden channels each, and maybe of a head, by depth and width."""
    last = [nn.Flatten(), nn.Linear(4 * 36, head), nn.ReLU(), nn.Linear(head, 3)] if head else []
    module = nn.Sequential(*(models.ResidualBlock(4, channels) for channels in hidden), *last)
    settings = TrainingSettings(subnets=2, rounds=1)
    return cuts_or_whole(module, torch.rand(2, 4, 6, 6), settings, CutSettings(split="both")).layout


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
