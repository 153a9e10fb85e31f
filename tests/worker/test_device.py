"""The device of a worker: its speed, and the same bits every time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from idletrain.worker import device

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


@pytest.fixture
def strict() -> Iterator[None]:
    """Torch as a worker with a GPU sets it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def put() -> torch.Tensor:
    """An operation that torch cannot do with the same bits every time, on any device."""
    return torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 1.0]))


def test_speed_is_measured_in_steps_a_second() -> None:
    assert 1 < device.measure_speed(torch.device("cpu")) < 1e6


@pytest.mark.usefixtures("strict")
def test_a_step_that_cannot_be_repeated_is_said_once_and_done(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="deterministic"):
        put()
    with caplog.at_level(logging.WARNING):
        assert [float(device.repeatably(put)[0]) for _ in range(2)] == [1, 1]
    (said,) = caplog.messages
    assert said.startswith("another attempt may compute other bits on a GPU: put_ does not have a deterministic")


@pytest.mark.usefixtures("strict")
def test_other_faults_of_a_step_are_raised_once() -> None:
    runs = []

    def step() -> None:
        runs.append(1)
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        device.repeatably(step)
    assert len(runs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kind", ["convolutions", "attention", "embedding"])
def test_a_gpu_computes_the_same_bits_every_time(kind: str) -> None:
    device.make_repeatable()
    device.compute_repeatably(wanted=True)
    torch.manual_seed(0)
    makers = {
        "convolutions": lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, 2), nn.AvgPool2d(3)
        ),
        "attention": lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        "embedding": lambda: nn.Embedding(10, 64),
    }
    inputs = {
        "convolutions": torch.randn(64, 3, 32, 32),
        "attention": torch.randn(64, 128, 64),
        "embedding": torch.randint(10, (4096,)),
    }
    module, x = makers[kind]().cuda(), inputs[kind].cuda()
    ends = []
    for _ in range(3):
        own = copy.deepcopy(module)
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        for step in range(20):
            torch.cuda.manual_seed(step)
            optimizer.zero_grad()
            device.repeatably(lambda own=own: own(x).square().mean().backward())
            optimizer.step()
        ends.append([p.detach().clone() for p in own.parameters()])
    device.compute_repeatably(wanted=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))
