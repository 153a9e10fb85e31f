"""One subnet is plain SGD, bit for bit; a subnet resumed from a mark is the one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import flowers
from torch import nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.export import finished_module
from idletrain.job import TrainingSettings
from idletrain.nn.ist.randomness import key
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.models import mlp
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, named_loss, prepare

SGD = {"name": "sgd", "lr": 0.1}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
NESTEROV = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
ADAM = {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
RMSPROP = {"name": "rmsprop", "lr": 0.01, "momentum": 0.5, "alpha": 0.9, "weight_decay": 0.1}
ADAGRAD = {"name": "adagrad", "lr": 0.05, "weight_decay": 0.1}
TORCH = {
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [SGD, MOMENTUM, NESTEROV, ADAM, ADAMW, RMSPROP, ADAGRAD],
    ids=["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad"],
)
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
        for k, subnet in enumerate(program.subnets(round_, by_neurons(shares))):
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


def assert_as_torch(prepared: Prepared, network: Network, plain: torch.optim.Optimizer) -> None:
    """Take 3 * J steps by torch's own optimizer and the program's schedule: they end in the network's bits."""
    module, samples = prepared.module.train(), prepared.program.source.open()
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, prepared.program.lr_factor)
    order = BatchOrder(0, len(samples), 8, 1)
    for step in range(3 * J):
        inputs, labels = samples.batch(order.batch(0, step))
        plain.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()
        plain.step()
        scheduler.step()
    for name, ours, theirs in zip(names(module), network.values, module.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@OPTIMIZERS
def test_one_subnet_is_plain_torch_bit_for_bit(
    small_program: Callable[..., Prepared], optimizer: dict[str, Any]
) -> None:
    prepared = small_program(norm="batch", subnets=1, local_steps=J, rounds=3, batch_size=8, optimizer=optimizer)
    network = train(prepared, 3, [1.0])

    kwargs = {name: value for name, value in optimizer.items() if name != "name"}
    plain = TORCH[optimizer["name"]](prepared.module.parameters(), **kwargs)
    assert_as_torch(prepared, network, plain)


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
    assert [t.name for t in prepared.program.layout.tensors] == ["0.weight", "2.weight", "2.bias"]
    finished = finished_module(prepared, network)
    moved = [not torch.equal(a, b) for a, b in zip(finished.parameters(), module.parameters(), strict=True)]
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


def test_groups_and_a_schedule_are_torchs_bit_for_bit_through_a_resumption(
    small_program: Callable[..., Prepared],
) -> None:
    groups = [{"parameters": ["bias", "norm"], "weight_decay": 0.0}, {"parameters": ["4.*"], "lr": 0.03}]
    fields = {**ADAMW, "groups": groups, "schedule": "cosine", "warmup_steps": 3}
    prepared = small_program(norm="batch", subnets=1, local_steps=J, rounds=3, batch_size=8, optimizer=fields)
    network = train(prepared, 3, [1.0], interrupt_at=2)

    module = prepared.module
    plain_names = [name for name, p in module.named_parameters() if p.ndim < 2]
    assert {name.rpartition(".")[2] for name in plain_names} == {"weight", "bias"}  # of norms, too
    fast = [name for name in names(module) if name.startswith("4.") and name not in plain_names]
    assert fast
    parameters = dict(module.named_parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in plain_names], "weight_decay": 0.0},
            {"params": [parameters[name] for name in fast], "lr": 0.03},
            {"params": [p for name, p in parameters.items() if name not in (*plain_names, *fast)]},
        ],
        lr=0.01,
        weight_decay=0.1,
        betas=(0.8, 0.95),
    )
    assert prepared.program.lr_factor(0) == 1 / 4
    assert_as_torch(prepared, network, plain)


def plain_steps(prepared: Prepared, batch: int, loss: Callable[..., torch.Tensor], clip: float | None = None) -> Any:
    """Train the module by a loop of torch with SGD for one round; return it."""
    module, samples = prepared.module.train(), prepared.program.source.open()
    plain, order = torch.optim.SGD(module.parameters(), lr=0.1), BatchOrder(0, len(samples), batch, 1)
    for step in range(J):
        inputs, labels = samples.batch(order.batch(0, step))
        plain.zero_grad()
        loss(module(inputs), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        plain.step()
    return module


@pytest.mark.parametrize("most", [0.05, 1e6], ids=["clipped", "not"])
def test_clipping_is_torchs_bit_for_bit(small_program: Callable[..., Prepared], most: float) -> None:
    fields = {**SGD, "clip_norm": most}
    prepared = small_program(subnets=1, local_steps=J, rounds=1, batch_size=8, optimizer=fields)
    assert prepared.program.out_of_core == "never"
    network = train(prepared, 1, [1.0])
    began = [value.clone() for value in prepared.network]
    module = plain_steps(prepared, 8, functional.cross_entropy, most)
    assert all(torch.equal(a, b) for a, b in zip(network.values, module.parameters(), strict=True))
    moved = torch.cat([(a - b).flatten() for a, b in zip(network.values, began, strict=True)]).norm()
    assert (moved <= 0.1 * 0.05 * J * 1.0001) == (most == 0.05)


def test_smoothed_labels_are_torchs_and_evaluations_have_none(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=1, local_steps=J, rounds=1, batch_size=8, optimizer=SGD, label_smoothing=0.2)
    network = train(prepared, 1, [1.0])
    module = plain_steps(prepared, 8, nn.CrossEntropyLoss(label_smoothing=0.2))
    assert all(torch.equal(a, b) for a, b in zip(network.values, module.parameters(), strict=True))
    assert prepared.program.loss is named_loss("cross_entropy")


class Tokens(nn.Module):
    """Classes of each of several tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.first(x)))
        return found


def tokens() -> Any:
    """Samples of four tokens each, some of whose labels are ignored: all of one micro-batch's, even."""
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4, 6)).astype(np.float32)
    y = x[:, :, :3].argmax(2)
    y[random.random(size=y.shape) < 0.4] = -100
    y[3] = -100
    return x, y


