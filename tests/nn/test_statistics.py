"""The assembled network's buffers: what travelled, and statistics of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.evaluate import assembled
from idletrain.nn.prepare import prepare
from idletrain.nn.statistics import estimate_statistics, set_buffers, turn_singular_vectors

X = np.random.default_rng(0).normal(3, 2, (1024, 4)).astype(np.float32)
DATA = ArraySource(X, np.zeros(1024))


class Running(nn.Module):
    """Running statistics of its own, with a memory far longer than the data, and a number that must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 50.0))
        self.register_buffer("worst", torch.tensor(-float("inf")))
        self.register_buffer("book", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.99 * self.mean + 0.01 * x.mean(0)  # a new tensor in its place
            self.worst.copy_(torch.maximum(self.worst, x.max()))
            self.book.add_(1)
        return x - self.mean


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"])
def test_singular_vectors_are_those_of_the_assembled_weights(kind: Any) -> None:
    torch.manual_seed(0)
    weight_normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 64))  # with two tensors in place of a weight
    module = nn.Sequential(weight_normed, kind(nn.Linear(64, 64)))

    def norm() -> float:
        module.eval()(torch.zeros(1, 4))  # the older kind computes its weight in a forward
        return float(torch.linalg.matrix_norm(module[1].weight.detach(), 2))

    for name, buffer in module.named_buffers():
        if name.endswith(("_v", "_u")):
            buffer.copy_(nn.functional.normalize(torch.randn(64), dim=0))
    assert abs(norm() - 1) > 0.5, "vectors that are none of its own"
    turn_singular_vectors(module)
    assert norm() == pytest.approx(1, abs=0.05)


def test_statistics_are_those_of_the_whole_network_on_the_training_data() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4))
    x = np.random.default_rng(0).normal(3, 2, (1024, 4)).astype(np.float32)
    module.train()
    estimate_statistics(module, ArraySource(x, np.zeros(1024)), seed=0)
    assert not module.training
    torch.testing.assert_close(module[0].running_mean, torch.from_numpy(x.mean(0)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(module[0].running_var, torch.from_numpy(x.var(0)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("samples", [512, 513, 1025])
def test_a_last_batch_of_one_sample_which_has_no_variance_is_left_out(samples: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    estimate_statistics(module, ArraySource(np.ones((samples, 4), np.float32), np.zeros(samples)), seed=0)
    assert module[1].num_batches_tracked == samples // 512


def test_statistics_of_a_module_that_takes_parts_by_name() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.running = nn.BatchNorm1d(4), Running()

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.running(self.norm(x - shift)) + x

    items = MapStyleSource([{"x": x, "shift": np.ones(4, np.float32), "label": 0} for x in X])
    by_name, plain = Parts(), nn.Sequential(nn.BatchNorm1d(4), Running())
    estimate_statistics(by_name, items, 0, ["running.mean"])
    estimate_statistics(plain, ArraySource(X - np.float32(1), np.zeros(1024)), 0, ["1.mean"])
    assert torch.equal(by_name.norm.running_mean, plain[0].running_mean)
    assert torch.equal(by_name.running.mean, plain[1].mean)


def test_statistics_behind_dropout_are_the_same_every_time_and_leave_other_random_numbers_alone() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    data = ArraySource(np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32), np.zeros(600))
    logits = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn = torch.get_rng_state()
        estimate_statistics(module, data, seed=0)
        assert torch.equal(torch.get_rng_state(), drawn)
        logits.append(module[1].running_mean.clone())
    assert torch.equal(*logits)


def test_a_long_running_mean_is_that_of_the_data_and_other_buffers_stay() -> None:
    module: Any = nn.Sequential(Running(), nn.BatchNorm1d(4))
    estimate_statistics(module, DATA, seed=0, names=["0.mean", "0.worst"])
    torch.testing.assert_close(module[0].mean, torch.from_numpy(X.mean(0)), rtol=1e-2, atol=1e-2)
    assert float(module[0].worst) == X.max()
    assert module[0].book.tolist() == [1] * 4
    assert int(module[1].num_batches_tracked) == 2


def test_statistics_of_instancenorm_are_estimated_too() -> None:
    module: Any = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True))
    estimate_statistics(module, DATA, seed=0)
    torch.testing.assert_close(module[1].running_mean, torch.full((2,), float(X.mean())), rtol=0.05, atol=0.05)


def test_buffers_that_travelled_are_the_network_s_and_the_others_as_they_began() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 1
            logits: Tensor = self.last(torch.relu(self.first(x * self.scale)))
            return logits

    data = Given(np.zeros((32, 6), np.float32), np.arange(32) % 3)
    prepared = prepare(Counting(), data, None, "cross_entropy", TrainingSettings(subnets=2, batch_size=4))
    assert prepared.program.buffers == {"steps": "sum"}
    network = [*(p.clone() for p in prepared.network[:-1]), torch.tensor(41.0)]
    module: Any = assembled(prepared.module, network)
    for _ in range(2):  # whatever an evaluation before left behind
        set_buffers(module, prepared.module, prepared.program, network)
        module.scale.mul_(2)
        assert (int(module.steps), module.steps.dtype) == (41, torch.int64)
    set_buffers(module, prepared.module, prepared.program, network)
    assert module.scale.tolist() == [1] * 6


class Unread(Given):
    """Data that must not be read."""

    def __len__(self) -> int:
        raise AssertionError("it is read")


def test_nothing_is_read_for_a_module_without_statistics() -> None:
    module = nn.Linear(2, 2)
    estimate_statistics(module, Unread(None, None), 0)  # type: ignore[arg-type]
    assert not module.training
    with pytest.raises(AssertionError, match="it is read"):
        estimate_statistics(nn.BatchNorm1d(2), Unread(None, None), 0)  # type: ignore[arg-type]
