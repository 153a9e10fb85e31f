"""A cut that runs but computes something else is refused by name and reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.cuts import CutSettings, cuts_or_whole
from idletrain.nn.ist.groups import Group, Layout, layout_of, split_share, to_meta
from idletrain.nn.ist.scaling_trial import Subject
from idletrain.nn.ist.value_check import DIFFERS, reason_against

X = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0))


class FixedHeads(nn.Module):
    """Attention whose code fixes the number of heads and takes their width from what is left, as FT-Transformer's."""

    def __init__(self, heads: int = 4, *, fixed: bool = True) -> None:
        super().__init__()
        self.heads, self.fixed = heads, fixed
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 3)

    def split(self, x: Tensor) -> Tensor:
        shape = (self.heads, -1) if self.fixed else (-1, 16 // self.heads)
        return x.view(*x.shape[:2], *shape).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        y: Tensor = self.down(torch.relu(self.up(x + self.out(mixed.transpose(1, 2).flatten(2)))))
        return y.mean(1)


def found(module: nn.Module, inputs: Any = X) -> Layout:
    return cuts_or_whole(module, inputs, TrainingSettings(rounds=1, subnets=2), CutSettings()).layout


def test_heads_whose_number_the_code_fixes_stay_whole_by_name_and_reason() -> None:
    layout = found(FixedHeads())
    assert [group.name for group in layout.groups] == ["up"]
    assert dict(layout.kept_whole)["q"] == DIFFERS
    assert {dict(layout.kept_whole)[name] for name in ("k", "v")} == {"as q"}


def test_heads_whose_width_the_code_fixes_are_cut() -> None:
    layout = found(FixedHeads(fixed=False))
    assert {group.name: group.size for group in layout.groups} == {"q": 4, "up": 64}


class Averaged(nn.Module):
    """A layer that divides by how many neurons it has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out, self.b, self.last = nn.Linear(16, 32), nn.Linear(32, 3), nn.Linear(16, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.a(x))
        y: Tensor = self.out(hidden / hidden.shape[-1]) + self.last(torch.relu(self.b(x)))
        return y


def test_a_factor_that_depends_on_the_width_keeps_a_group_whole() -> None:
    module = Averaged()
    assert dict(found(module).kept_whole)["a"] == DIFFERS


@pytest.mark.parametrize(("columns", "reason"), [(np.arange(12), ""), (np.arange(12)[::-1].copy(), DIFFERS)])
def test_a_layout_with_columns_in_another_order_is_refused(columns: Any, reason: str) -> None:
    module = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))
    labels = {("0.weight", 0): np.arange(12), ("0.bias", 0): np.arange(12), ("2.weight", 1): columns}
    layout = layout_of(module, [(Group("0", 12), labels)])
    subject = Subject(to_meta(module), {name: p.detach() for name, p in module.named_parameters()}, X)
    assert reason_against(subject, layout) == reason


def test_sigmoid_and_weight_norm_do_not_look_like_faults() -> None:
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 64)), nn.Sigmoid(), nn.Linear(64, 32), nn.ReLU(),
        nn.Linear(32, 3),
    )  # fmt: skip
    layout = found(module)
    assert [group.name for group in layout.groups] == ["0", "2"]
    assert split_share(layout) > 0.9


def test_a_very_deep_network_is_not_refused_for_its_rounding() -> None:
    layers = [layer for _ in range(40) for layer in (nn.Linear(16, 16), nn.Tanh())]
    assert len(found(nn.Sequential(*layers, nn.Linear(16, 3))).groups) == 40
