"""Decide how each buffer that training changes goes from round to round, from what a trial saw of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from idletrain.errors import JobError
from idletrain.job import TrainingSettings
from idletrain.nn.ist.groups import BufferRule

BufferKind = Literal["estimate", "mean", "sum"]
LARGEST_WHOLE_NUMBER = 1 << 24  # float32, in which values travel, holds every whole number up to it


@dataclass(frozen=True)
class Observed:
    """The observations of a trial of a few steps on one buffer, or on a plain attribute that holds a number or tensor.

    Attributes:
        name: Its dotted name in the module.
        is_buffer: False for a plain attribute.
        dtype: Its number format.
        reshaped: The change of its shape or format, in words; empty if there was none.
        read: Other values of it change the outputs or the gradients of the steps that follow.
        accumulates: A value added to it stays in it for ever, as in a counter or a sum.
        feeds: Other values of it change other buffers.
        finite: Its values are finite, before and after.
        largest: The largest magnitude in it after the trial.
        growth: The most that a step added to a value's magnitude.
    """

    name: str
    is_buffer: bool
    dtype: torch.dtype
    reshaped: str = ""
    read: bool = False
    accumulates: bool = False
    feeds: bool = False
    finite: bool = True
    largest: float = 0.0
    growth: float = 0.0


def kinds_of(observed: Sequence[Observed], names: Sequence[str], training: TrainingSettings) -> dict[str, BufferKind]:
    """Return how each buffer that changes goes from round to round: as the job says, else by what was seen of it.

    A buffer that training writes but does not read holds statistics of the data, and is estimated on the assembled
    network; but one that adds up is summed. What training reads travels with the parameters, and is averaged.

    Args:
        observed: What changes in training.
        names: All buffers of the module but those of torch's own norms, which are always estimated.
        training: The job's settings.

    Raises:
        JobError: with every buffer that can be neither, and every pattern that matches none.
    """
    chosen = _chosen_kinds(names, training.buffers)
    changing = {one.name: one for one in observed}
    kinds = {one.name: chosen.get(one.name, _default(one)) for one in observed if one.is_buffer}
    kinds |= {name: kind for name, kind in chosen.items() if name not in changing}
    faults = [fault for one in observed for fault in _faults(one, kinds.get(one.name), training)]
    if faults:
        raise JobError(faults)
    return {name: kinds[name] for name in names if name in kinds}


def traveling_rules(kinds: Mapping[str, BufferKind]) -> dict[str, BufferRule]:
    """Return the buffers whose values travel with the parameters, each with the rule that merges the copies."""
    return {name: kind for name, kind in kinds.items() if kind != "estimate"}


def of_torch_norms(module: nn.Module) -> set[str]:
    """Return the names of the buffers that torch's own norms keep: running statistics, and the batches counted."""
    return {
        f"{path}.{short}" if path else short
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        for short in ("running_mean", "running_var", "num_batches_tracked")
    }


def _chosen_kinds(names: Sequence[str], patterns: Mapping[str, BufferKind]) -> dict[str, BufferKind]:
    """Return the kind of each buffer that a pattern matches; the first that does counts."""
    faults = [
        f"training.buffers: {pattern!r} matches no buffer; the model has {', '.join(names) or 'none'}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if faults:
        raise JobError(faults)
    first = {name: [kind for pattern, kind in patterns.items() if fnmatchcase(name, pattern)][:1] for name in names}
    return {name: kind for name, matched in first.items() for kind in matched}


def _default(one: Observed) -> BufferKind:
    if one.read:
        return "mean"
    return "sum" if one.accumulates and not one.feeds else "estimate"


def _faults(one: Observed, kind: BufferKind | None, training: TrainingSettings) -> Iterator[str]:
    if not one.is_buffer:
        if one.read:
            yield (
                f"model: {one.name} changes in training and is used again, but only parameters and buffers are kept; "
                f"make it a buffer (register_buffer)"
            )
        return
    if one.reshaped:
        yield (
            f"model: buffer {one.name} {one.reshaped} in training, and cannot be merged; give it its full size from "
            "the beginning, or make it a plain attribute if training does not need it"
        )
    elif one.dtype.is_complex:
        yield f"model: buffer {one.name} changes in training and is complex; keep it as two buffers of real numbers"
    elif kind == "estimate":
        if one.read:
            yield (
                f"training.buffers: {one.name} is read in training, so it cannot be estimated afterwards; "
                "give it mean or sum"
            )
    elif not one.finite:
        yield f"model: buffer {one.name} holds NaN or infinity, and cannot be merged; begin with finite numbers"
    elif not one.dtype.is_floating_point:
        phases = training.every_phase
        steps = sum(p.rounds * p.local_steps * (p.subnets if kind == "sum" else 1) for p in phases)
        if one.largest + steps * one.growth > LARGEST_WHOLE_NUMBER:
            yield (
                f"model: buffer {one.name} would count beyond {LARGEST_WHOLE_NUMBER:,}, the largest whole number that "
                "travels exactly; count in larger units, or leave it out"
            )
