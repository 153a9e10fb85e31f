"""Learning rates of a subnet: a step moves the network's function as far as the whole network's step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.models import mlp
from idletrain.nn.network import Network
from idletrain.nn.optim.parameter_groups import ParameterSettings, norm_parameters
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.rate_factors import rate_factors

Programs = Callable[..., Prepared]
WIDTHS = (6, 16, 16, 3)
X = np.ones((8, 6), np.float32)


def factors_of(prepared: Prepared, *, by_gradient: bool) -> tuple[dict[str, float], Subnet]:
    program = prepared.program
    phase = program.training.phase(0)
    subnet = program.subnets(0, program.specs(phase.equal_shares, phase.copies))[0]
    norms = norm_parameters(program.module)
    found = rate_factors(program.layout, subnet, norms, by_gradient=by_gradient)
    return dict(zip([t.name for t in program.layout.tensors], found, strict=True)), subnet


@pytest.mark.parametrize(("subnets", "copies", "share"), [(2, 1, 1 / 2), (4, 1, 1 / 4), (4, 2, 1 / 2), (2, 2, 1.0)])
def test_sgd_s_rates_follow_the_share_into_and_out_of_cut_neurons(
    small_program: Programs, subnets: int, copies: int, share: float
) -> None:
    prepared = small_program(WIDTHS, subnets=subnets, copies=copies, optimizer={"name": "sgd", "lr": 0.1})
    factors, _ = factors_of(prepared, by_gradient=True)
    assert factors == pytest.approx(
        {
            "1.weight": share, "1.bias": share, "3.weight": 1.0, "3.bias": share, "5.weight": 1 / share, "5.bias": 1.0,
        }
    )  # fmt: skip


def test_adam_s_rates_are_those_of_the_network_s_values(small_program: Programs) -> None:
    factors, _ = factors_of(small_program(WIDTHS, subnets=4), by_gradient=False)
    cut_inputs = {"3.weight": 4.0, "5.weight": 4.0}
    assert factors == pytest.approx(dict.fromkeys(factors, 1.0) | cut_inputs)


def test_neurons_with_a_norm_behind_keep_sgd_s_rate(small_program: Programs) -> None:
    factors, _ = factors_of(small_program(WIDTHS, norm="batch", subnets=4), by_gradient=True)
    assert set(factors.values()) == {1.0}


def test_weights_decay_as_before_whatever_the_factor() -> None:
    assert ParameterSettings(0.1, 0.01).times(4.0) == ParameterSettings(0.4, 0.0025)
    own = ParameterSettings(0.1, 0.0)
    assert own.times(1.0) is own


def total(outputs: Tensor, _labels: Tensor) -> Tensor:
    return outputs.sum(-1).mean()


class Tied(nn.Module):
    """Embeddings that are the output's weights, too, so that a subnet scales the inputs of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 64), nn.Linear(64, 5, bias=False)
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        logits: Tensor = self.head(hidden + self.down(self.up(hidden).relu()))
        return logits


MODULES = {"mlp": (lambda: mlp((6, 64, 64, 3), None), X), "tied": (Tied, np.zeros(8, np.int64))}


def movement(optimizer: dict[str, Any], subnets: int, module: str) -> float:
    """How far one step moves the outputs of a subnet of a network whose neurons are all alike."""
    settings = {"method": "ist", "subnets": subnets, "local_steps": 1, "rounds": 1, "batch_size": 4}
    training = TrainingSettings.model_validate(settings | {"optimizer": optimizer})
    build, inputs = MODULES[module]
    prepared = prepare(build(), Given(inputs, np.zeros(8, np.int64)), None, total, training)
    program = prepared.program
    network = Network.of(program, [torch.full_like(value, 0.02) for value in prepared.network])
    subnet = program.subnets(0, program.specs((1 / subnets,) * subnets, 1))[0]
    samples, flat = program.source.open(), network.pull(subnet)
    steps = LocalSteps(program, subnet, flat, 0, 0)
    with torch.no_grad():
        before = steps.module(torch.from_numpy(inputs))
    steps.step(samples, batch_order(samples, program.training), 0)
    with torch.no_grad():
        return float((steps.module(torch.from_numpy(inputs)) - before).abs().mean())


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "rmsprop"])
@pytest.mark.parametrize("subnets", [2, 4, 8])
@pytest.mark.parametrize("module", MODULES)
def test_a_step_moves_a_subnet_s_outputs_as_far_as_the_whole_network_s(name: str, subnets: int, module: str) -> None:
    optimizer = {"name": name, "lr": 1e-5}
    assert movement(optimizer, subnets, module) == pytest.approx(movement(optimizer, 1, module), rel=0.1)


def test_weights_of_a_sum_whose_inputs_are_scaled_have_sgd_s_rate_times_the_share() -> None:
    training = TrainingSettings.model_validate({"method": "ist", "subnets": 4, "local_steps": 1, "rounds": 1})
    labels = np.zeros(8, np.int64)
    prepared = prepare(Tied(), Given(labels, labels), None, total, training)
    assert {sum_.tensor: sum_.scaling for sum_ in prepared.program.layout.contractions}["table.weight"] == "inputs"
    factors, _ = factors_of(prepared, by_gradient=True)
    assert factors == {"table.weight": 1 / 4, "up.weight": 1.0, "down.weight": 1.0}
    factors, _ = factors_of(prepared, by_gradient=False)
    assert factors == {"table.weight": 1.0, "up.weight": 4.0, "down.weight": 4.0}
