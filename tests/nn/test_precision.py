"""Parameters of 16 bits have masters of 32; steps compute in bfloat16, compiled, or with channels last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import idletrain
from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps, assemble
from idletrain.nn.network import Network
from idletrain.nn.precision import Forward, as_given, memory_format
from idletrain.nn.prepare import Prepared, prepare
from idletrain.optimizer_settings import OptimizerSettings

HALVES = by_neurons((0.5, 0.5))


class Opened(ArraySource):
    """Arrays that are their own source."""

    def open(self) -> ArraySource:
        return self


def rows(*shape: int, samples: int = 64) -> Opened:
    x = np.random.Generator(np.random.Philox(0)).standard_normal((samples, *shape)).astype(np.float32)
    return Opened(x, x.reshape(samples, -1)[:, :3].argmax(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


class Images(nn.Module):
    """A small network for images that notes how its inputs lie in memory, and their number format behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 3)
        self.seen: list[tuple[bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.seen.append((x.is_contiguous(memory_format=torch.channels_last), hidden.dtype))
        logits: Tensor = self.out(torch.relu(self.second(hidden)).mean((2, 3)))
        return logits


def prepared(module: nn.Module, data: Opened, **settings: Any) -> Prepared:
    optimizer = OptimizerSettings(name="adamw", lr=1e-2)
    training = TrainingSettings(**{"subnets": 2, "batch_size": 16, "optimizer": optimizer, **settings})
    return prepare(module, data, None, None, training)


def step(made: Prepared) -> tuple[Any, Tensor]:
    """Do one local step; return the subnet's module and its buffer."""
    (subnet, _) = made.program.subnets(0, HALVES)
    flat = Network.of(made.program, made.network).pull(subnet)
    work = LocalSteps(made.program, subnet, flat, 0, 0)
    work.step(made.program.source.open(), BatchOrder(0, 64, 16, 2), 0)
    return work.module, flat


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_have_masters_of_32(half: torch.dtype) -> None:
    made = prepared(mlp().to(half), rows(8))
    assert made.program.precision == "bfloat16"
    assert made.program.training.precision is None  # as the job has it
    assert {value.dtype for value in made.network} == {torch.float32}
    assert made.program.training.method == "ist"
    given = mlp().to(half)
    assert torch.equal(made.network[0], given[0].weight.float())  # type: ignore[operator]
    _, flat = step(made)
    assert (flat != flat.bfloat16()).any()  # no master was rounded
    assert {p.dtype for p in as_given(made.module, given).parameters()} == {half}


def test_steps_compute_in_bfloat16_where_the_job_says_so_and_in_float32_else() -> None:
    seen = {}
    for precision in (None, "bfloat16"):
        module, _ = step(prepared(Images(), rows(3, 8, 8), precision=precision))
        seen[precision] = module.seen[-1][1]
    assert seen == {None: torch.float32, "bfloat16": torch.bfloat16}


def test_a_loss_gets_outputs_of_float32() -> None:
    forward = Forward(mlp(), "bfloat16")
    outputs = forward(torch.ones(2, 8))
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.bfloat16().float())  # it was computed in bfloat16


def test_a_module_that_does_not_compute_in_bfloat16_is_refused() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(len(x), 3).index_add_(0, torch.arange(len(x)), self.layer(x))  # of one number format

    with pytest.raises(
        JobError, match=r"training.precision: the model does not compute in bfloat16 \(.*; leave it out"
    ):
        prepared(Summed(), rows(8), precision="bfloat16")


def test_channels_last_modules_get_inputs_with_channels_last_and_are_returned_so() -> None:
    for last in (False, True):
        given: Any = Images()
        given = given.to(memory_format=torch.channels_last) if last else given
        made = prepared(given, rows(3, 8, 8))
        module, _ = step(made)
        assert module.seen[-1][0] == last
        finished = as_given(made.module, given)
        assert (memory_format(finished) == torch.channels_last) == last


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_compiled_subnets_compute_the_same_and_are_compiled_once_for_their_shapes() -> None:
    made = prepared(mlp(), rows(8))
    assert made.program.layout.contractions[0].scaling == "weights"
    network, x = Network.of(made.program, made.network), torch.from_numpy(rows(8).x[:16])
    graphs = []
    for round_ in range(2):
        for subnet in made.program.subnets(round_, HALVES):
            module = assemble(made.program.module, subnet, network.pull(subnet)[: subnet.parameters])
            outputs = Forward(module, "float32", compiled=True)(x)
            assert torch.allclose(outputs, module(x), atol=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}


def test_a_run_trains_a_bfloat16_module_compiled(tmp_path: Path) -> None:
    data, module = rows(8, samples=256), mlp().bfloat16()
    result = idletrain.fit(
        module, (data.x, data.y), subnets=2, workers=1, local_steps=8, rounds=6, batch_size=16, run_dir=tmp_path,
        optimizer={"name": "adamw", "lr": 1e-2}, training={"compile": True},
    )  # fmt: skip
    assert {p.dtype for p in result.module.parameters()} == {torch.bfloat16}
    x, y = torch.from_numpy(data.x).bfloat16(), torch.from_numpy(data.y)
    with torch.no_grad():
        before, after = (nn.functional.cross_entropy(net(x), y).item() for net in (module, result.module))
    assert after < 0.7 * before
