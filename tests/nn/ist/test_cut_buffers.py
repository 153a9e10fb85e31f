"""Buffers that are indexed by a group's neurons are cut with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.cuts import CutSettings, cuts_of
from idletrain.nn.ist.groups import Layout

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers of equal width, each with a constant or a statistic of its own in the outer module."""

    def __init__(self, forward: Any, **buffers: Tensor) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.use = forward
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.use(self, x)
        return result


def layout(module: nn.Module, **rules: Any) -> Layout:
    return cuts_of(module, X, TrainingSettings(rounds=1, subnets=2), CutSettings(), rules)[1]


def cut(result: Layout) -> dict[str, list[int]]:
    """Each buffer's dimensions that are cut, and the group of each."""
    bounds = [0, *[sum(result.sizes[: i + 1]) for i in range(len(result.sizes))]]
    return {
        t.name: [next(g for g in range(len(result.sizes)) if n[0] < bounds[g + 1]) for n in t.neurons if n is not None]
        for t in result.tensors
        if t.buffer
    }


def test_buffers_of_two_layers_of_one_width_go_with_their_own_layer() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x) * self.first)
        result: Tensor = self.out(torch.relu(self.b(x) - self.second))
        return result

    result = layout(Net(forward, first=torch.rand(8) + 0.5, second=torch.rand(1, 8)))
    assert [group.name for group in result.groups] == ["a", "b"]
    assert cut(result) == {"first": [0], "second": [1]}


def test_a_buffer_that_only_evaluation_uses_is_cut_too() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        result: Tensor = self.out(torch.relu(self.b(torch.relu(x if self.training else x - self.mean))))
        return result

    assert cut(layout(Net(forward, mean=torch.rand(8)))) == {"mean": [0]}


def test_a_buffer_that_no_neuron_indexes_stays_out_of_the_layout() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.relu(self.b(torch.relu(self.a(x * self.scale)))))
        return result

    assert cut(layout(Net(forward, scale=torch.ones(6)))) == {}


def test_a_codebook_keeps_the_neurons_that_it_compares_together() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        codes = x + self.book[torch.cdist(x, self.book).argmin(1)]
        result: Tensor = self.out(torch.relu(self.b(codes)))
        return result

    result = layout(Net(forward, book=torch.randn(5, 8)), book="mean")
    assert dict(result.kept_whole)["a"] == "it is a single neuron"  # the distances are sums over all of them
    assert [(t.name, t.buffer, t.shared) for t in result.tensors if t.buffer] == [("book", "mean", True)]


def test_a_layer_that_needs_all_of_its_neurons_says_so_in_its_own_words_uncut() -> None:
    reason = "8 columns are needed, " + 30 * "not less, "

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.shape[1] != 8:
            raise ValueError(reason)
        result: Tensor = self.out(torch.relu(self.b(torch.relu(x))))
        return result

    whole = dict(layout(Net(forward)).kept_whole)
    assert whole["a"] == f"a subnet with fewer of its neurons does not run (Net: {reason.strip()})"
