"""Move what several subnets train by an outer optimizer at a commit, as DiLoCo does (arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.ist.groups import Layout
from idletrain.optimizer_settings import OuterOptimizerSettings


def move(
    settings: OuterOptimizerSettings,
    values: Sequence[Tensor],
    before: Sequence[Tensor],
    momenta: Sequence[Tensor],
    layout: Layout,
    shared: Callable[[int], Tensor],
) -> None:
    """Take a step with Nesterov's momentum, in place, wherever several subnets have a parameter.

    What one subnet has, or none, keeps its value and its momentum.

    Args:
        settings: The outer optimizer.
        values: The network's tensors after the commit: the mean of the subnets' values.
        before: The same before it.
        momenta: Their momentum, zeros at first.
        layout: The network's layout.
        shared: Returns the mask of those values of a tensor, by its number, that several subnets have.
    """
    for at, (value, old, momentum) in enumerate(zip(values, before, momenta, strict=True)):
        if not layout.tensors[at].trainable:
            continue
        several = shared(at)
        change = value - old  # the negative of DiLoCo's outer gradient
        moved = change + settings.momentum * momentum
        step = change + settings.momentum * moved
        momentum.copy_(torch.where(several, moved, momentum))
        value.copy_(torch.where(several, old + settings.lr * step, value))


def check_shared(layout: Layout, training: TrainingSettings) -> None:
    """Check that an outer optimizer has something to move.

    Raises:
        JobError: no parameter is in several subnets, or their changes are not averaged.
    """
    if training.outer_optimizer is None:
        return
    name = f"training.outer_optimizer: {training.outer_optimizer.name}"
    if layout.common != "mean":
        raise JobError(
            f"{name} moves by the mean of changes, and those under a very wide output are none; leave it out"
        )
    if not _shares(layout, training):
        raise JobError(
            f"{name} has nothing to move, as no parameter is in more than one subnet; leave it out, or use more "
            "training.subnets or training.copies"
        )


def _shares(layout: Layout, training: TrainingSettings) -> bool:
    """Return whether some parameter that trains is in several of a round's subnets."""
    phases = training.every_phase
    if any(phase.copies > 1 for phase in phases):
        return True
    in_all = (all(n is None or (n < 0).any() for n in tensor.neurons) for tensor in layout.tensors if tensor.trainable)
    return any(phase.subnets > 1 for phase in phases) and any(in_all)
