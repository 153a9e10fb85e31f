"""One subnet is plain SGD, bit for bit; a subnet resumed from a mark is the one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from idletrain.job import OptimizerSettings, TrainingSettings
from idletrain.nn.ist.randomness import key
from idletrain.nn.local_steps import BatchOrder, LocalSteps, learning_rate
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, named_loss, prepare

SGD = {"name": "sgd", "lr": 0.1}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW], ids=["sgd", "momentum", "adamw"])
J = 4


def whole_flat(prepared: Prepared, network: Network, subnet: Any) -> torch.Tensor:
    """The pulled buffer with zeros for the slots that do not travel."""
    program = prepared.program
    flat = torch.zeros(len(program.slots) * subnet.parameters)
    pulled = network.pull(subnet)
    flat[: len(pulled)] = pulled
    return flat


def train(prepared: Prepared, rounds: int, shares: Sequence[float], interrupt_at: int | None = None) -> Network:
    """Rounds as workers and head do them; at `interrupt_at` steps every subnet goes on elsewhere from its mark."""
    program, training = prepared.program, prepared.program.training
    samples = program.source.open()
    network = Network.of(program, prepared.network)
    for round_ in range(rounds):
        updates = []
        for k, subnet in enumerate(program.subnets(round_, shares)):
            order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
            flat = whole_flat(prepared, network, subnet)
            work = LocalSteps(program, subnet, flat, k, round_)
            for step in range(training.local_steps):
                if step == interrupt_at:
                    flat = flat.clone()
                    torch.rand(17)  # another process: another state of torch's generator
                    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
                    work = LocalSteps(program, subnet, flat, k, round_)
                work.step(samples, order, step)
            updates.append((subnet, flat[: program.buffer_size(subnet, persistent=True)], training.local_steps))
        network.commit(updates)
    return network


@OPTIMIZERS
def test_one_subnet_is_plain_torch_bit_for_bit(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any]
) -> None:
    prepared = small_program(norm="batch", subnets=1, local_steps=J, rounds=3, batch_size=8, optimizer=optimizer)
    network = train(prepared, 3, [1.0])

    module, samples = prepared.module.train(), prepared.program.source.open()
    kwargs = {name: value for name, value in optimizer.items() if name != "name"}
    plain = (torch.optim.AdamW if optimizer["name"] == "adamw" else torch.optim.SGD)(module.parameters(), **kwargs)
    order = BatchOrder(0, len(samples), 8, 1)
    for step in range(3 * J):
        inputs, labels = samples.batch(order.batch(0, step))
        plain.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        plain.step()
    for name, ours, theirs in zip(names(module), network.values, module.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def test_a_reset_optimizer_starts_every_round_without_momentum(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=1, local_steps=J, optimizer={**MOMENTUM, "state": "reset"})
    network = train(prepared, 2, [1.0])
    module, samples = prepared.module, prepared.program.source.open()
    for round_ in range(2):
        plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        order = BatchOrder(0, len(samples), 4, 1)
        for step in range(J):
            inputs, labels = samples.batch(order.batch(0, round_ * J + step))
            plain.zero_grad()
            functional.cross_entropy(module(inputs), labels).backward()
            plain.step()
    assert all(torch.equal(a, b) for a, b in zip(network.values, module.parameters(), strict=True))
    assert len(network.slots) == 1


def dropout_program(optimizer: dict[str, Any], source: Any) -> Prepared:
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    training = TrainingSettings.model_validate(
        {"subnets": 2, "local_steps": J, "rounds": 2, "batch_size": 8, "optimizer": optimizer}
    )
    return prepare(module, source, None, named_loss("cross_entropy"), training)


@pytest.mark.parametrize("interrupt_at", [1, J - 1])
@pytest.mark.parametrize("state", ["travel", "reset"])
@OPTIMIZERS
def test_a_subnet_resumed_from_its_mark_has_the_same_bits(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any], state: str, interrupt_at: int
) -> None:
    """With dropout, whose masks are keyed by the step and not by the process."""
    prepared = dropout_program({**optimizer, "state": state}, small_program().program.source)
    straight = train(prepared, 2, [0.5, 0.5])
    resumed = train(prepared, 2, [0.5, 0.5], interrupt_at)
    assert torch.equal(resumed.flat, straight.flat)
    assert straight.sha256() != Network(prepared.program.layout, 1, prepared.network).sha256()


def test_dropout_differs_between_steps_subnets_and_rounds() -> None:
    assert len({key(0, "step", r, k, s) for r in range(3) for k in range(3) for s in range(3)}) == 27


def test_what_is_frozen_does_not_move(small_program: Callable[..., Prepared]) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].bias.requires_grad_(False)
    training = TrainingSettings.model_validate({"subnets": 2, "local_steps": J, "optimizer": MOMENTUM, "batch_size": 8})
    prepared = prepare(module, small_program().program.source, None, named_loss("cross_entropy"), training)
    network = train(prepared, 2, [0.5, 0.5])
    moved = [not torch.equal(a, b) for a, b in zip(network.values, module.parameters(), strict=True)]
    assert moved == [True, False, True, True]


def test_tied_parameters_are_trained_as_one(small_program: Callable[..., Prepared]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.up, self.down = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.down(torch.relu(self.up(self.tokens(x)))))
            return logits

    source = type(small_program().program.source)(np.arange(20).reshape(10, 2) % 5, np.arange(20).reshape(10, 2) % 3)
    training = TrainingSettings.model_validate({"subnets": 1, "local_steps": J, "batch_size": 4, "optimizer": SGD})
    prepared = prepare(Tied(), source, None, named_loss("cross_entropy"), training)
    network = train(prepared, 1, [1.0])
    module, samples, order = prepared.module, source.open(), BatchOrder(0, 10, 4, 1)
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(J):
        inputs, labels = samples.batch(order.batch(0, step))
        plain.zero_grad()
        functional.cross_entropy(module(inputs).flatten(0, 1), labels.flatten()).backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(network.values, module.parameters(), strict=True))


@pytest.mark.parametrize(("samples", "batch", "subnets"), [(24, 4, 1), (24, 4, 3), (24, 4, 4), (26, 4, 2), (30, 1, 7)])
def test_an_epoch_deals_every_sample_once_across_all_subnets(samples: int, batch: int, subnets: int) -> None:
    orders = [BatchOrder(5, samples, batch, subnets) for _ in range(subnets)]
    per_epoch = samples // batch
    dealt = [orders[k].batch(k, step) for step in range(3 * per_epoch) for k in range(subnets)]
    epochs = [np.concatenate(dealt[e * per_epoch : (e + 1) * per_epoch]) for e in range(3)]
    for epoch in epochs:
        assert len(epoch) == per_epoch * batch == len(set(epoch.tolist()))
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_batch_larger_than_the_data_is_all_of_it() -> None:
    assert sorted(BatchOrder(0, 5, 128, 2).batch(1, 9).tolist()) == list(range(5))


def test_a_cosine_schedule_goes_from_lr_to_zero_and_a_constant_one_stays() -> None:
    training = TrainingSettings(local_steps=5, rounds=4, optimizer=OptimizerSettings(lr=0.2, schedule="cosine"))
    assert learning_rate(training, 0) == pytest.approx(0.2)
    assert learning_rate(training, 10) == pytest.approx(0.1)
    assert learning_rate(training, 20) == pytest.approx(0.0)
    constant = TrainingSettings(local_steps=5, rounds=4, optimizer=OptimizerSettings(lr=0.2))
    assert {learning_rate(constant, step) for step in range(20)} == {0.2}


class Sum(torch.autograd.Function):
    """Of two layers' outputs; some batches have no gradient for the second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return first + second

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, gradients[0], gradients[0] if x[0, 0] > 0 else None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Sum.apply(x, self.first(x), self.second(x))
        return found


