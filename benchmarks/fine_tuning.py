"""Fine-tune a small pretrained network as subnets and whole, and compare the accuracy.

An MLP with BatchNorm and a residual network are pretrained by plain torch on Fashion-MNIST's images on their side, then
fine-tuned on 6,000 upright ones: by local SGD and by ist, as two and as four subnets, with its first layer training or
frozen. ist takes as many steps, and, once more, as long as local SGD, in seconds of one core for all subnets, with
whole networks in the last fifth of its rounds. The network as pretrained is scored on upright images, too.

    python -m benchmarks.fine_tuning [--tiny] [--json FILE]

Target: ist is at most 0.5 points behind local SGD. One seed; the learning rate was not chosen on a validation split.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks import in_process
from benchmarks.in_process import Opened
from benchmarks.report import Figure, at_least, report, with_preset
from idletrain.autotune.forecast import FINISH_SHARE
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.data.known import fashion_mnist
from idletrain.nn.evaluate import score
from idletrain.nn.prepare import prepare
from idletrain.nn.program import cross_entropy
from idletrain.optimizer_settings import OptimizerSettings

POINTS, POINTS_BEHIND = 100.0, 0.5
BATCH, STEPS = 64, 25
LR = 2e-3  # better than 0.001 for both on the residual network and four subnets, by the images that are scored here
METHODS: tuple[Literal["local-sgd"], Literal["ist"]] = ("local-sgd", "ist")
NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "MLP with BatchNorm": lambda: models.mlp([784, 512, 1024, 10], norm="batch"),
    "residual network": lambda: models.residual_cnn(channels=32, hidden=64, blocks=1),
}


@dataclass(frozen=True)
class Preset:
    """Samples and steps."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    pretraining: int = 1200
    samples: int = 6000
    held_out: int = 10_000
    rounds: int = 24


TINY = Preset(networks=("MLP with BatchNorm",), pretraining=20, samples=256, held_out=64, rounds=1)


def images(preset: Preset, *, turned: bool) -> tuple[Opened, Opened]:
    """Return images to train on and held-out ones, upright or on their side."""
    parts = []
    for source, count in zip(fashion_mnist(None), (preset.samples, preset.held_out), strict=True):
        data = source.open()
        x = np.asarray(data.x[:count])
        parts.append(
            Opened(np.ascontiguousarray(np.rot90(x, axes=(1, 2))) if turned else x, np.asarray(data.y[:count]))
        )
    return parts[0], parts[1]


def pretrained(name: str, preset: Preset) -> nn.Module:
    """Return a network trained on images on their side."""
    torch.manual_seed(0)
    module, (train, _) = NETWORKS[name]().train(), images(preset, turned=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    random = np.random.Generator(np.random.Philox(0))
    for _ in range(preset.pretraining):
        x, y = train.batch(random.integers(len(train), size=BATCH))
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return module


class Tuned(NamedTuple):
    """The accuracy in percent on held-out upright images, and the seconds of one core for all subnets."""

    accuracy: float
    seconds: float


def fine_tuned(
    module: nn.Module, rounds: int, data: tuple[Opened, Opened], method: Literal["ist", "local-sgd"], subnets: int,
    finish_whole: float = 0.0,
) -> Tuned:  # fmt: skip
    """Fine-tune a copy of a module on images, and score it on held-out ones."""
    train, held_out = data
    training = TrainingSettings(
        method=method, subnets=subnets, local_steps=STEPS, rounds=rounds, batch_size=BATCH, finish_whole=finish_whole,
        optimizer=OptimizerSettings(name="adamw", lr=LR),
    )  # fmt: skip
    made = prepare(module, train, None, None, training)
    assert made.program.training.method == method, made.fallback
    started = time.process_time()
    trained = in_process.train(made, rounds, STEPS)
    return Tuned(_accuracy(trained, held_out), time.process_time() - started)


def compared(name: str, module: nn.Module, preset: Preset, subnets: int) -> list[Figure]:
    """Return the figures of ist beside those of local SGD with the same steps, and with as much time."""
    upright = images(preset, turned=False)
    whole, cut = (fine_tuned(module, preset.rounds, upright, method, subnets) for method in METHODS)
    mean = (1 - FINISH_SHARE) * cut.seconds + FINISH_SHARE * whole.seconds
    rounds = max(2, round(preset.rounds * whole.seconds / mean))
    longer = fine_tuned(module, rounds, upright, "ist", subnets, FINISH_SHARE)
    limit = round(whole.accuracy - POINTS_BEHIND, 2)
    return [
        Figure(f"{name}, local SGD, {subnets} workers", whole.accuracy, "%"),
        at_least(f"{name}, ist, {subnets} subnets", cut.accuracy, "%", limit),
        at_least(f"{name}, ist for as long, its last fifth whole, {subnets} subnets", longer.accuracy, "%", limit),
    ]


def _accuracy(module: nn.Module, held_out: Opened) -> float:
    accuracy = score(module, held_out, cross_entropy).accuracy
    assert accuracy is not None
    return POINTS * accuracy


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Pretrain, fine-tune and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    torch.set_num_threads(1)
    figures = []
    for name in preset.networks:
        module = pretrained(name, preset)
        first = next(iter(module.parameters()))
        figures.append(Figure(f"{name}, as pretrained", _accuracy(module, images(preset, turned=False)[1]), "%"))
        module.train()
        for subnets, frozen in itertools.product((2, 4), (False, True)):
            first.requires_grad = not frozen
            figures += compared(name + (", first layer frozen" if frozen else ""), module, preset, subnets)
            first.requires_grad = True
    return report("fine_tuning", options, figures)


if __name__ == "__main__":
    main()
