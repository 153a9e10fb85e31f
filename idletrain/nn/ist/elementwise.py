"""Carry neurons from inputs to outputs of operators that work element by element, and of normalizations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from idletrain.nn.ist.couplings import Couplings, Families, Family, Labelled, merged, padded, varying


def elementwise(
    couplings: Couplings, op: Any, inputs: list[Labelled], _args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Unite what meets; where shapes do not fit, keep dimensions of the same length, or all of it whole."""
    return [_fitted(couplings, op, inputs, outputs[0]), *([] for _ in outputs[1:])]  # others are indices or statistics


def _fitted(couplings: Couplings, op: Any, inputs: list[Labelled], output: Tensor) -> Families:
    operands = []
    for labelled in inputs:
        shape, out = tuple(labelled.tensor.shape), tuple(output.shape)
        if len(shape) <= len(out) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(out), strict=False)):
            operands.append([padded(f, output.ndim) for f in labelled.families])
        elif len(shape) == len(out):
            other = [d for d in range(len(shape)) if shape[d] != out[d]]
            operands.append([couplings.collapse(f, other) for f in labelled.families])
        else:
            for family in labelled.families:
                whole = couplings.collapse(family, range(family.ndim))
                couplings.hold(whole, f"torch's {op.overloadpacket.__name__} mixes its neurons")
    return merged(couplings, operands)


def added(
    couplings: Couplings, op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Unite what meets, and note where what several layers compute is added up, each of its own."""
    computed = [(part.reads, [padded(f, outputs[0].ndim) for f in part.families]) for part in inputs if not part.fixed]
    joined = [
        (first, reads | others)
        for (reads, one), (others, other) in itertools.combinations(computed, 2)
        for first, second in itertools.product(one, other)
        if varying(first) & varying(second)
        and couplings.dimensions([first]) != couplings.dimensions([second])
        and not couplings.are_one(first, second)
    ]
    result = elementwise(couplings, op, inputs, args, outputs)
    for family, reads in joined:
        couplings.mark_added(family, reads)
    return result


def normalized(
    couplings: Couplings, _op: Any, inputs: list[Labelled], _args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Give BatchNorm's weights `[C]` their channels `[B, C, ...]`."""
    x, *weights = inputs
    shape = (1, -1, *[1] * (x.tensor.ndim - 2))
    operands = [x.families, *([f.view(shape) for f in w.families] for w in weights if w.tensor.ndim == 1)]
    return [merged(couplings, operands), *([] for _ in outputs[1:])]


def group_normalized(
    couplings: Couplings, _op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Make a neuron of each of GroupNorm's groups of channels."""
    x, *weights = inputs
    groups, shape = args[6], (1, -1, *[1] * (x.tensor.ndim - 2))
    channels = [couplings.collapse(f, varying(f) - {1}) for f in x.along(1)]
    families = merged(couplings, [channels, *([f.view(shape) for f in w.families] for w in weights)])
    return [[_by_group(couplings, f, 1, groups) for f in families], *([] for _ in outputs[1:])]


def gated(
    couplings: Couplings, _op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Multiply one half of a dimension by the other."""
    d = (args[1] if len(args) > 1 else -1) % outputs[0].ndim
    halves = [f.chunk(2, d) if f.shape[d] > 1 else (f, f) for f in inputs[0].families]
    return [merged(couplings, [[first for first, _ in halves], [second for _, second in halves]])]


def _by_group(couplings: Couplings, family: Family, dimension: int, groups: int) -> Family:
    """Unite the neurons of each of several groups of equal length along a dimension."""
    grouped = family.view(*family.shape[:dimension], groups, -1, *family.shape[dimension + 1 :])
    one = couplings.collapse(grouped, [dimension + 1])
    return one.expand_as(grouped).flatten(dimension, dimension + 1)
