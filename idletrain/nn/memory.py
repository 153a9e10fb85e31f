"""Compute the memory that training a subnet takes, before the subnet is sent anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from idletrain.nn.data.csr import Rows
from idletrain.nn.ist.groups import run_on_meta, weightless
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.local_steps import assemble
from idletrain.nn.program import Program

# Left to the head node and the scheduler when this machine's RAM is divided among local workers.
HEAD_RESERVE_BYTES = 1 << 30
# A step's memory beside parameters and activations (kernels' scratch, the batch, the comm layer's buffers): 20 MB
# measured for the MLP of workflows/fashion-mnist.yaml, and half as much again for safety.
SCRATCH_BYTES = 32 << 20


def subnet_of_share(program: Program, share: float) -> Subnet:
    """Return a subnet with this share of every group, for measurements."""
    return cut(program.layout, draw(program.training.seed, 0, program.layout.sizes, [share])[0])


def subnet_need(program: Program) -> Callable[[float], int]:
    """Return a function from a subnet's share of every group to the bytes that training it takes.

    Counted are the flat buffer, its copy that is being pushed as a progress checkpoint, the gradients and the pulled
    values (2 * slots + 2 times the parameters), and each layer's output with its gradient at the job's batch size. With
    a very wide output gradients are row-sparse, and counted are its sampler's tables, the labels that a batch activates
    and the embeddings that it uses; in lockstep the checkpoint before the last is held, too.

    Raises:
        JobError: (by the returned function) the module cannot be run without values.
    """
    samples = program.source.open()
    index = np.arange(min(program.training.batch_size, len(samples)))
    x, y = samples.batch(index)
    batch, entries = x.to("meta"), tuple(len(part.indices) if isinstance(part, Rows) else len(part) for part in (x, y))

    @functools.cache
    def need_bytes(share: float) -> int:
        subnet = subnet_of_share(program, share)
        buffer = 4 * program.buffer_size(subnet, persistent=False)
        buffers = (3 if program.training.mode == "lockstep" else 2) * buffer + 4 * subnet.parameters
        gradients = 0 if program.output else 4 * subnet.parameters
        activations = 2 * _output_bytes(program, subnet, batch)
        if program.training.exchange.push != "fp32":  # the round's initial values, and the change
            buffers += 2 * 4 * subnet.parameters
        return buffers + gradients + activations + _wide_bytes(program, subnet, len(index), *entries) + SCRATCH_BYTES

    return need_bytes


def _wide_bytes(program: Program, subnet: Subnet, rows: int, features: int, own: int) -> int:
    """Return the bytes that a very wide output takes beside its parameters, 0 without one.

    Counted are its sampler's tables; the active rows, their gradient and their step; their logits, likelihoods and
    gradients; the embeddings' gradient and their step.

    Args:
        program: The run's program.
        subnet: The subnet.
        rows: Samples of a batch.
        features: Feature entries of the batch.
        own: Label entries of the batch.
    """
    if program.output is None:
        return 0
    layer: Any = program.module.get_submodule(program.output)
    labels, hidden = subnet.shapes[program.output_at]
    active: int = min(labels, own + layer.sampler.max_active(rows, labels))
    nbytes: int = layer.sampler.nbytes(labels, hidden)
    return nbytes + 4 * (3 * active * (hidden + rows) + 2 * features * hidden)


def _output_bytes(program: Program, subnet: Subnet, batch: Tensor) -> int:
    """Return the bytes of all layers' outputs for one batch, from a run on the meta device."""
    total = 0

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        total += output.nbytes if isinstance(output, Tensor) else 0

    module = weightless(assemble(program.module, subnet, torch.empty(subnet.parameters, device="meta")))
    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(count)
    with torch.no_grad():
        run_on_meta(module, batch)
    return total
