"""Modules that torch.jit has compiled are copied, sent and trained whole."""

from __future__ import annotations

import inspect
import io
import pickle
import warnings
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Given
from torch import Tensor, nn

from idletrain.errors import JobError
from idletrain.export import finished_module
from idletrain.job import TrainingSettings
from idletrain.nn import travel
from idletrain.nn.alone import train_alone
from idletrain.nn.data.batches import call
from idletrain.nn.ist.groups import to_meta
from idletrain.nn.ist.modules import copied
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import LocalSteps
from idletrain.nn.memory import subnet_need
from idletrain.nn.network import Network
from idletrain.nn.orders import batch_order
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.scripted import parameters_of, scripted_layers

X, Y = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32), np.arange(64) % 3
SAMPLE = torch.from_numpy(X[:8])

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Net(nn.Module):
    """Layers of several kinds, with a buffer, a constant and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 8, bias=False))
        self.head = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.scale = 2.0

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        y: Tensor = self.head(torch.sigmoid(self.norm(self.body(x)))) * self.scale + shift
        return y


class Around(nn.Module):
    """A module with a compiled layer, whose weight another layer shares, and a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = scripted(Net())
        self.again = nn.Linear(8, 3)
        self.again.weight = self.inner.head.weight
        self.do = torch.jit.script(_halved)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.do(self.inner(x)) + self.again(torch.sigmoid(self.inner.body(x)))
        return y


def _halved(x: Tensor) -> Tensor:
    return x / 2


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # of torch's own BatchNorm
        return torch.jit.trace(module, SAMPLE, check_trace=False)


def loaded(module: nn.Module) -> Any:
    file = io.BytesIO(torch.jit.script(module).save_to_buffer())
    return torch.jit.load(file)


def around(_module: nn.Module) -> nn.Module:
    return Around()


def outputs(module: nn.Module, x: Any = X[:8]) -> Tensor:
    torch.manual_seed(0)  # a traced module drops out in evaluation, too
    with torch.no_grad():
        y: Tensor = module.eval()(torch.from_numpy(x))
    return y


KINDS = pytest.mark.parametrize("kind", [scripted, traced, loaded, around], ids=lambda kind: kind.__name__)


def prepared(module: nn.Module, **settings: Any) -> Prepared:
    fields = {
        "subnets": 2,
        "batch_size": 8,
        "rounds": 2,
        "local_steps": 4,
        "optimizer": {"name": "sgd", "lr": 0.1},
        **settings,
    }
    return prepare(module, Given(X, Y), None, "cross_entropy", TrainingSettings.model_validate(fields))


@KINDS
def test_a_copy_has_parameters_of_its_own_and_computes_the_same(kind: Callable[[nn.Module], nn.Module]) -> None:
    module = kind(Net())
    twin = copied(copied(module))
    assert torch.equal(outputs(twin), outputs(module))
    pairs = list(zip(twin.named_parameters(), module.named_parameters(), strict=True))
    assert all(a[0] == b[0] and a[1] is not b[1] and torch.equal(a[1], b[1]) for a, b in pairs)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in twin.parameters())
    next(twin.parameters()).data.add_(1)
    assert not torch.equal(outputs(twin), outputs(module))


@KINDS
def test_a_network_without_values_travels_in_few_bytes_and_takes_them_again(
    kind: Callable[[nn.Module], nn.Module],
) -> None:
    module = kind(Net())
    sent = travel.dumps(to_meta(module))
    there = pickle.loads(sent)
    assert {p.device.type for p in there.parameters()} == {"meta"}
    memo: Any = {id(a): nn.Parameter(b.detach()) for a, b in zip(there.parameters(), module.parameters(), strict=True)}
    assert torch.equal(outputs(copied(there, memo)), outputs(module))


def test_values_do_not_travel_with_a_network_without_them() -> None:
    small, large = (len(travel.dumps(to_meta(scripted(nn.Linear(n, n))))) for n in (2, 500))
    assert large - small < 500


def test_tensors_that_layers_share_stay_shared() -> None:
    for twin in (copied(Around()), pickle.loads(travel.dumps(to_meta(Around())))):
        assert twin.again.weight is twin.inner.head.weight


