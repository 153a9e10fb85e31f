"""Groups are cut only where every subnet gets enough of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.cuts import CutSettings, cuts_or_whole
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.worth_cutting import check_widths

TOKENS = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(0))


def layout_of(heads: int, subnets: int, **more: Any) -> Layout:
    module = models.transformer(20, 8, width=8, heads=heads, hidden=16, blocks=4)
    settings = TrainingSettings(subnets=subnets, rounds=1)
    return cuts_or_whole(module, TOKENS, settings, CutSettings(split="both", **more)).layout


def test_a_stream_through_all_blocks_stays_whole_where_subnets_lack_some() -> None:
    layout = layout_of(heads=2, subnets=4)
    assert {group.within for group in layout.groups[1:]} == {0, 1, 2, 3}
    assert "it reaches beyond one block" in dict(layout.kept_whole)["tokens"]


@pytest.mark.parametrize(("subnets", "is_cut"), [(4, True), (8, False)])
def test_a_block_is_divided_among_as_many_subnets_as_have_it(subnets: int, is_cut: bool) -> None:
    """Two of four subnets have a block, and three of eight: more than two heads."""
    layout = layout_of(heads=2, subnets=subnets)
    assert ("blocks.0.q" in {group.name for group in layout.groups}) is is_cut
    assert (
        "fewer neurons (2) than there are subnets (3)" in dict(layout.kept_whole).get("blocks.0.q", "")
    ) is not is_cut


def test_more_subnets_than_neurons_of_a_group_are_refused() -> None:
    layout = layout_of(heads=2, subnets=4)
    training = TrainingSettings(subnets=8, rounds=1)
    with pytest.raises(JobError, match=r"training\.subnets: 8 is more than the 2 neurons of group blocks\.0\.q"):
        check_widths(layout, training.phase(0))


def test_a_block_without_neurons_to_cut_is_refused_with_the_reason() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = x + torch.softmax(self.inner(x), -1)
            return y

    module = nn.Sequential(nn.Linear(6, 8), Shift(), Shift(), nn.Linear(8, 3))
    with pytest.raises(
        JobError, match=r"model\.split: no neurons within the model's blocks can be cut \(.*\); use blocks"
    ):
        cuts_or_whole(module, torch.rand(4, 6), TrainingSettings(subnets=2, rounds=1), CutSettings(split="both"))
