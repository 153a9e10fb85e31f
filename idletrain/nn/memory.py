"""Compute the memory that training a subnet takes, before the subnet is sent anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from idletrain.errors import JobError
from idletrain.nn.data.batches import map_parts, tensors_of
from idletrain.nn.data.csr import Rows
from idletrain.nn.ist.groups import weightless
from idletrain.nn.ist.partition import draw
from idletrain.nn.ist.shape_runs import run_for_shapes
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.local_steps import assemble
from idletrain.nn.program import Program
from idletrain.nn.scripted import scripted_layers

# Left to the head node and the scheduler when this machine's RAM is divided among local workers.
HEAD_RESERVE_BYTES = 1 << 30
# The most that Python, torch and Dask take in a worker before its first subnet (benchmarks/results/memory.json), as a
# process of its own; a fork takes about 80 MiB less. A plan goes by it, a run by what each worker has as it joins.
WORKER_BYTES = 278 << 20
# A step's memory beside parameters and activations (kernels' scratch, the batch, the comm layer's buffers, code that
# the first step reads): 31 to 42 MB were seen for networks of 126 to 235 MB, and over 45 MB once.
SCRATCH_BYTES = 48 << 20
SPREAD = 0.02  # of made-up weights where a run needs values


def subnet_of_share(program: Program, share: float) -> Subnet:
    """Return a subnet with this share of every group, or the largest of a round if cut by depth, for measurements."""
    if program.layout.skippable:
        by_share = {phase.equal_shares[0]: phase for phase in program.training.every_phase}
        phase = by_share.get(share, by_share[min(by_share)])
        subnets = program.subnets(phase.first_round, program.specs(phase.equal_shares, phase.copies))
        return max(subnets, key=lambda subnet: subnet.parameters)
    return cut(program.layout, draw(program.training.seed, 0, program.layout.sizes, [share])[0])


def subnet_need(program: Program) -> Callable[[float], int]:
    """Return a function from a subnet's share of every group to the bytes that training it takes.

    Counted are the flat buffer, its copy that is being pushed as a progress checkpoint, the gradients and the pulled
    values (2 * slots + 2 times the parameters), and each layer's output with its gradient for the samples that go
    through the module at a time. With a very wide output gradients are row-sparse, and counted are its sampler's
    tables, the labels that a batch activates and the embeddings that it uses; in lockstep the checkpoint before the
    last is held, too.

    Raises:
        JobError: (by the returned function) the module cannot be run.
    """
    samples = program.source.open()
    index = np.arange(min(program.micro_batch or program.training.batch_size, len(samples)))
    x, y = samples.batch(index)
    entries = tuple(len(part.indices) if isinstance(part, Rows) else len(index) for part in (x, y))

    @functools.cache
    def need_bytes(share: float) -> int:
        subnet = subnet_of_share(program, share)
        buffer = 4 * program.buffer_size(subnet, persistent=False)
        buffers = (3 if program.training.mode == "lockstep" else 2) * buffer + 4 * subnet.parameters
        gradients = 0 if program.output else 4 * subnet.parameters
        frozen = 4 * subnet.frozen.parameters if subnet.frozen else 0  # beside the network's, which the program holds
        activations = 2 * _output_bytes(program, subnet, x)
        if program.training.exchange.push != "fp32":  # the round's initial values, and the change
            buffers += 2 * 4 * subnet.parameters
        return (
            buffers
            + gradients
            + frozen
            + activations
            + _wide_bytes(program, subnet, len(index), *entries)
            + SCRATCH_BYTES
        )

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


def _output_bytes(program: Program, subnet: Subnet, batch: Any) -> int:
    """Return the bytes of all layers' outputs for one batch, from a run on the meta device, or from one with values."""
    total = 0

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        total += sum(tensor.nbytes for tensor in tensors_of(output))

    def run(module: nn.Module, batch: Any) -> int:
        nonlocal total
        total = 0
        if scripted_layers(module):  # whose layers within run unseen
            made = _MadeByOperators()
            with torch.no_grad(), made:
                run_for_shapes(module, batch)
            return made.nbytes
        for layer in module.modules():
            if not list(layer.children()):
                layer.register_forward_hook(count)
        with torch.no_grad():
            run_for_shapes(module, batch)
        return total

    try:
        on_meta = weightless(assemble(program.module, subnet, torch.empty(subnet.parameters, device="meta")))
        return run(on_meta, map_parts(lambda part: part.to("meta"), batch))
    except JobError:  # its forward looks at values
        values = torch.empty(subnet.parameters).normal_(std=SPREAD, generator=torch.Generator().manual_seed(0))
        return run(assemble(program.module, subnet, values), batch)


class _MadeByOperators(TorchDispatchMode):
    """Count the bytes of the tensors that operators make.

    Attributes:
        nbytes: The bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, op: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        result = op(*args, **(kwargs or {}))
        if not op.is_view and not op._schema.is_mutable:
            self.nbytes += sum(tensor.nbytes for tensor in tensors_of(result))
        return result
