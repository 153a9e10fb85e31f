"""Carry neurons from inputs to outputs of operators that only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from idletrain.nn.ist.couplings import Couplings, Families, Family, Labelled, compressed, merged, varying

aten = torch.ops.aten


def viewed(
    _couplings: Couplings, _op: Any, inputs: list[Labelled], _args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Give every element of another shape the neuron that it had."""
    old, new = tuple(inputs[0].tensor.shape), tuple(outputs[0].shape)
    return [[_reshaped(family, old, new) for family in inputs[0].families]]


def _reshaped(family: Family, old: tuple[int, ...], new: tuple[int, ...]) -> Family:
    """Reshape a family, only along those dimensions that its neurons have."""
    before, after = [], []
    for olds, news in _chunks(old, new):
        has = any(family.shape[d] > 1 for d in olds)
        before += [old[d] if has else 1 for d in olds]
        after += [new[d] if has else 1 for d in news]
    return compressed(family.expand(before).reshape(after))


def _chunks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return the smallest ranges of old and new dimensions that hold the same elements."""
    result, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        start_i, start_j, mine, its = i, j, 1, 1
        while True:
            if (mine <= its and i < len(old)) or j >= len(new):
                mine, i = mine * old[i], i + 1
            else:
                its, j = its * new[j], j + 1
            if (mine == its and i > start_i and j > start_j) or (i >= len(old) and j >= len(new)):
                break
        result.append((range(start_i, i), range(start_j, j)))
    return result


def rearranged(
    couplings: Couplings, op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Do with a family what the operator does with the tensor; positions that only values tell are one neuron."""
    tensor = inputs[0].tensor
    indexed = _indexed(op, args)
    result: list[Families] = [[] for _ in outputs]
    rest = tuple(_with_values(arg) for arg in args[1:])
    if op.overloadpacket is aten.constant_pad_nd:
        padding = couplings.new(1)
        couplings.hold(padding, "")
        rest = (args[1], int(padding))
    for family in inputs[0].families:
        family = couplings.collapse(family, indexed)  # noqa: PLW2901
        full = family.expand(tensor.shape)
        there = op(full.contiguous() if op.overloadpacket is aten.as_strided else full, *rest)
        for families, one in zip(result, there if isinstance(there, list | tuple) else [there], strict=True):
            small = compressed(one)
            if varying(small):
                families.append(small)
    return result


def turned(
    _couplings: Couplings, op: Any, inputs: list[Labelled], args: tuple[Any, ...], _outputs: Sequence[Tensor]
) -> list[Families]:
    """Do with a family what the operator has done with the tensor in its place."""
    return [[op(family.clone(), *args[1:]) for family in inputs[0].families]]


def put_beside(
    couplings: Couplings, _op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Put families beside each other, along a dimension of their own."""
    d = (args[1] if len(args) > 1 else 0) % outputs[0].ndim
    parts = [[f.unsqueeze(d) for f in part.families if couplings.is_known(f)] for part in inputs]
    firsts = [part[0] for part in parts if part]
    if len(firsts) < len(parts) or len({tuple(f.shape) for f in firsts}) > 1:
        return [merged(couplings, parts)]
    return [[compressed(torch.cat(firsts, d)), *merged(couplings, [part[1:] for part in parts])]]


def _indexed(op: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the dimensions that tensors index whose values are not known."""
    if op.overloadpacket is aten.index:
        return [d for d, index in enumerate(args[1]) if index is not None and index.device.type == "meta"]
    if op.overloadpacket in (aten.index_select, aten.gather) and args[2].device.type == "meta":
        return [args[1] % max(1, args[0].ndim)]
    return []


def _with_values(arg: Any) -> Any:
    """Return an argument with zeros in the place of tensors without values."""
    if isinstance(arg, Tensor) and arg.device.type == "meta":
        return torch.zeros(arg.shape, dtype=arg.dtype, device="cpu")
    return [_with_values(part) for part in arg] if isinstance(arg, list | tuple) else arg


def concatenated(
    couplings: Couplings, _op: Any, inputs: list[Labelled], args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Put families one after another; beside them, features that no layer makes stay whole."""
    d = (args[1] if len(args) > 1 else 0) % outputs[0].ndim
    parts = [part for part in inputs if part.tensor.ndim == outputs[0].ndim]
    if not any(part.along(d) for part in parts):
        return [merged(couplings, [part.families for part in parts])]
    chosen = [_part(couplings, part, d) for part in parts]
    shape = [max(f.shape[e] for f in chosen) for e in range(outputs[0].ndim)]
    pieces = [
        f.expand([part.tensor.shape[d] if e == d else length for e, length in enumerate(shape)])
        for f, part in zip(chosen, parts, strict=True)
    ]
    others = [[f for f in part.families if not varying(f) & varying(c)] for c, part in zip(chosen, parts, strict=True)]
    return [merged(couplings, [[torch.cat(pieces, d)], *others])]


def _part(couplings: Couplings, part: Labelled, d: int) -> Family:
    own = sorted(part.along(d), key=lambda f: not couplings.is_known(f))
    if own:
        return own[0]
    length, dimensions = part.tensor.shape[d], part.tensor.ndim
    fresh = couplings.new(length)
    couplings.hold(fresh, "")
    return fresh.view([length if e == d else 1 for e in range(dimensions)])


def looked_up(
    couplings: Couplings, _op: Any, inputs: list[Labelled], _args: tuple[Any, ...], outputs: Sequence[Tensor]
) -> list[Families]:
    """Give what an embedding looks up the table's columns; its rows stay whole."""
    table, indices = inputs[0], inputs[1]
    for family in table.along(0):
        couplings.hold(family, "")
    columns = [f.view((1,) * (outputs[0].ndim - 1) + (-1,)) for f in table.families if varying(f) == {1}]
    return [merged(couplings, [columns, [f.unsqueeze(-1) for f in indices.families]])]
