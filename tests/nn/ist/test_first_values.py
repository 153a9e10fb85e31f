"""Freshly drawn weights begin as large in a subnet as in a network of its width; all others begin as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist.first_values import is_drawn, shrink_drawn
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.local_steps import assemble
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, prepare
from tests.conftest import Given

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(24, 8),
    "wide linear": lambda: nn.Linear(512, 256),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "grouped convolution": lambda: nn.Conv2d(8, 8, 3, groups=4),
    "transposed convolution": lambda: nn.ConvTranspose1d(6, 10, 5),
}
DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "Kaiming": nn.init.kaiming_uniform_,
    "Xavier": nn.init.xavier_uniform_,
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "zeros": nn.init.zeros_,
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "another bound": lambda weight: nn.init.uniform_(weight, -0.1, 0.1),
    "half as large": lambda weight: weight.data.mul_(0.5),
    "one value off": lambda weight: weight.data.view(-1)[0].fill_(1.0),
    "ones": nn.init.ones_,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("draw", ["its own", *DRAWS])
def test_weights_as_torch_draws_them_are_recognized_with_every_seed(layer: str, draw: str) -> None:
    for seed in range(300):
        torch.manual_seed(seed)
        weight = LAYERS[layer]().weight
        assert isinstance(weight, Tensor)
        if draw in DRAWS:
            DRAWS[draw](weight)
        assert is_drawn(weight.detach()), seed


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_weights_that_were_made_otherwise_are_not(layer: str, other: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        weight = LAYERS[layer]().weight
        assert isinstance(weight, Tensor)
        OTHERS[other](weight)
        assert not is_drawn(weight.detach()), seed


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_were_trained_are_not(optimizer: type[torch.optim.Optimizer]) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        x, y = torch.randn(64, 64), torch.randn(64, 64)
        opened = optimizer(net.parameters(), lr=0.1 if optimizer is torch.optim.SGD else 1e-3)  # type: ignore[call-arg]
        for _ in range(10):
            opened.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            opened.step()
        assert not any(is_drawn(p.detach()) for p in net.parameters())


def mlp(hidden: int = 256, *, bias: bool = True) -> nn.Sequential:
    widths = [64, hidden, hidden, hidden]
    layers = [[nn.Linear(a, b, bias), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(hidden, 10, bias))


def prepared(module: nn.Module, **training: Any) -> Prepared:
    rows = Given(torch.randn(256, 64), torch.randint(10, (256,)))
    settings = {"subnets": 8, "rounds": 1, "local_steps": 1, "batch_size": 16} | training
    return prepare(module, rows, None, "cross_entropy", TrainingSettings(**settings))


def test_a_subnet_s_outputs_begin_as_large_as_those_of_a_network_of_its_width() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64)
    narrow = torch.stack([mlp(32, bias=False)(x).std() for _ in range(8)]).mean().item()
    made = prepared(mlp(bias=False))
    program = made.program
    as_given = Network(program.layout, 1, made.network)
    subnets = program.subnets(0, program.specs((1 / 8,) * 8, 1))
    outputs = {}
    for name, network in (("as given", as_given), ("begun", Network.of(program, made.network))):
        modules = [module_of(made, subnet, network) for subnet in subnets]
        outputs[name] = torch.stack([module(x).std() for module in modules]).mean().item()
    assert outputs["begun"] == pytest.approx(narrow, rel=0.2)
    assert outputs["as given"] > 4 * narrow


def module_of(made: Prepared, subnet: Subnet, network: Network) -> Any:
    return assemble(made.program.module, subnet, network.pull(subnet)[: subnet.parameters])


def test_only_weights_of_scaled_sums_shrink_and_the_given_module_keeps_its_own() -> None:
    module = mlp()
    before = [p.detach().clone() for p in module.parameters()]
    made = prepared(module)
    network = Network.of(made.program, made.network)
    ratios = {
        name: (value / old).mean().item()
        for (name, _), value, old in zip(module.named_parameters(), network.values, before, strict=True)
    }
    shrunk = {"2.weight", "4.weight", "6.weight"}
    assert {name for name, ratio in ratios.items() if ratio != 1} == shrunk
    assert [ratios[name] for name in sorted(shrunk)] == pytest.approx([math.sqrt(1 / 8)] * 3)
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("training", [{"method": "local-sgd"}, {"subnets": 1}, {"copies": 8}])
def test_networks_that_train_whole_begin_as_they_are(training: dict[str, Any]) -> None:
    made = prepared(mlp(), **training)
    network = Network.of(made.program, made.network)
    assert all(torch.equal(value, given) for value, given in zip(network.values, made.network, strict=True))


def test_a_pretrained_network_begins_as_it_is() -> None:
    module = mlp()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.001 * torch.randn_like(parameter))
    made = prepared(module)
    network = Network.of(made.program, made.network)
    assert all(torch.equal(value, given) for value, given in zip(network.values, made.network, strict=True))


def test_an_average_begins_with_the_same_values() -> None:
    made = prepared(mlp(), ema=0.9)
    network = Network.of(made.program, made.network)
    assert all(torch.equal(mean, value) for mean, value in zip(network.averaged, network.values, strict=True))
    assert not torch.equal(network.values[2], made.network[2])


def test_a_subnet_that_lacks_a_tensor_s_neurons_says_nothing_of_their_share() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    layout = prepared(module).program.layout
    nothing, half = np.zeros(64, dtype=np.bool_), np.arange(64) < 32
    values = [p.detach().clone() for p in module.parameters()]
    shrink_drawn(values, [cut(layout, nothing), cut(layout, half)])
    assert torch.allclose(values[2], module[2].weight * math.sqrt(0.5))


def test_what_the_network_computes_stays_the_mean_of_its_subnets() -> None:
    """A linear network of one hidden layer, where the mean can be written down."""
    module = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4))
    rows = Given(torch.randn(64, 16), torch.randint(4, (64,)))
    settings = TrainingSettings(subnets=4, rounds=1, local_steps=1, batch_size=16)
    made = prepare(module, rows, None, "cross_entropy", settings)
    network = Network.of(made.program, made.network)
    subnets = made.program.subnets(0, made.program.specs((0.25,) * 4, 1))
    x = torch.randn(8, 16)
    mean = torch.stack([module_of(made, subnet, network)(x) for subnet in subnets]).mean(0)
    assert torch.allclose(assembled(made.module, network.values)(x), mean, atol=1e-5)
