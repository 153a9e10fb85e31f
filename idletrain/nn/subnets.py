"""Cut a subnet out of the network into one flat buffer, and put flat buffers back.

Letters: P parameters of a subnet, R rows of all its tensors, T tensors. A flat buffer is `[slots * P + row slots * R]`:
all values, then the optimizer's state in the same order, so that an update moves as one contiguous piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from idletrain.nn.groups import Common, Layout, TensorLayout
from idletrain.nn.partition import Mask

BLOCK_ROWS = 1 << 14  # of a sum: 16 MB of an embedding of 256 numbers
Positions = tuple[Tensor | None, ...]  # per dimension the positions a subnet has, None for all of them


@dataclass(frozen=True)
class Subnet:
    """Where a subnet's tensors lie in the network, and their shapes."""

    layout: Layout
    positions: tuple[Positions, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def parameters(self) -> int:
        """P, the number of values in one slot."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def by_row(self) -> Subnet:
        """The same subnet of tensors that have one value a row."""
        positions = tuple(at[:1] for at in self.positions)
        return Subnet(by_row(self.layout), positions, tuple(shape[:1] for shape in self.shapes))

    def slots(self, flat: Tensor, slots: int, row_slots: int) -> list[tuple[Subnet, Tensor]]:
        """The slots of a flat buffer, each with its subnet, without a copy."""
        rows = self.by_row
        wholes = [self] * slots + [rows] * row_slots
        pieces = torch.split(flat, [subnet.parameters for subnet in wholes])
        return list(zip(wholes, pieces, strict=True))


def by_row(layout: Layout) -> Layout:
    """The layout of tensors that have one value for each row of these."""
    tensors = (replace(t, shape=t.shape[:1], neurons=t.neurons[:1]) for t in layout.tensors)
    return replace(layout, tensors=tuple(tensors))


def cut(layout: Layout, members: Mask) -> Subnet:
    """The subnet of the neurons in `members` `[neurons]`; the order of positions is kept, so reshapes still hold."""
    has = np.append(members, True)  # index -1 (in every subnet) finds the last
    positions = tuple(tuple(_positions(neurons, has) for neurons in t.neurons) for t in layout.tensors)
    shapes = tuple(
        tuple(length if at is None else len(at) for length, at in zip(t.shape, where, strict=True))
        for t, where in zip(layout.tensors, positions, strict=True)
    )
    return Subnet(layout, positions, shapes)


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """The tensors inside one slot `[P]` of a flat buffer, without a copy."""
    offset = 0
    for shape in shapes:
        count = math.prod(shape)
        yield flat[offset : offset + count].view(shape)
        offset += count


def gather(network: Sequence[Tensor], subnet: Subnet, out: Tensor) -> None:
    """Copy the subnet's values out of the network's tensors (T of them) into one slot `[P]`."""
    for tensor, at, target in zip(network, subnet.positions, views(out, subnet.shapes), strict=True):
        split = [d for d, positions in enumerate(at) if positions is not None]
        if not split:
            target.copy_(tensor)
        elif len(split) == 1:
            index = at[split[0]]
            assert index is not None
            torch.index_select(tensor, split[0], index, out=target)
        else:
            torch.ops.aten.index.Tensor_out(tensor, _grid(tensor, at), out=target)


def merge(
    network: Sequence[Tensor],
    updates: Sequence[tuple[Subnet, Tensor, int]],
    common: Common = "mean",
) -> None:
    """Write updates `(subnet, slot [P], steps)` back into the network's tensors.

    Neurons belong to one subnet each, so their values are copied (an exchange, not an average: IST-page); what every
    subnet has is averaged, weighted by steps, in the order of `updates`, or what `common` says (see `Layout`).
    """
    if not updates:
        return
    layout = updates[0][0].layout
    total = sum(steps for _, _, steps in updates)
    pieces = zip(*(views(slot, subnet.shapes) for subnet, slot, _ in updates), strict=True)
    for i, (tensor, values) in enumerate(zip(network, pieces, strict=True)):
        if not layout.tensors[i].trainable:
            continue
        if not layout.tensors[i].shared:
            for (subnet, _, _), value in zip(updates, values, strict=True):
                _scatter(tensor, subnet.positions[i], value)
        where = _common(layout.tensors[i])
        if where is not None:
            copies = [
                (value[_common_within(layout.tensors[i], subnet.positions[i])], steps / total)
                for (subnet, _, steps), value in zip(updates, values, strict=True)
            ]
            if common == "same":
                tensor[where] = copies[0][0]
            else:
                tensor[where] = _moved(tensor[where], copies) if common == "sum" else _mean(copies)


def own_or(subnet: Subnet, weight: float) -> Tensor:
    """For each of a subnet's values `[P]`, 1 where no other subnet has it, else this weight."""
    weights = torch.ones(subnet.parameters)
    for tensor, at, values in zip(subnet.layout.tensors, subnet.positions, views(weights, subnet.shapes), strict=True):
        if _common(tensor) is not None:
            values[_common_within(tensor, at)] = weight
    return weights


def _mean(copies: Sequence[tuple[Tensor, float]]) -> Tensor:
    mean = copies[0][0] * copies[0][1]
    for copy, weight in copies[1:]:
        mean.add_(copy, alpha=weight)
    return mean


def _moved(before: Tensor, copies: Sequence[tuple[Tensor, float]]) -> Tensor:
    """What was before, and each copy's change to it; a block of rows at a time, as this may be most of a network."""
    moved = before.clone()
    for copy, _ in copies:
        for rows, mine, old in zip(*(_blocks(t) for t in (moved, copy, before)), strict=True):
            rows.add_(mine - old)
    return moved


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, BLOCK_ROWS) if tensor.ndim else (tensor,)


