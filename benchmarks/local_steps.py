"""Compare the cost of a worker's steps with a bare torch loop.

One subnet of four, the same batches, one thread, one process: blocks of `LocalSteps.step` and blocks of a plain
torch loop (tensors in memory, `torch.optim.SGD`) take turns; the ratio is the bare loop's median time over ours.

    python -m benchmarks.local_steps [--tiny] [--json FILE]

Target: a ratio of at least 0.95 for the Fashion-MNIST MLP and for a residual CNN.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.report import Figure, at_least, report, with_preset
from idletrain.job_file import parse_job
from idletrain.nn.data.arrays import ArraySource
from idletrain.nn.ist.schemes import by_neurons
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import BatchOrder, LocalSteps, assemble
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings

SUBNETS = 4
MLP = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, 1024, 1024, 10]}}
CNN = {"factory": "idletrain.nn.models:residual_cnn", "args": {"channels": 32, "hidden": 64}}
TINY_MLP = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}}


@dataclass(frozen=True)
class Preset:
    """Models, data and repetitions."""

    data: str
    models: tuple[tuple[str, dict[str, Any]], ...]
    blocks: int = 40
    steps: int = 10  # a block: long against the clock, short against the machine's moods


FULL = Preset("fashion-mnist", (("MLP", MLP), ("CNN", CNN)))
TINY = Preset("digits", (("MLP", TINY_MLP),), blocks=3, steps=2)


def prepare(preset: Preset, model: dict[str, Any]) -> Prepared:
    """Return the job's program and initial values."""
    training = {"optimizer": {"name": "sgd", "lr": 0.1}}
    job = parse_job({"name": "bench", "model": model, "data": {"name": preset.data}, "training": training})
    return from_settings(job.model, job.data, job.training)


def ours(prepared: Prepared, subnet: Subnet, flat: Tensor) -> Callable[[int], None]:
    """Return a worker's step."""
    program = prepared.program
    samples, training = program.source.open(), program.training
    order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    work = LocalSteps(program, subnet, flat, 0, 0)

    def run(step: int) -> None:
        work.step(samples, order, step)

    return run


def bare(prepared: Prepared, subnet: Subnet, flat: Tensor) -> Callable[[int], None]:
    """Return the same step as a plain loop, its data in memory and its batches drawn beforehand."""
    program = prepared.program
    samples, training = program.source.open(), program.training
    assert isinstance(samples, ArraySource)
    x, y = torch.from_numpy(np.array(samples.x)), torch.from_numpy(np.array(samples.y)).long()
    order = torch.from_numpy(np.random.Generator(np.random.Philox(0)).permutation(len(x)))
    batches = itertools.cycle(torch.split(order, training.batch_size)[:-1])
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    module = assemble(program.module, subnet, flat)
    optimizer = torch.optim.SGD(module.parameters(), lr=training.optimizer.lr)

    def step(_step: int) -> None:
        index = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = nn.functional.cross_entropy(module(x[index].float().div_(scale)), y[index])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def blocks(preset: Preset, step: Callable[[int], None]) -> Iterator[float]:
    """Yield milliseconds a step, block by block."""
    for block in itertools.count():
        started = time.perf_counter()
        for number in range(block * preset.steps, (block + 1) * preset.steps):
            step(number)
        yield (time.perf_counter() - started) / preset.steps * 1000


def compare(preset: Preset, model: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return milliseconds a step of ours and of the bare loop, block by block in turn."""
    prepared = prepare(preset, model)
    program = prepared.program
    subnet = program.subnets(0, by_neurons((1 / SUBNETS,) * SUBNETS))[0]
    network = Network.of(program, prepared.network)
    sides = [blocks(preset, make(prepared, subnet, network.pull(subnet))) for make in (ours, bare)]
    pairs = [(next(sides[0]), next(sides[1])) for _ in range(preset.blocks + 2)][2:]  # the first two warm up
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, FULL, TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    for name, model in preset.models:
        worker, plain = compare(preset, model)
        figures += [
            Figure(f"{name}: a worker's step", statistics.median(worker), "ms", samples=worker),
            Figure(f"{name}: a bare step", statistics.median(plain), "ms", samples=plain),
            at_least(f"{name}: bare / worker's", statistics.median(plain) / statistics.median(worker), "", 0.95),
        ]
    torch.set_num_threads(threads)
    return report("local_steps", options, figures, subnets=SUBNETS)


if __name__ == "__main__":
    main()
