"""The outer optimizer: torch's own Nesterov on a round's averaged change, wherever several subnets have a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import flowers
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.alone import train_alone
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.program import cross_entropy
from idletrain.optimizer_settings import OuterOptimizerSettings

NESTEROV = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}


def moved(network: Network, subnet: Subnet, seed: int) -> Tensor:
    """A subnet's values after some steps: anything else than before."""
    pulled = network.pull(subnet)
    return pulled + torch.randn(len(pulled), generator=torch.Generator().manual_seed(seed))


def with_outer(prepared: Prepared, settings: dict[str, Any] | None) -> Prepared:
    """The same network and program with another outer optimizer."""
    outer = settings and OuterOptimizerSettings.model_validate(settings)
    training = prepared.program.training.model_copy(update={"outer_optimizer": outer})
    return replace(prepared, program=replace(prepared.program, training=training))


def rounds_of(prepared: Prepared, networks: Sequence[Network], rounds: int) -> list[list[Tensor]]:
    """Commit the same updates of some rounds to networks; the last one's values before each round's commit."""
    training, seen = prepared.program.training, []
    for round_ in range(rounds):
        subnets = prepared.program.subnets(round_, by_neurons(training.phase(0).equal_shares, training.copies))
        updates = [(s, moved(networks[0], s, 10 * round_ + k), 3) for k, s in enumerate(subnets)]
        seen.append([value.clone() for value in networks[-1].values])
        for network in networks:
            network.commit(updates)
    return seen


def test_the_steps_are_those_of_torch_s_sgd_with_the_averaged_change_as_its_gradient(
    small_program: Callable[..., Prepared],
) -> None:
    prepared = small_program(method="local-sgd", subnets=3, outer_optimizer=NESTEROV)
    program = prepared.program
    parameters = [value.clone().requires_grad_() for value in prepared.network]
    expected = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    network = Network.of(program, prepared.network)
    for round_ in range(4):
        subnets = program.subnets(round_, by_neurons(program.training.phase(0).equal_shares))
        updates = [(s, moved(network, s, 10 * round_ + k), 3) for k, s in enumerate(subnets)]
        mean = torch.stack([values for _, values, _ in updates]).mean(0)
        for parameter, value in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = parameter.detach() - value.view(parameter.shape)
        expected.step()
        network.commit(updates)
        for value, parameter in zip(network.values, parameters, strict=True):
            torch.testing.assert_close(value, parameter.detach())


@pytest.mark.parametrize("settings", [{"method": "local-sgd"}, {"subnets": 4, "copies": 2}, {"norm": "batch"}])
def test_with_lr_one_and_no_momentum_it_is_none(small_program: Callable[..., Prepared], settings: Any) -> None:
    prepared = small_program(rounds=5, **settings)
    plain, outer, other = (
        train_alone(with_outer(prepared, own))
        for own in (None, {"name": "nesterov", "lr": 1.0, "momentum": 0.0}, NESTEROV)
    )
    for value, expected in zip(outer.values, plain.values, strict=True):
        torch.testing.assert_close(value, expected)
    assert not torch.allclose(other.values[-1], plain.values[-1])


def test_neurons_of_one_subnet_alone_are_merged_as_without_it(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(outer_optimizer=NESTEROV)
    plain, network = (Network.of(own.program, prepared.network) for own in (with_outer(prepared, None), prepared))
    rounds_of(prepared, [plain, network], 3)
    moved_otherwise = [
        tensor.name
        for tensor, a, b in zip(prepared.program.layout.tensors, plain.values, network.values, strict=True)
        if not torch.equal(a, b)
    ]
    assert moved_otherwise == [tensor.name for tensor in prepared.program.layout.tensors if tensor.shared]
    assert len(moved_otherwise) == 1


def test_what_rests_in_a_round_or_is_in_one_subnet_keeps_its_value_and_its_momentum(
    small_program: Callable[..., Prepared],
) -> None:
    prepared = small_program(widths=(6, 8, 12, 3), subnets=4, copies=2, outer_optimizer=NESTEROV)
    program = prepared.program
    network = Network.of(program, prepared.network)
    rounds_of(prepared, [network], 2)
    before, momenta = [v.clone() for v in network.values], [m.clone() for m in network._momenta]
    subnets = program.subnets(2, by_neurons((0.5,) * 4, 2))[:2]
    held = [torch.zeros(tensor.shape) for tensor in program.layout.tensors]
    ones = Network(program.layout, 1, [torch.ones(t.shape) for t in program.layout.tensors])
    for subnet in subnets:
        counted = Network(program.layout, 1)
        counted.commit([(subnet, ones.pull(subnet), 1)])
        for total, value in zip(held, counted.values, strict=True):
            total.add_(value != 0)
    network.commit([(subnet, moved(network, subnet, k), 3) for k, subnet in enumerate(subnets)])
    for value, old, momentum, was, count in zip(network.values, before, network._momenta, momenta, held, strict=True):
        assert torch.equal(value[count == 0], old[count == 0])
        assert torch.equal(momentum[count < 2], was[count < 2])
        assert not (momentum[count == 2] == was[count == 2]).any()
    assert any((count == 1).any() for count in held)


def test_a_snapshot_of_it_goes_on_to_the_same_bits(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(method="local-sgd", outer_optimizer=NESTEROV, ema=0.5)
    straight, resumed = (Network.of(prepared.program, prepared.network) for _ in range(2))
    rounds_of(prepared, [straight, resumed], 2)
    restored = Network.of(prepared.program)
    restored.flat.copy_(resumed.flat)
    rounds_of(prepared, [straight, restored], 3)
    assert torch.equal(straight.flat, restored.flat)


def test_momentum_is_a_slot_of_its_own_behind_the_state(small_program: Callable[..., Prepared]) -> None:
    plain, outer = (
        Network.of(small_program(method="local-sgd", **own).program).flat.numel()
        for own in ({}, {"outer_optimizer": NESTEROV})
    )
    assert outer == 2 * plain


def without_biases() -> nn.Module:
    """A network of whose parameters every one belongs to a neuron."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (models.mlp([6, 8, 3]), {"subnets": 1}),
        (models.mlp([6, 8, 3]), {"subnets": 1, "method": "local-sgd"}),
        (without_biases(), {"subnets": 4}),
    ],
    ids=["one subnet", "one whole network", "no shared parameter"],
)
def test_where_nothing_is_shared_it_is_refused_by_name(module: nn.Module, settings: Any) -> None:
    training = TrainingSettings.model_validate({"batch_size": 4, "outer_optimizer": NESTEROV, **settings})
    with pytest.raises(
        JobError, match=r"training.outer_optimizer: nesterov has nothing to move.*more training.subnets"
    ):
        prepare(module, flowers(32, 6, 3), None, cross_entropy, training)


def test_copies_are_enough_to_share() -> None:
    training = TrainingSettings.model_validate(
        {"batch_size": 4, "subnets": 4, "copies": 2, "outer_optimizer": NESTEROV}
    )
    prepared = prepare(without_biases(), flowers(32, 6, 3), None, cross_entropy, training)
    assert not any(tensor.shared for tensor in prepared.program.layout.tensors)


def test_its_settings_are_those_of_diloco() -> None:
    assert OuterOptimizerSettings.model_validate({}) == OuterOptimizerSettings.model_validate(NESTEROV)
