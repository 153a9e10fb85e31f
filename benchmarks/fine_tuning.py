"""Fine-tune a small pretrained network as subnets and whole, and compare the accuracy.

An MLP with BatchNorm and a residual network are pretrained by plain torch on Fashion-MNIST's images on their side, then
fine-tuned on 6,000 upright ones: by local SGD, and by ist with its first layer training or frozen, as two and as four
subnets, with the same steps. The network as pretrained is scored on upright images, too.

    python -m benchmarks.fine_tuning [--tiny] [--json FILE]

Target: ist is at most 0.5 points behind local SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks import in_process
from benchmarks.in_process import Opened
from benchmarks.report import Figure, at_least, report, with_preset
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.data.known import fashion_mnist
from idletrain.nn.evaluate import score
from idletrain.nn.prepare import prepare
from idletrain.nn.program import cross_entropy
from idletrain.optimizer_settings import OptimizerSettings

POINTS, POINTS_BEHIND = 100.0, 0.5
BATCH, STEPS = 64, 25
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
    held_out: int = 2000
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


def fine_tuned(module: nn.Module, preset: Preset, method: Literal["ist", "local-sgd"], subnets: int) -> float:
    """Return the accuracy in percent on held-out upright images."""
    train, held_out = images(preset, turned=False)
    training = TrainingSettings(
        method=method, subnets=subnets, local_steps=STEPS, rounds=preset.rounds, batch_size=BATCH,
        optimizer=OptimizerSettings(name="adamw", lr=1e-3),
    )  # fmt: skip
    made = prepare(module, train, None, None, training)
    assert made.program.training.method == method, made.fallback
    return _accuracy(in_process.train(made, preset.rounds, STEPS), held_out)


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
        for subnets in (2, 4):
            whole = fine_tuned(module, preset, "local-sgd", subnets)
            figures.append(Figure(f"{name}, local SGD, {subnets} workers", whole, "%"))
            for frozen in (False, True):
                first.requires_grad = not frozen
                cut = fine_tuned(module, preset, "ist", subnets)
                first.requires_grad = True
                what = f"{name}, ist, {subnets} subnets" + (", first layer frozen" if frozen else "")
                figures.append(at_least(what, cut, "%", round(whole - POINTS_BEHIND, 2)))
    return report("fine_tuning", options, figures)


if __name__ == "__main__":
    main()
