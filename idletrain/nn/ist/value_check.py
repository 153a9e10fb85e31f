"""Check by values that a network can be cut: without some neurons it computes what it does where they are zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
    single, compared = _Halves.of(subject, layout), False
    part: Tensor | None = None
    for training in (True, False):
        former, part = part, single.subnet(training=training)
        if part is not None and former is not None and torch.equal(part, former):
            break  # the modes do not differ
        for everywhere in (True, False):
            whole = single.network(training=training, everywhere=everywhere)
            if whole is None:
                continue
            difference, compared = _difference(whole, part), True
            if SAME_OUTPUT <= difference <= ROUNDING:
                double = single.doubled()
                whole = double.network(training=training, everywhere=everywhere)
                difference = math.inf if whole is None else _difference(whole, double.subnet(training=training))
            if difference < SAME_OUTPUT:
                return ""
    return DIFFERS if compared else ""


@dataclass(frozen=True)
class _Halves:
    """A network, and which half of its neurons is kept.

    Attributes:
        subject: The network.
        layout: Its layout.
        kept: The neurons `[neurons]`.
        values: The tensors of the layout.
    """

    subject: Subject
    layout: Layout
    kept: Mask
    values: list[Tensor]

    @classmethod
    def of(cls, subject: Subject, layout: Layout) -> _Halves:
        values = [subject.values[t.name] if t.buffer else subject.weights[t.name] for t in layout.tensors]
        return cls(subject, layout, _half(layout, subject.outputs), values)

    def doubled(self) -> _Halves:
        """Return the same in float64."""
        inputs = map_parts(lambda part: part.double() if part.is_floating_point() else part, self.subject.inputs)
        subject = replace(self.subject, module=copied(self.subject.module).double(), inputs=inputs)
        values = [value.double() if value.is_floating_point() else value for value in self.values]
        return replace(self, subject=subject, values=values)

    def subnet(self, *, training: bool) -> Tensor | None:
        """Return the outputs of the subnet of the neurons that are kept; None if it cannot be run."""
        return self._outputs(_part(self.values, cut(self.layout, self.kept)), training=training)

    def network(self, *, training: bool, everywhere: bool) -> Tensor | None:
        """Return the network's with the other neurons zero, `everywhere` or in the layers that follow alone."""
        summed = self.layout.summed or ()
        zeroed = [
            value
            if t.buffer
            else _zeroed(value, t.neurons, self.kept, [everywhere or (t.name, d) in summed for d in range(value.ndim)])
            for value, t in zip(self.values, self.layout.tensors, strict=True)
        ]
        return self._outputs(zeroed, training=training)

    def _outputs(self, values: list[Tensor], *, training: bool) -> Tensor | None:
        try:
            return run_with(self.subject, [t.name for t in self.layout.tensors], values, [], training=training)
        except UnknownError:
            return None


def _difference(whole: Tensor, part: Tensor | None) -> float:
    """Return the relative difference of outputs."""
    if part is None or whole.shape != part.shape:
        return math.inf
    return float((whole - part).norm() / whole.norm().clamp(min=1e-30))


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
