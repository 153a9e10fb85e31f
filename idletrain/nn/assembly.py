"""Compare the assembled network with its subnets: first their losses, then, where losses differ, each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from idletrain.errors import user_code
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import call, fresh, tensors_of
from idletrain.nn.data.seeding import seeded
from idletrain.nn.evaluate import EVALUATION_BATCH
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.randomness import generator, key
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.local_steps import assemble
from idletrain.nn.network import Network
from idletrain.nn.program import Program
from idletrain.nn.scripted import is_scripted

# Warn above this ratio of the network's loss to its subnets'. Sums of a wrong size make it 5 and more; a network whose
# neurons were trained apart for their first round has up to 1.3 (benchmarks/accuracy.py).
MOST_LOSS_RATIO = 2.0
LEAST_LOSS = 0.02  # of what a constant prediction loses: a network that is worse by less has all but learned it, too
SAMPLES = 512  # training samples that the network's loss is measured on
SUBNETS = 2  # subnets of a round whose layers are compared with the network's


@torch.no_grad()
def training_loss(module: nn.Module, samples: Samples, program: Program) -> float:
    """Return the mean loss of a module in evaluation mode on some of the training data, the same ones every time."""
    order = generator(program.training.seed, "assembly").permutation(len(samples))[:SAMPLES]
    total = 0.0
    with seeded(key(program.training.seed, "assembly", "samples")):
        for index in np.array_split(order, -(-len(order) // EVALUATION_BATCH)):
            inputs, target = samples.batch(index)
            with user_code("model or training.loss: fails in evaluation mode (", ")"):
                total += float(program.training_loss(call(module, inputs), target)) * len(index)
    return total / len(order)


def warning(
    program: Program,
    network: Network,
    subnets: Sequence[Subnet],
    losses: tuple[float, float],
    constant_loss: float | None = None,
) -> str | None:
    """Return one sentence if the assembled network is much worse than its subnets, else None.

    Args:
        program: The run's program.
        network: The assembled network.
        subnets: A round's subnets.
        losses: Training loss of the network, and mean training loss of its subnets' last steps.
        constant_loss: Test loss of the best constant prediction, if it is known.
    """
    whole, parts = losses
    if not parts > 0 or whole <= MOST_LOSS_RATIO * parts:
        return None
    if constant_loss is not None and whole - parts < LEAST_LOSS * constant_loss:
        return None
    layer = likely_layer(program, network, subnets[:SUBNETS])
    groups = _groups_of(program.layout, layer) if layer else []
    names = " and ".join(groups)
    detail = f", or name {names} in model.exclude, as they differ first in layer {layer}" if groups else ""
    return (
        f"the assembled network's training loss is {whole:.3g}, {whole / parts:.1f} times its subnets' {parts:.3g}: "
        f"use fewer subnets or training.method: local-sgd{detail}"
    )


def _groups_of(layout: Layout, layer: str) -> list[str]:
    """Return the names of the groups by whose neurons a layer's parameters are cut."""
    ends = np.cumsum(layout.sizes)
    cuts = [neurons for t in layout.tensors if t.name.startswith(f"{layer}.") for neurons in t.neurons]
    found = {int(np.searchsorted(ends, n, "right")) for cut_ in cuts if cut_ is not None for n in cut_ if n >= 0}
    return [layout.groups[number].name for number in sorted(found)]


def likely_layer(program: Program, network: Network, subnets: Sequence[Subnet]) -> str | None:
    """Return the first layer whose outputs are much larger or smaller in the network than in its subnets."""
    samples = program.source.open()
    index = generator(program.training.seed, "assembly").permutation(len(samples))[: program.training.batch_size]
    with seeded(key(program.training.seed, "assembly", "samples")):
        inputs = samples.batch(index)[0]
    all_neurons = cut(program.layout, np.ones(sum(program.layout.sizes), dtype=np.bool_))
    whole, *parts = (
        _sizes(assemble(program.module, subnet, network.pull(subnet)[: subnet.parameters]), inputs, program)
        for subnet in (all_neurons, *subnets)
    )
    for name, size in whole.items():
        of_parts = [part[name] for part in parts if name in part]
        mean = math.fsum(of_parts) / len(of_parts) if of_parts else 0.0
        if size > MOST_LOSS_RATIO**0.5 * mean > 0 or 0 < size < mean / MOST_LOSS_RATIO**0.5:
            return name
    return None


def _sizes(module: nn.Module, inputs: Any, program: Program) -> dict[str, float]:
    """Return the root mean square of every layer's outputs, by layer name, in the order in which the layers run."""
    result: dict[str, float] = {}

    def record(name: str, output: Any) -> None:
        tensor = next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)
        if tensor is not None:
            result.setdefault(name, float(tensor.square().mean().sqrt()))

    for name, layer in module.named_modules():
        if not list(layer.children()) and not is_scripted(layer):  # which runs unseen
            layer.register_forward_hook(lambda _layer, _inputs, output, name=name: record(name, output))
    with torch.no_grad(), seeded(key(program.training.seed, "assembly", "dropout")):
        call(module, fresh(inputs))
    return result
