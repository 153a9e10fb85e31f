"""Time a local step in float32, in bfloat16, compiled, and with channels last, on one core.

A convolutional network (batch of 32 images 3 x 32 x 32) and a transformer (batch of 16 texts of 64 bytes). A subnet is
compiled once for each of its widths; the step that does so is reported apart, in seconds of this machine's time.

    python -m benchmarks.precision [--tiny] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.in_process import Opened
from benchmarks.report import Figure, at_most, report, with_preset
from idletrain.job import TrainingSettings
from idletrain.nn import models
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.network import Network
from idletrain.nn.prepare import prepare
from idletrain.optimizer_settings import OptimizerSettings

SAMPLES = 128


@dataclass(frozen=True)
class Preset:
    """How often a step is timed."""

    steps: int = 20
    networks: tuple[str, ...] = ("convolutions", "transformer")
    compiled: bool = True


TINY = Preset(steps=2, networks=("transformer",), compiled=False)
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "compiled": {"compile": True},
    "bfloat16, compiled": {"precision": "bfloat16", "compile": True},
}


def convolutions() -> nn.Module:
    """Return a network of three convolutions of 64 channels."""
    layers = [
        layer
        for channels in (3, 64, 64)
        for layer in (nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def subject(name: str) -> tuple[Callable[[], nn.Module], Opened, int]:
    """Return a network's maker, data for it, and the batch size."""
    random = np.random.Generator(np.random.Philox(0))
    if name == "convolutions":
        x = random.standard_normal((SAMPLES, 3, 32, 32)).astype(np.float32)
        return convolutions, Opened(x, random.integers(10, size=SAMPLES)), 32
    text = random.integers(128, size=(SAMPLES, 64))
    return (
        (lambda: models.transformer(vocabulary=128, context=64, width=128, heads=8, hidden=512)),
        Opened(text, text),
        16,
    )


def timed(module: nn.Module, data: Opened, batch_size: int, steps: int, settings: dict[str, Any]) -> list[float]:
    """Return the milliseconds of local steps of the whole network; of the first one, which compiles, as they pass."""
    training = TrainingSettings(
        method="local-sgd",
        subnets=1,
        batch_size=batch_size,
        optimizer=OptimizerSettings(name="sgd", lr=0.01),
        **settings,
    )
    made = prepare(module, data, None, None, training)
    (subnet,) = made.program.subnets(0, by_neurons((1.0,)))
    flat = Network.of(made.program, made.network).pull(subnet)
    work, order = LocalSteps(made.program, subnet, flat, 0, 0), BatchOrder(0, SAMPLES, batch_size, 1)
    samples = []
    for step in range(steps + 1):
        clock = time.process_time if step else time.perf_counter
        started = clock()
        work.step(data, order, step)
        samples.append(1e3 * (clock() - started))
    return samples


def _channels_last(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return module


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Time, and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    torch.set_num_threads(1)
    figures = []
    for name in preset.networks:
        make, data, batch_size = subject(name)
        variants = {
            variant: (settings, make())
            for variant, settings in VARIANTS.items()
            if preset.compiled or "compile" not in settings
        }
        if name == "convolutions":
            variants["channels last"] = ({}, _channels_last(make()))
        plain = 0.0
        for variant, (settings, module) in variants.items():
            first, *others = timed(module, data, batch_size, preset.steps, settings)
            typical = statistics.median(others)
            plain = plain or typical
            figures.append(Figure(f"{name}, {variant}: a step", typical, "ms", samples=others))
            if variant != "float32":
                figures.append(at_most(f"{name}, {variant} / float32", typical / plain, "x", 1.1))
            if "compile" in settings:
                figures.append(Figure(f"{name}, {variant}: the first step", first / 1e3, "s"))
    return report("precision", options, figures)


if __name__ == "__main__":
    main()
