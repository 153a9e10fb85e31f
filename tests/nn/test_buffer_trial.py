"""A trial of a few steps sees what training changes, and leaves the module as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.nn.buffer_trial import observe
from idletrain.nn.buffers import Observed

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


class Net(nn.Module):
    def __init__(self, forward: Any, **buffers: Any) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.use = forward
        for name, value in buffers.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        observed: Tensor = self.use(self, x)
        return observed


def seen(forward: Any, *, wide: bool = False, **buffers: Any) -> dict[str, Observed]:
    module = Net(forward, **buffers).eval()
    before = copy.deepcopy(module.state_dict()), dict(vars(module))
    observed = {one.name: one for one in observe(module, X, Y, functional.cross_entropy, wide=wide)}
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert {k: v for k, v in vars(module).items() if isinstance(v, int | float)} == {
        k: v for k, v in before[1].items() if isinstance(v, int | float)
    }
    assert not module.training
    return observed


def test_a_running_mean_that_only_evaluation_uses_is_written_but_not_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        observed: Tensor = self.a(x)
        return observed

    for wide in (False, True):
        (mean,) = seen(forward, wide=wide, mean=torch.zeros(6), other=torch.ones(2)).values()
        assert (mean.name, mean.read, mean.accumulates, mean.reshaped) == ("mean", False, False, "")


def test_a_codebook_is_read_and_so_is_what_it_is_computed_from_a_step_later() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        observed: Tensor = self.a(x + self.book)
        self.size.mul_(0.9).add_(0.1)
        self.book.copy_(self.size * 2)
        return observed

    observed = seen(forward, book=torch.zeros(6), size=torch.zeros(6))
    assert {name: one.read for name, one in observed.items()} == {"book": True, "size": True}


def test_a_counter_accumulates_and_one_that_an_average_divides_by_feeds_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.steps += 1
        self.count += 1
        self.mean += (x.mean(0) - self.mean) / self.count
        observed: Tensor = self.a(x)
        return observed

    observed = seen(forward, steps=torch.tensor(0), count=torch.tensor(0), mean=torch.zeros(6))
    assert [observed[n].accumulates for n in ("steps", "count", "mean")] == [True, True, False]
    assert [observed[n].feeds for n in ("steps", "count", "mean")] == [False, True, False]
    assert (observed["steps"].growth, observed["steps"].largest) == (1, 3)
    assert not any(one.read for one in observed.values())


def test_a_value_that_only_a_gradient_depends_on_is_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        observed: Tensor = self.a(x)
        scale = self.scale.clone()
        observed.register_hook(lambda gradient: gradient * scale)
        self.scale.mul_(0.5)
        return observed

    assert seen(forward, scale=torch.ones(()))["scale"].read


def test_a_buffer_that_grows_or_changes_its_format_is_reported_in_words() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.queue, self.low = torch.cat([self.queue, x.detach()]), self.low.half() + 1
        observed: Tensor = self.a(x)
        return observed

    observed = seen(forward, queue=torch.zeros(0, 6), low=torch.zeros(2))
    assert observed["queue"].reshaped == "changes its shape from [0, 6] to [24, 6]"
    assert observed["low"].reshaped == "changes from torch.float32 to torch.float16"


def test_attributes_are_seen_and_a_cache_is_not_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.last = self.a(x)
        self.steps += 1
        observed: Tensor = self.last * (1 + self.steps)
        return observed

    observed = seen(forward, steps=0, last=None)
    assert {name: (one.is_buffer, one.read) for name, one in observed.items()} == {"steps": (False, True)}


def test_batchnorm_s_own_are_left_out() -> None:
    assert observe(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), X, Y, functional.cross_entropy, wide=False) == []


def test_a_loss_without_a_gradient_is_a_fault_of_the_job() -> None:
    with pytest.raises(JobError, match="its gradient cannot be computed"):
        observe(Net(lambda self, x: self.a(x), n=torch.ones(1)), X, Y, lambda o, _y: o.sum().detach(), wide=False)


@pytest.mark.parametrize(
    "kind", [lambda h: h, lambda h: (h, h), lambda h: float(h.mean())], ids=["tensor", "tuple", "number"]
)
def test_a_state_that_begins_as_none_is_read(kind: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        former = 0 if self.state is None else self.state[0] if isinstance(self.state, tuple) else self.state
        hidden: Tensor = self.a(x) + 0.5 * former
        self.state = kind(hidden.detach())
        return hidden

    observed = seen(forward, state=None)
    assert {name: (one.is_buffer, one.read) for name, one in observed.items()} == {"state": (False, True)}


def test_a_cache_that_begins_as_none_is_as_it_was_in_every_trial() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.ones is None:
            self.ones = torch.ones(6)
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        observed: Tensor = self.a(x * self.ones)
        return observed

    (mean,) = seen(forward, ones=None, mean=torch.zeros(6)).values()
    assert (mean.name, mean.read) == ("mean", False)


def test_a_module_in_which_nothing_changes_takes_one_step() -> None:
    steps: list[int] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        steps.append(len(steps))
        observed: Tensor = self.a(x) + self.shift
        return observed

    assert not seen(forward, shift=torch.ones(3))
    assert len(steps) == 1
