"""Shapes are computed without values where a module's forward allows that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.errors import JobError
from idletrain.nn.data.batches import device_of
from idletrain.nn.ist.shape_runs import ShapeMemory, for_trials, run_for_shapes


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
    with pytest.raises(
        JobError, match=r"does not run on a few samples \(forward at \S+ raised ValueError: nothing is left\)"
    ):
        run_for_shapes(Gated(True), (torch.zeros(2, 3), torch.zeros(2, 1)))


def made(x: Tensor) -> list[Tensor]:
    """Results of operators of many kinds: one or several tensors, views, in place, of other layouts and formats."""
    y = torch.nn.functional.batch_norm(x, None, None, training=True).transpose(1, 2)
    return [
        y,
        y.contiguous(),
        y.relu_(),
        *y.topk(2),
        torch.cat([y, y], 1),
        *torch.var_mean(y, 1),
        y > 0,
        y.sum().long(),
    ]


def test_what_is_looked_up_has_the_shapes_strides_and_formats_that_operators_make() -> None:
    x = torch.empty(2, 3, 4, device="meta")
    with torch.no_grad():
        plain, memory = made(x), ShapeMemory()
        with memory:
            first, again = made(x), made(x)
            other = made(torch.empty(2, 3, 5, device="meta"))
    for results in (first, again):
        assert [(r.shape, r.stride(), r.dtype, r.device) for r in results] == [
            (r.shape, r.stride(), r.dtype, r.device) for r in plain
        ]
    assert other[0].shape == (2, 5, 3)


def test_an_operator_runs_once_for_each_shape_and_argument() -> None:
    calls: list[Any] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(op)
            return op(*args, **(kwargs or {}))

    a, b = torch.empty(2, 3, device="meta"), torch.empty(2, 4, device="meta")
    with torch.no_grad(), Counting(), ShapeMemory():
        for x in (a, a, b, a.double(), a):
            x.sum(1)
            x.sum(1, keepdim=True)
    assert sum(op is torch.ops.aten.sum.dim_IntList for op in calls) == 2 * 3


def test_tensors_with_values_are_computed() -> None:
    with ShapeMemory():
        assert [float((torch.ones(2) * n).sum()) for n in (1, 2)] == [2, 4]


def test_a_shape_that_does_not_fit_is_told_every_time() -> None:
    with ShapeMemory():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.empty(2, 3, device="meta") @ torch.empty(4, 2, device="meta")
