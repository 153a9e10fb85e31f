"""Shapes are computed without values where a module's forward allows that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.nn.data.batches import device_of
from idletrain.nn.ist.shape_runs import for_trials, run_for_shapes


class Gated(nn.Module):
    """A layer whose inputs are looked at, or not."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.layer, self.looks = nn.Linear(3, 2), looks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.looks and not mask.any():
            raise ValueError("nothing is left")
        y: Tensor = self.layer(x * mask) + torch.rand(2)
        return y


@pytest.mark.parametrize(("looks", "device"), [(False, "meta"), (True, "cpu")])
def test_two_samples_are_run_without_values_or_with_their_own(looks: bool, device: str) -> None:
    module = Gated(looks)
    inputs: dict[str, Any] = {"x": torch.randn(8, 3), "mask": torch.ones(8, 1, dtype=torch.bool), "scale": 3}
    tried, sample = for_trials(module, inputs)
    assert tried is not module
    assert device_of(sample).type == device
    assert {parameter.device.type for parameter in tried.parameters()} == {device}
    assert (sample["x"].shape, sample["mask"].shape, sample["scale"]) == ((2, 3), (2, 1), 3)
    state = torch.get_rng_state()
    assert run_for_shapes(tried, sample).shape == (2, 2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_does_not_run_is_a_fault_of_the_job() -> None:
    with pytest.raises(JobError, match=r"does not run on a few samples \(nothing is left\)"):
        run_for_shapes(Gated(True), (torch.zeros(2, 3), torch.zeros(2, 1)))
