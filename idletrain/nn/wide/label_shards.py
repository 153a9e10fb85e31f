"""A network's very wide output in rounds: which labels a subnet holds, which rows of the data it then trains on.

A subnet that holds a share of the labels trains on the rows that have one of them, with a softmax over its own labels;
in lockstep all of them train on the same rows, with one softmax.
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
from idletrain.nn.program import Program
from idletrain.nn.wide.layers import SparseLinear


@dataclass(frozen=True)
class ShardPlace:
    """Which subnet of which round."""

    round: int
    subnet: int


class ShardOrder(BatchOrder):
    """Which samples each step takes, of those that have a label here: every epoch is a new order of them."""

    def __init__(self, seed: int, own: NDArray[np.int64], batch_size: int) -> None:
        super().__init__(seed, len(own), batch_size, 1)
        self._own = own

    def batch(self, subnet: int, step: int) -> NDArray[np.int64]:  # noqa: ARG002 (the shard is the subnet's own)
        """Sample numbers `[B]` of a step, counted from the start of the run."""
        return self._own[super().batch(0, step)]


def wide_output(module: nn.Module) -> tuple[str, SparseLinear] | None:
    """The network's `SparseLinear` and its name, if it has one."""
    return next(((name, layer) for name, layer in module.named_modules() if isinstance(layer, SparseLinear)), None)


def keeps_tables(program: Program) -> bool:
    """Whether training needs tables of the rows that the round began with."""
    found = wide_output(program.module)
    return found is not None and found[1].retrieves


def labels_of(program: Program, subnet: Subnet) -> NDArray[np.int64] | None:
    """The labels that a subnet holds, ascending; None for all of them."""
    at = subnet.positions[program.output_at][0]
    return None if at is None else at.numpy()


def open_output(
    program: Program, module: nn.Module, subnet: Subnet, samples: Samples, baseline: Tensor, place: ShardPlace
) -> BatchOrder:
    """Ready a subnet's output for its steps, and say which samples they take.

    Args:
        program: The run's program.
        module: The subnet's module.
        subnet: Where its tensors lie.
        samples: The training data.
        begun: The subnet's flat buffer at the start of the round: tables are of these rows, so that who goes on in the
            middle of a round draws what the one before would have.
        place: Which subnet of which round.
    """
    training, labels = program.training, labels_of(program, subnet)
    found = wide_output(module)
    assert found is not None
    layer = found[1]
    layer.hold(labels)
    if isinstance(samples, SparseSamples):
        counts = np.diff(samples.rows_of.starts)
        beyond = program.layout.tensors[program.output_at].shape[0] - len(counts)
        counts = np.append(counts, np.zeros(beyond, counts.dtype))
        layer.learn_counts(counts if labels is None else counts[labels])
    if layer.retrieves:
        rows = list(views(baseline[: subnet.parameters], subnet.shapes))[program.output_at]
        layer.rebuild(key(training.seed, "tables", place.round, place.subnet), rows)
    if training.mode == "lockstep":
        return BatchOrder(training.seed, len(samples), training.batch_size, 1)
    if labels is None:
        return BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
    own = _holding(samples, labels)
    return ShardOrder(training.seed, own if len(own) else np.arange(len(samples)), training.batch_size)


def _holding(samples: Samples, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that have any of these labels."""
    if isinstance(samples, SparseSamples):
        return samples.holding(labels[labels < samples.census.labels])
    assert isinstance(samples, ArraySource)
    return np.flatnonzero(np.isin(samples.y, labels))