def test_steps_without_a_gradient_count_for_whoever_goes_on_from_a_mark(small_program: Callable[..., Prepared]) -> None:
    training = TrainingSettings.model_validate(
        {"method": "local-sgd", "subnets": 1, "local_steps": 8, "rounds": 2, "batch_size": 4, "optimizer": ADAMW}
    )
    prepared = prepare(Two(), small_program().program.source, None, named_loss("cross_entropy"), training)
    alone, interrupted = (train(prepared, 2, [1.0], interrupt_at=at) for at in (None, 5))
    assert all(torch.equal(a, b) for a, b in zip(alone.values, interrupted.values, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@OPTIMIZERS
def test_a_gpu_trains_what_a_cpu_trains(small_program: Callable[..., Prepared], optimizer: dict[str, Any]) -> None:
    prepared = small_program(norm="batch", subnets=1, local_steps=J, batch_size=8, optimizer=optimizer)
    program, samples = prepared.program, prepared.program.source.open()
    (subnet,) = program.subnets(0, [1.0])
    network = Network.of(program, prepared.network)
    ends = []
    for device in ("cpu", "cuda"):
        flat = whole_flat(prepared, network, subnet).to(device)
        work = LocalSteps(program, subnet, flat, 0, 0)
        for step in range(J):
            work.step(samples, BatchOrder(0, len(samples), 8, 1), step)
        ends.append(flat.cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)
    assert not torch.equal(ends[1][: subnet.parameters], network.pull(subnet)[: subnet.parameters])
