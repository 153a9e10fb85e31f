"""Carry neurons from inputs to outputs of reductions, products of matrices and convolutions.

Letters: B batch, C channels, O outputs, G groups; N rows, K the summed dimension, M columns of a product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from idletrain.nn.ist.couplings import Couplings, Families, Labelled, compressed, merged, padded, varying
from idletrain.nn.ist.elementwise import elementwise


def reduced(
    couplings: Couplings, op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Keep the neurons of the dimensions that remain; whether one may leave out others, a trial of values tells."""
    if len(inputs) > 1:  # the larger of two
        return elementwise(couplings, op, inputs, args, outputs)
    x = inputs[0]
    named = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    dims = named.get("dim")
    listed = range(x.tensor.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {d % max(1, x.tensor.ndim) for d in listed}
    kept = [couplings.collapse(f, gone) if varying(f) - gone else f for f in x.families]
    kept = [f for f in kept if varying(f) - gone]
    squeezed = outputs[0].ndim < x.tensor.ndim
    left = [d for d in range(x.tensor.ndim) if d not in gone]
    families = [f.reshape([f.shape[d] for d in left]) if squeezed else f for f in kept]
    return [families if output.ndim == outputs[0].ndim else [] for output in outputs]


def product(
    couplings: Couplings, _op: Any, inputs: list[Labelled], _args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Multiply matrices `[..., N, K]` by `[..., K, M]`, with what is added to the product before them."""
    *before, left, right = inputs
    if left.tensor.ndim == 1:
        left = Labelled(left.tensor[None], [f[None] for f in left.families], left.fixed)
    vector = right.tensor.ndim == 1
    if vector:
        right = Labelled(right.tensor[:, None], [f[:, None] for f in right.families], right.fixed)
    k = left.tensor.ndim  # in a common space [..., N, M, K]
    mine = [f.unsqueeze(-2) for f in left.families]
    its = [f.transpose(-1, -2).unsqueeze(-3) for f in right.families]
    weighted = _weighted(couplings, left, left.along(left.tensor.ndim - 1)) or _weighted(
        couplings, right, right.along(right.tensor.ndim - 2)
    )
    families = []
    for family in merged(couplings, [mine, its]):
        if not weighted or varying(family) != {k}:
            family = couplings.collapse(family, [k])  # noqa: PLW2901
        if varying(family) - {k}:
            families.append(compressed(family.narrow(k, 0, 1).squeeze(k)))
    if outputs[0].ndim < k:
        families = [
            f.reshape([n for d, n in enumerate(f.shape) if d != (k - 1 if vector else k - 2)]) for f in families
        ]
    bias = [[padded(f, outputs[0].ndim) for f in labelled.families] for labelled in before]
    return [merged(couplings, [families, *bias])]


def _weighted(couplings: Couplings, side: Labelled, along: Families) -> bool:
    """Return True if one side of a product is weights whose summed dimension can be cut; note that it is summed."""
    known = [family for family in along if couplings.is_known(family)] if side.fixed else []
    for family in known:
        couplings.mark_summed(family)
    return bool(known)


def convolved(
    couplings: Couplings, _op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Convolve channels `[B, C, ...]` with weights `[O, C / G, ...]`, or `[C, O / G, ...]` if transposed."""
    x, weight, *bias = inputs
    transposed, groups = args[6], args[8]
    entering: Families = []
    leaving: Families = []  # the weight's families along the inputs' and the outputs' channels
    for family in weight.families:
        own = varying(family)
        if own & {0, 1}:
            first = 0 if 0 in own else 1
            flat = couplings.collapse(family, own - {first}).flatten()
            (entering if (first == 0) == transposed else leaving).append(flat)
        else:
            couplings.hold(family, "")
    channels = [couplings.collapse(f, varying(f) - {1}).flatten() for f in x.along(1)]
    if groups > 1:
        leaving = _grouped(couplings, channels, entering, leaving, groups, outputs[0].shape[1], transposed=transposed)
    else:
        for family in merged(couplings, [entering, channels])[:1]:
            couplings.mark_summed(family)
        for family in entering:
            couplings.mark_summed(family)
    families = merged(couplings, [leaving, *(b.families for b in bias)])
    return [[f.view(1, -1, *[1] * (x.tensor.ndim - 2)) for f in families], *([] for _ in outputs[1:])]


def _grouped(
    couplings: Couplings,
    channels: Families,
    entering: Families,
    leaving: Families,
    groups: int,
    outputs: int,
    *,
    transposed: bool,
) -> Families:
    """Make a neuron of each group of a convolution; return the outputs' families `[O]`."""
    whole, grouped = (leaving, entering) if transposed else (entering, leaving)
    for family in whole:  # the channels within one group
        couplings.hold(family, "")
    by_group = [
        couplings.collapse(f.view(groups, -1), [1]).flatten() for f in itertools.chain(channels, grouped) if len(f) > 1
    ]
    if not channels:
        for family in by_group:
            couplings.hold(family, "its groups of channels belong to inputs that no layer makes")
    families = merged(couplings, [[f] for f in by_group])
    return [f.repeat_interleave(outputs // groups) for f in families]
