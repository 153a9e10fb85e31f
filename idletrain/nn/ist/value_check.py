"""Check by values that a network can be cut: without some neurons it computes what it does where they are zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idletrain.nn.data.batches import map_parts
from idletrain.nn.ist.groups import Layout, offsets
from idletrain.nn.ist.modules import copied
from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.scaling_trial import SEED, Subject, UnknownError, run_with
from idletrain.nn.ist.subnets import Subnet, cut

SAME_OUTPUT = 1e-5  # relative difference of outputs
ROUNDING = 1e-3  # what rounding to float32 may explain; below it, float64 decides
DIFFERS = "a subnet without some of its neurons does not compute what the network does where they are zero"


def reason_against(subject: Subject, layout: Layout) -> str:
    """Return the reason why a network cannot be cut as a layout says, or "" if it can or if that cannot be tested.

    Half of each group's neurons are kept. In the network, the others' parameters are zero, or only their weights in
    the layers that follow: some layers divide by the length of the former.

    Args:
        subject: The network.
        layout: The layout, without contractions, and with what layers sum over.
    """
    best, compared = math.inf, False
    for double in (False, True):
        for training in (True, False):
            for difference in _differences(subject, layout, training=training, double=double):
                best, compared = min(best, difference), True
                if best < SAME_OUTPUT:
                    return ""
        if best > ROUNDING:
            break
    return DIFFERS if compared else ""


def _differences(subject: Subject, layout: Layout, *, training: bool, double: bool) -> Iterator[float]:
    """Yield the relative difference of the outputs for each way to make the other neurons zero."""
    kept = _half(layout, subject.outputs)
    subnet = cut(layout, kept)
    names = [tensor.name for tensor in layout.tensors]
    values = [subject.values[t.name] if t.buffer else subject.weights[t.name] for t in layout.tensors]
    if double:
        subject = _doubled(subject)
        values = [value.double() if value.is_floating_point() else value for value in values]
    part = _outputs(subject, names, _part(values, subnet), training=training)
    for everywhere in (True, False):
        zeroed = [
            _zeroed(
                value, t.neurons, kept, [everywhere or (t.name, d) in (layout.summed or ()) for d in range(value.ndim)]
            )
            if not t.buffer
            else value
            for value, t in zip(values, layout.tensors, strict=True)
        ]
        whole = _outputs(subject, names, zeroed, training=training)
        if whole is not None and part is not None and whole.shape == part.shape:
            yield float((whole - part).norm() / whole.norm().clamp(min=1e-30))
        elif whole is not None:
            yield math.inf


def _outputs(subject: Subject, names: list[str], values: list[Tensor], *, training: bool) -> Tensor | None:
    """Return the outputs, or None where the network cannot be run or where they are not finite."""
    try:
        return run_with(subject, names, values, [], training=training)
    except UnknownError:
        return None


def _half(layout: Layout, outputs: frozenset[str]) -> Mask:
    """Return a mask of half of each group's neurons, and of all of those that are the network's outputs."""
    kept = np.zeros(sum(layout.sizes), dtype=np.bool_)
    generator = np.random.default_rng(SEED)
    for group, start in zip(layout.groups, offsets(layout.sizes), strict=True):
        order = generator.permutation(group.size)
        kept[start + (order if group.name in outputs else order[: max(1, group.size // 2)])] = True
    return kept


def _part(values: list[Tensor], subnet: Subnet) -> list[Tensor]:
    result = []
    for value, positions in zip(values, subnet.positions, strict=True):
        for d, at in enumerate(positions):
            value = value if at is None else value.index_select(d, at)  # noqa: PLW2901
        result.append(value)
    return result


def _zeroed(value: Tensor, neurons: Any, kept: Mask, dimensions: list[bool]) -> Tensor:
    has = np.append(kept, True)
    for d, own in enumerate(neurons):
        if own is not None and dimensions[d]:
            value = value.index_fill(d, torch.from_numpy(np.flatnonzero(~has[own])), 0)
    return value


def _doubled(subject: Subject) -> Subject:
    """Return a subject that computes in float64."""
    inputs = map_parts(lambda part: part.double() if part.is_floating_point() else part, subject.inputs)
    return replace(subject, module=copied(subject.module).double(), inputs=inputs)