def prepared_tokens(given: Any, **fields: Any) -> Prepared:
    settings = {"method": "local-sgd", "subnets": 1, "local_steps": J, "rounds": 1, "optimizer": SGD, **fields}
    torch.manual_seed(0)
    return prepare(Tokens(), given, None, named_loss("cross_entropy"), TrainingSettings.model_validate(settings))


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_micro_batches_give_the_gradients_of_the_whole_batch(small_program: Callable[..., Prepared], size: int) -> None:
    given = type(small_program().program.source)(*tokens())
    whole = train(prepared_tokens(given, batch_size=8), 1, [1.0])
    prepared = prepared_tokens(given, batch_size=8, micro_batch=size)
    assert prepared.program.micro_batch == (size if size < 8 else None)
    parts = train(prepared, 1, [1.0])
    resumed = train(prepared, 1, [1.0], interrupt_at=2)
    assert torch.equal(parts.flat, resumed.flat)
    torch.testing.assert_close(parts.flat, whole.flat, rtol=1e-5, atol=1e-6)
    assert torch.equal(parts.flat, whole.flat) == (size == 8)


def summed(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, labels, reduction="sum")


def test_micro_batches_of_a_summed_loss_give_the_gradients_of_the_whole_batch() -> None:
    moved = []
    for size in (None, 3):
        torch.manual_seed(0)
        training = TrainingSettings(method="local-sgd", subnets=1, batch_size=8, micro_batch=size)
        prepared = prepare(mlp((6, 8, 3), None), flowers(32, 6, 3), None, summed, training)
        program, samples = prepared.program, prepared.program.source.open()
        (subnet,) = program.subnets(0, by_neurons([1.0]))
        flat = whole_flat(prepared, Network.of(program, prepared.network), subnet)
        loss = LocalSteps(program, subnet, flat, 0, 0).step(samples, BatchOrder(0, len(samples), 8, 1), 0)
        moved.append(torch.cat([flat, loss[None]]))
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-5, atol=1e-6)
    assert moved[0][-1] > 8 * 0.5  # it is a sum
    assert not torch.equal(moved[0], moved[1])


def test_samples_are_read_a_micro_batch_at_a_time(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program(subnets=1, batch_size=8, micro_batch=3)
    program, samples, read = prepared.program, prepared.program.source.open(), []

    class Counting:
        def __len__(self) -> int:
            return len(samples)

        def batch(self, index: Any) -> Any:
            read.append(len(index))
            return samples.batch(index)

    (subnet,) = program.subnets(0, by_neurons([1.0]))
    flat = whole_flat(prepared, Network.of(program, prepared.network), subnet)
    LocalSteps(program, subnet, flat, 0, 0).step(Counting(), BatchOrder(0, len(samples), 8, 1), 0)
    assert read == [3, 3, 2]


def test_batch_norm_takes_no_micro_batches_unless_the_job_says_so(small_program: Callable[..., Prepared]) -> None:
    with pytest.raises(JobError) as error:
        small_program(norm="batch", batch_size=8, micro_batch=4)
    assert str(error.value).startswith("training.micro_batch: 2 is a BatchNorm, whose statistics would be those of a")
    prepared = small_program(norm="batch", subnets=1, batch_size=8, micro_batch=4, ghost_batches=True)
    assert prepared.program.micro_batch == 4
    before = [value.clone() for value in prepared.network]
    after = train(prepared, 1, [1.0]).values
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


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
    (subnet,) = program.subnets(0, by_neurons([1.0]))
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


class Kept(nn.Module):
    """A codebook that training reads, in double precision, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.first(x - self.shift.float())))
        if self.training:
            self.shift = 0.9 * self.shift + 0.1 * x.double().mean(0)
            self.steps += 1
        return found


def test_buffers_travel_and_whoever_goes_on_from_a_mark_has_the_same_bits(
    small_program: Callable[..., Prepared],
) -> None:
    training = TrainingSettings.model_validate({"subnets": 2, "local_steps": 8, "rounds": 2, "batch_size": 4})
    prepared = prepare(Kept(), small_program().program.source, None, named_loss("cross_entropy"), training)
    assert prepared.program.buffers == {"shift": "mean", "steps": "sum"}
    alone, interrupted = (train(prepared, 2, [0.5, 0.5], interrupt_at=at) for at in (None, 5))
    assert torch.equal(alone.flat, interrupted.flat)
    shift, steps = alone.values[-2:]
    assert shift.abs().sum() > 0
    assert int(steps) == 2 * 2 * 8  # of both rounds and both subnets


def test_a_buffer_that_changes_later_than_in_the_trial_is_told(small_program: Callable[..., Prepared]) -> None:
    prepared = small_program()
    program = prepared.program
    program.module.register_buffer("late", torch.zeros(2))
    (subnet, *_) = program.subnets(0, by_neurons([0.5, 0.5]))
    work = LocalSteps(program, subnet, torch.zeros(program.buffer_size(subnet, persistent=False)), 0, 0)
    work.check_buffers()
    work.module.late.add_(1)  # type: ignore[operator, union-attr]
    with pytest.raises(JobError, match="buffer late cannot be kept in training"):
        work.check_buffers()
