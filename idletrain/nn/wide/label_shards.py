"""Split a very wide output over subnets by label, and choose the samples that each subnet trains on.

A subnet that holds a share of the labels trains on the samples that have one of them, with a softmax over its own
labels; in lockstep all subnets train on the same samples, with one softmax over all labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.nn.data.arrays import ArraySource, Samples
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.ist.randomness import key
from idletrain.nn.ist.subnets import Subnet, views
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.orders import batch_order
from idletrain.nn.program import Program
from idletrain.nn.wide.layers import SparseLinear


@dataclass(frozen=True)
class ShardPlace:
    """The place of a label shard: its round and subnet."""

    round: int
    subnet: int


class ShardOrder(BatchOrder):
    """Draws each step's batch from the samples that have a label in the shard, reshuffled every epoch."""

    def __init__(self, seed: int, samples: NDArray[np.int64], batch_size: int) -> None:
        super().__init__(seed, len(samples), batch_size, 1)
        self._samples_here = samples

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:  # noqa: ARG002 (the shard is the subnet's own)
        """Return the sample numbers `[B]` of a step, which counts from the start of the run."""
        return self._samples_here[super().batch(0, step)]


def wide_output(module: nn.Module) -> tuple[str, SparseLinear] | None:
    """Return the name and the layer of the network's `SparseLinear`, or None if it has none."""
    return next(((name, layer) for name, layer in module.named_modules() if isinstance(layer, SparseLinear)), None)


def keeps_tables(program: Program) -> bool:
    """Tell whether training needs tables over the output rows as they are when a round begins."""
    output = wide_output(program.module)
    return output is not None and output[1].retrieves


def held_labels(program: Program, subnet: Subnet) -> NDArray[np.int64] | None:
    """Return the labels that a subnet holds, ascending; None for all of them."""
    labels = subnet.positions[program.output_at][0]
    return None if labels is None else labels.numpy()


def open_output(
    program: Program, module: nn.Module, subnet: Subnet, samples: Samples, baseline: Tensor, place: ShardPlace
) -> BatchOrder:
    """Prepare a subnet's output layer for its steps, and return the order in which they take samples.

    Args:
        program: The run's program.
        module: The subnet's module.
        subnet: The positions of its tensors in the network.
        samples: The training data.
        baseline: The subnet's flat buffer at the start of the round. Tables are built over these rows, so that an
            attempt resumed in the middle of a round draws the same labels.
        place: The subnet and round.
    """
    training, labels = program.training, held_labels(program, subnet)
    output = wide_output(module)
    assert output is not None
    layer = output[1]
    layer.hold(labels)
    if isinstance(samples, SparseSamples):
        counts = np.diff(samples.rows_of.starts)
        unseen = program.layout.tensors[program.output_at].shape[0] - len(counts)
        counts = np.append(counts, np.zeros(unseen, counts.dtype))
        layer.learn_counts(counts if labels is None else counts[labels])
    if layer.retrieves:
        rows = list(views(baseline[: subnet.parameters], subnet.shapes))[program.output_at]
        layer.rebuild(key(training.seed, "tables", place.round, place.subnet), rows)
    if training.mode == "lockstep":
        return BatchOrder(training.seed, len(samples), training.batch_size, 1)
    if labels is None:
        return batch_order(samples, training)
    numbers = _holding(samples, labels)
    return ShardOrder(training.seed, numbers if len(numbers) else np.arange(len(samples)), training.batch_size)


def _holding(samples: Samples, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the samples that have any of these labels."""
    if isinstance(samples, SparseSamples):
        return samples.holding(labels[labels < samples.census.labels])
    assert isinstance(samples, ArraySource)
    return np.flatnonzero(np.isin(samples.y, labels))