def _positions(neurons: np.ndarray | None, has: Mask) -> Tensor | None:
    if neurons is None:
        return None
    return torch.from_numpy(np.flatnonzero(has[neurons]))


def _grid(tensor: Tensor, at: Positions) -> list[Tensor]:
    """Positions as index tensors that broadcast to the subnet's shape."""
    whole = (torch.arange(length) if p is None else p for length, p in zip(tensor.shape, at, strict=True))
    return [p.view(*(-1 if d == e else 1 for e in range(tensor.ndim))) for d, p in enumerate(whole)]


def _scatter(tensor: Tensor, at: Positions, value: Tensor) -> None:
    split = [d for d, positions in enumerate(at) if positions is not None]
    if len(split) == 1:
        tensor.index_copy_(split[0], at[split[0]], value)  # type: ignore[arg-type]
    else:
        tensor.index_put_(tuple(_grid(tensor, at)), value)


def _common(tensor: TensorLayout) -> tuple[Tensor, ...] | tuple[slice, ...] | None:
    """The index of what every subnet has, or None if there is no such part."""
    if tensor.shared:
        return (slice(None),) * len(tensor.shape)
    within = [torch.arange(n) if p is None else torch.from_numpy(np.flatnonzero(p < 0)) for n, p in _dims(tensor)]
    return None if any(len(p) == 0 for p in within) else tuple(torch.meshgrid(*within, indexing="ij"))


def _common_within(tensor: TensorLayout, at: Positions) -> tuple[Tensor, ...] | tuple[slice, ...]:
    """The same part's index within a subnet's own tensor."""
    if tensor.shared:
        return (slice(None),) * len(tensor.shape)
    within = [
        torch.arange(n) if p is None or q is None else torch.from_numpy(np.flatnonzero(p[q.numpy()] < 0))
        for (n, p), q in zip(_dims(tensor), at, strict=True)
    ]
    return tuple(torch.meshgrid(*within, indexing="ij"))


def _dims(tensor: TensorLayout) -> Iterator[tuple[int, np.ndarray | None]]:
    return zip(tensor.shape, tensor.neurons, strict=True)