@KINDS
def test_it_is_trained_whole_and_comes_back_as_it_was(kind: Callable[[nn.Module], nn.Module]) -> None:
    module = kind(Net())
    got = prepared(module, rounds=10, local_steps=10)
    assert got.program.layout.groups == ()
    name = "it" if kind is not around else "its layer inner"
    assert got.fallback == (
        "the model is trained whole, by local-sgd and not by ist: "
        f"{name} is compiled by torch.jit, and its neurons cannot be followed; write model.groups by hand to split it"
    )
    result = finished_module(got, train_alone(got))
    assert list(scripted_layers(result)) == list(scripted_layers(module))
    before, after = (nn.functional.cross_entropy(outputs(m, X), torch.from_numpy(Y)) for m in (module, result))
    assert after < before - 0.05
    (mean,) = (buffer for name, buffer in result.named_buffers() if name.endswith("norm.running_mean"))
    assert not torch.equal(mean, torch.zeros(8))


def test_groups_by_hand_split_compiled_layers_too() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), scripted(nn.Linear(8, 3)))
    table = {"0.weight": ("g", None), "0.bias": ("g",), "2.weight": (None, "g")}
    training = TrainingSettings.model_validate({"subnets": 2, "batch_size": 8, "rounds": 1, "local_steps": 2})
    got = prepare(module, Given(X, Y), None, "cross_entropy", training, table=table)
    assert (got.fallback, got.program.layout.sizes) == ("", (8,))
    subnet = got.program.subnets(0, by_neurons((0.5, 0.5)))[0]
    assert subnet.shapes == ((4, 6), (4,), (3, 4), (3,))
    assert not torch.equal(train_alone(got).values[2], module[2].weight.detach())


@KINDS
def test_a_round_has_the_same_bits_wherever_it_is_computed(kind: Callable[[nn.Module], nn.Module]) -> None:
    """The compiler makes other code of it after two calls, which steps after a restart would not have run."""
    got = prepared(kind(Net()), rounds=1, local_steps=6)
    subnet = got.program.subnets(0, by_neurons((1.0, 1.0)))[0]
    samples = got.program.source.open()
    order = batch_order(samples, got.program.training)

    def trained(restarts: Collection[int]) -> Tensor:
        pulled = Network.of(got.program, got.network).pull(subnet)
        flat = torch.zeros(got.program.buffer_size(subnet, persistent=False))
        flat[: len(pulled)] = pulled
        for step in range(6):
            if step in restarts:
                work = LocalSteps(pickle.loads(travel.dumps(got.program)), subnet, flat, 0, 0)
            work.step(samples, order, step)
        return flat

    assert torch.equal(trained([0]), trained([0, 3]))


@KINDS
def test_the_memory_of_what_runs_within_is_counted(kind: Callable[[nn.Module], nn.Module]) -> None:
    small, large = (subnet_need(prepared(kind(Net()), batch_size=n).program)(1.0) for n in (8, 64))
    assert large - small >= 2 * 56 * 4 * (8 + 8 + 8 + 3)  # a float for each output of four layers, and its gradient


def test_a_number_that_a_compiled_layer_carries_from_step_to_step_is_refused_by_name() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.steps = nn.Linear(6, 3), 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1.0
            y: Tensor = self.layer(x) / self.steps
            return y

    with pytest.raises(JobError, match=r"^model: steps changes in training and is used again, but only parameters"):
        prepared(scripted(Counting()))


@pytest.mark.parametrize("kind", [scripted, loaded])
def test_a_batch_by_name_goes_to_the_parameters_of_a_compiled_forward(kind: Callable[[nn.Module], nn.Module]) -> None:
    module = kind(Net()).eval()
    assert [(p.name, p.default) for p in parameters_of(copied(module).forward)] == [
        ("x", inspect.Parameter.empty),
        ("shift", 0.0),
    ]
    assert torch.equal(call(module, {"x": SAMPLE, "shift": 1.0, "more": 2}), module(SAMPLE, 1.0))


def test_a_compiled_layer_within_another_is_no_layer_of_its_own() -> None:
    assert list(scripted_layers(nn.Sequential(nn.Linear(6, 6), scripted(Net())))) == ["1"]
    assert list(scripted_layers(scripted(Net()))) == [""]
    assert scripted_layers(Net()) == {}
