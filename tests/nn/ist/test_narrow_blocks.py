"""A network is cut by depth and width at once: every tensor of a block is empty where the block is lacking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.cuts import CutSettings, cuts_or_whole
from idletrain.nn.ist.blocks import block_layout, find_blocks
from idletrain.nn.ist.groups import Layout, by_hand
from idletrain.nn.ist.narrow_blocks import block_of, within_blocks

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """A residual block with a norm, two layers and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Normed(), Normed(), nn.Linear(6, 3))


def by_depth() -> Layout:
    module = network()
    return block_layout(module, find_blocks(module, X)[0])


def test_a_block_s_tensors_are_indexed_by_its_neurons_or_by_the_block() -> None:
    settings = TrainingSettings(subnets=2, rounds=1)
    layout = cuts_or_whole(network(), X, settings, CutSettings(split="both")).layout
    assert [(group.name, group.size, group.within) for group in layout.groups] == [
        ("blocks", 2, None),
        ("1.up", 10, 0),
        ("2.up", 10, 1),
    ]
    rows = {t.name: None if t.neurons[0] is None else set(t.neurons[0].tolist()) for t in layout.tensors}
    first, second = set(range(2, 12)), set(range(12, 22))
    assert rows["1.up.weight"] == rows["1.up.bias"] == first
    assert rows["2.up.weight"] == second
    assert rows["1.down.weight"] == rows["1.down.bias"] == rows["1.norm.weight"] == {0}
    assert rows["2.norm.bias"] == {1}
    assert rows["0.weight"] is rows["3.bias"] is None
    columns = {t.name: t.neurons[1] for t in layout.tensors if len(t.neurons) == 2}
    down = columns["1.down.weight"]
    assert down is not None
    assert np.array_equal(np.sort(down), np.arange(2, 12))
    assert columns["1.up.weight"] is None


def test_the_block_of_tensors_is_known_where_all_are_in_one() -> None:
    depth = by_depth()
    assert block_of(depth, ["1.up.weight", "1.norm.running_mean"]) == 0
    assert block_of(depth, ["0.weight", "3.bias"]) is None
    for names in (["1.up.weight", "2.up.weight"], ["1.up.weight", "0.weight"]):
        with pytest.raises(ValueError, match="in several blocks, or in some and elsewhere"):
            block_of(depth, names)


def test_a_group_by_hand_that_reaches_beyond_a_block_is_refused() -> None:
    layout = by_hand(network(), {"0.weight": ["stream", None], "1.up.weight": [None, "stream"]})
    with pytest.raises(JobError, match=r"model\.groups: stream is in several blocks, or in some and elsewhere"):
        within_blocks(layout, by_depth())
