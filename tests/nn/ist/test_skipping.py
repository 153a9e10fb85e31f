"""A block left out passes its hidden state on, in the form that the block returns; a scaled one scales its change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.nn.ist.skipping import Part, SkippableBlock, change_by

HIDDEN = Part.HIDDEN
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Adds(nn.Module):
    """Adds a linear layer's outputs to its input; what it returns has a form."""

    def __init__(self, form: type = Tensor) -> None:
        super().__init__()
        self.form, self.inner = form, nn.Linear(3, 3)

    def forward(self, mask: int, hidden: Tensor) -> Any:
        out, extra = hidden + mask * self.inner(hidden), torch.ones(5)
        if self.form is dict:
            return {"extra": extra, "hidden": out}
        return out if self.form is Tensor else self.form((extra, out))


RESULTS = {Tensor: HIDDEN, tuple: (None, HIDDEN), list: [None, HIDDEN], dict: {"extra": None, "hidden": HIDDEN}}


def block(form: type, argument: int | str = 1) -> SkippableBlock:
    return SkippableBlock("0", argument, RESULTS[form], additive=True)


@pytest.mark.parametrize("form", RESULTS)
@pytest.mark.parametrize("argument", [1, "hidden"])
def test_a_block_left_out_returns_its_input_and_nothing_else(form: type, argument: int | str) -> None:
    model = nn.ModuleList([Adds(form)])
    change_by(model, block(form, argument), 0.0)
    args, kwargs = ((1, X), {}) if argument == 1 else ((1,), {"hidden": X})
    outputs = model[0](*args, **kwargs)
    expected = {Tensor: X, tuple: (None, X), list: [None, X], dict: {"extra": None, "hidden": X}}[form]
    assert type(outputs) is type(expected)
    assert outputs is X if form is Tensor else outputs == expected


@pytest.mark.parametrize("form", RESULTS)
def test_a_scaled_block_returns_its_change_times_the_factor_and_all_else_as_it_is(form: type) -> None:
    model = nn.ModuleList([Adds(form)])
    change_by(model, block(form), 4.0)
    outputs = model[0](1, X)
    hidden = {Tensor: lambda: outputs, dict: lambda: outputs["hidden"]}.get(form, lambda: outputs[1])()
    torch.testing.assert_close(hidden, X + 4 * model[0].inner(X))
    if form is not Tensor:
        assert torch.equal(outputs["extra" if form is dict else 0], torch.ones(5))


def test_a_block_whose_factor_is_1_runs_as_it_is() -> None:
    model = nn.ModuleList([Adds()])
    change_by(model, block(Tensor), 1.0)
    assert "forward" not in vars(model[0])


def test_a_copy_of_a_scaled_block_has_parameters_of_its_own() -> None:
    model = nn.ModuleList([Adds()])
    change_by(model, block(Tensor), 2.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(model[0](1, X), X)
    torch.testing.assert_close(other[0](1, X), X + 2 * other[0].inner(X))
