"""Training without a cluster: the rounds of one, and no trace in torch's generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from idletrain.export import finished_module
from idletrain.job import TrainingSettings
from idletrain.nn.alone import train_alone
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.given import as_samples
from idletrain.nn.evaluate import score
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare
from idletrain.optimizer_settings import OptimizerSettings
from tests.nn.test_local_steps import train


def test_it_trains_the_rounds_of_the_program(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(norm="batch", subnets=2, local_steps=3, rounds=2, optimizer={"name": "adam", "lr": 0.01})
    state = torch.random.get_rng_state()
    network = train_alone(prepared)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert network.sha256() == train(prepared, 2, [0.5, 0.5]).sha256()
    assert not torch.equal(network.values[0], prepared.network[0])


def phased(prepared: Prepared, *phases: dict[str, int]) -> Prepared:
    """The same network, trained in phases."""
    training = TrainingSettings.model_validate(
        {**prepared.program.training.model_dump(exclude={"rounds"}), "phases": phases}
    )
    return replace(prepared, program=replace(prepared.program, training=training))


@pytest.mark.parametrize("copies", [1, 2])
def test_phases_that_divide_alike_are_the_bits_of_a_run_without_any(
    small_program: Callable[..., Prepared], copies: int
) -> None:
    prepared = small_program(
        subnets=4, copies=copies, rounds=5, optimizer={"lr": 0.1, "momentum": 0.9, "schedule": "cosine"}
    )
    divided = phased(prepared, {"rounds": 2}, {"rounds": 3, "subnets": 4, "local_steps": 3})
    assert train_alone(divided).sha256() == train_alone(prepared).sha256()


def test_a_last_phase_on_the_whole_network_goes_on_as_torch_would(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=2, rounds=2, optimizer={"lr": 0.1})
    begun = train_alone(prepared)
    network = train_alone(phased(prepared, {"rounds": 2}, {"rounds": 2, "subnets": 1, "local_steps": 5}))
    module = prepared.module
    for parameter, value in zip(module.parameters(), begun.values, strict=True):
        parameter.data.copy_(value)
    plain, samples = torch.optim.SGD(module.parameters(), lr=0.1), prepared.program.source.open()
    order = BatchOrder(0, len(samples), 4, 1)
    for number in range(
        2 * 2 * 3, 2 * 2 * 3 + 10
    ):  # behind the batches that two subnets took in three steps of two rounds
        inputs, labels = samples.batch(order.batch(0, number))
        plain.zero_grad()
        prepared.program.loss(module(inputs), labels).backward()
        plain.step()
    for value, parameter in zip(network.values, module.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.detach())


def test_phases_change_the_number_of_subnets_copies_and_steps(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=4, rounds=1)
    phases = [{"rounds": 1, "subnets": 4}, {"rounds": 1, "subnets": 4, "copies": 4}, {"rounds": 1, "subnets": 2}]
    ends = [train_alone(phased(prepared, *phases[: n + 1])).sha256() for n in range(3)]
    assert len({Network.of(prepared.program, prepared.network).sha256(), *ends}) == 4
    assert ends[0] == train_alone(prepared).sha256()


class Table:
    """Inputs and labels at hand, as a source."""

    def __init__(self, *data: NDArray[np.float32]) -> None:
        self.data = data

    def open(self) -> Samples:
        return as_samples(self.data)


def test_four_subnets_without_norm_learn_binary_labels_as_well_as_the_whole_network() -> None:
    """The labels are noisy, and the best probabilities are known: neither sure of itself nor shy is good."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 16)).astype(np.float32)
    y = (rng.random(4000) < 1 / (1 + np.exp(-3 * (x[:, 0] * x[:, 1] + x[:, 2])))).astype(np.float32)[:, None]
    train_data, test_data = Table(x[:3000], y[:3000]), Table(x[3000:], y[3000:])
    scores = {}
    for subnets in (1, 4):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
        training = TrainingSettings(
            subnets=subnets, rounds=40, local_steps=20, optimizer=OptimizerSettings(name="adamw", lr=1e-3)
        )
        prepared = prepare(module, train_data, test_data, "bce_with_logits", training)
        trained = finished_module(prepared, train_alone(prepared))
        scores[subnets] = score(trained, test_data.open(), prepared.program.loss)
    assert scores[4].loss <= 1.05 * scores[1].loss
    assert scores[4].temperature is not None
    assert 0.8 <= scores[4].temperature <= 1.3
