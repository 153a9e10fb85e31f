"""Write the flat buffers of subnets back into the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from idletrain.nn.ist.groups import SharedRule, TensorLayout
from idletrain.nn.ist.subnets import Positions, Subnet, grid, unscaled, views

BLOCK_ROWS = 1 << 14  # rows added at a time: 16 MB of an embedding of 256 numbers


def merge(
    network: Sequence[Tensor],
    updates: Sequence[tuple[Subnet, Tensor, int]],
    common: SharedRule = "mean",
    power: int = 1,
) -> None:
    """Write updates `(subnet, slot [P], steps)` back into the network's tensors, and undo the scaling of `gather`.

    Where each neuron belongs to one subnet, its values are copied; where several have copies of it, they are averaged.
    Parameters that every subnet has are averaged or merged as `common` says (see `Layout`); buffers as their own rule
    says. Averages are weighted by steps, in the order of `updates`.
    """
    if not updates:
        return
    layout, sharing = updates[0][0].layout, updates[0][0].sharing
    total = sum(steps for _, _, steps in updates)
    pieces = zip(*(views(slot, subnet.shapes) for subnet, slot, _ in updates), strict=True)
    for i, (tensor, values) in enumerate(zip(network, pieces, strict=True)):
        if not layout.tensors[i].merged:
            continue
        rule = _rule(layout.tensors[i], common)
        values = tuple(  # noqa: PLW2901 (below, only the network's values are used)
            unscaled(value, subnet.factors[i], power) for (subnet, _, _), value in zip(updates, values, strict=True)
        )
        if sharing > 1 and not layout.tensors[i].shared:
            _write_mean(tensor, [(s.positions[i], v, n) for (s, _, n), v in zip(updates, values, strict=True)])
            continue
        if not layout.tensors[i].shared:
            for (subnet, _, _), value in zip(updates, values, strict=True):
                _scatter(tensor, subnet.positions[i], value)
        where = _common(layout.tensors[i])
        if where is not None:
            parts = [
                (value[_common_within(layout.tensors[i], subnet.positions[i])], steps / total)
                for (subnet, _, steps), value in zip(updates, values, strict=True)
            ]
            if rule == "same":
                tensor[where] = parts[0][0]
            else:
                tensor[where] = _moved(tensor[where], parts) if rule == "sum" else _mean(parts)


def write_one(
    network: Sequence[Tensor],
    update: tuple[Subnet, Tensor],
    began: Tensor,
    weight: float,
    common: SharedRule = "mean",
    power: int = 1,
    *,
    is_state: bool = False,
) -> None:
    """Write one update `(subnet, slot [P])` into the network's tensors while other subnets train theirs.

    What it alone holds takes its values. Of what every subnet has, others may have changed the network's values
    meanwhile: they move by `weight` times the update's change, by all of it where changes are summed; a mean of states,
    whose changes cannot be added, moves towards the update's.

    Args:
        network: The network's tensors of one slot.
        update: The update of that slot.
        began: What it began with `[P]`.
        weight: The subnet's weight in a mean over subnets.
        common: How copies of what every subnet has are merged.
        power: Undoes the scaling of `gather`.
        is_state: Whether the slot holds an optimizer's state.
    """
    subnet, slot = update
    pieces = zip(views(slot, subnet.shapes), views(began, subnet.shapes), strict=True)
    for i, (tensor, (ended, first)) in enumerate(zip(network, pieces, strict=True)):
        layout, at = subnet.layout.tensors[i], subnet.positions[i]
        if not layout.merged:
            continue
        value, where = unscaled(ended, subnet.factors[i], power), _common(layout)
        if where is None:
            _scatter(tensor, at, value)
            continue
        within, old = _common_within(layout, at), tensor[where].clone()
        new, base = value[within], unscaled(first, subnet.factors[i], power)[within]
        if not layout.shared:
            _scatter(tensor, at, value)
        if _rule(layout, common) == "sum":
            tensor[where] = old.add_(new - base)
        elif is_state or layout.buffer:
            tensor[where] = old.lerp_(new, weight)
        else:
            tensor[where] = old.add_(new - base, alpha=weight)


def held_by_all(tensor: TensorLayout) -> Tensor:
    """Return the mask of those values of a network's tensor that every subnet has."""
    held, where = torch.zeros(tensor.shape, dtype=torch.bool), _common(tensor)
    if where is not None:
        held[where] = True
    return held


def held_by_several(subnets: Sequence[Subnet], at: int) -> Tensor:
    """Return the mask of those values of the network's tensor number `at` that more than one of the subnets have."""
    tensor = subnets[0].layout.tensors[at]
    if tensor.shared:
        return torch.full(tensor.shape, len(subnets) > 1)
    counted = torch.zeros(tensor.shape, dtype=torch.int32)
    for subnet in subnets:
        counted[tuple(grid(counted, subnet.positions[at]))] += 1
    return counted > 1


def _rule(tensor: TensorLayout, common: SharedRule) -> SharedRule:
    """Return how the subnets' copies of a tensor are merged: a buffer has its own rule, where copies may differ."""
    return tensor.buffer if tensor.buffer in ("mean", "sum") and common != "same" else common


def add_change(network: Sequence[Tensor], subnet: Subnet, change: Tensor, weight: float) -> None:
    """Add a change `[P]` of a subnet's values to the network, `weight` times as much where every subnet has them."""
    pieces = views(change, subnet.shapes)
    for tensor, layout, at, factor, piece in zip(
        network, subnet.layout.tensors, subnet.positions, subnet.factors, pieces, strict=True
    ):
        if not layout.trainable:
            continue
        value = unscaled(piece, factor, 1).clone()
        if _common(layout) is not None:
            value[_common_within(layout, at)] *= weight
        if layout.shared:
            tensor.add_(value)
        else:
            tensor.index_put_(tuple(grid(tensor, at)), value, accumulate=True)


def _mean(copies: Sequence[tuple[Tensor, float]]) -> Tensor:
    mean = copies[0][0] * copies[0][1]
    for copy, weight in copies[1:]:
        mean.add_(copy, alpha=weight)
    return mean


def _write_mean(tensor: Tensor, copies: Sequence[tuple[Positions, Tensor, int]]) -> None:
    """Write the mean of copies `(positions, values, steps)`, weighted by steps, wherever a tensor has any."""
    total = sum(steps for _, _, steps in copies)
    mean, counted = torch.zeros_like(tensor), torch.zeros(tensor.shape)
    for at, values, steps in copies:
        index = tuple(grid(tensor, at))
        mean[index] = mean[index].add_(values, alpha=steps / total)
        counted[index] += steps
    rescale = torch.full_like(counted, total).div_(counted)  # exactly 1 where all subnets have copies
    tensor.copy_(torch.where(counted > 0, mean.mul_(rescale), tensor))


def _moved(before: Tensor, copies: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Add each copy's change to the old values, a block of rows at a time: this may be most of a network."""
    moved = before.clone()
    for copy, _ in copies:
        for rows, new, old in zip(*(_blocks(t) for t in (moved, copy, before)), strict=True):
            rows.add_(new - old)
    return moved


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor, BLOCK_ROWS) if tensor.ndim else (tensor,)


def _scatter(tensor: Tensor, at: Positions, value: Tensor) -> None:
    split = [d for d, positions in enumerate(at) if positions is not None]
    if len(split) == 1:
        tensor.index_copy_(split[0], at[split[0]], value)  # type: ignore[arg-type]
    else:
        tensor.index_put_(tuple(grid(tensor, at)), value)


def _common(tensor: TensorLayout) -> tuple[Tensor, ...] | tuple[slice, ...] | None:
    """Return the index of the part of a tensor that every subnet has, or None if there is none."""
    if tensor.shared:
        return (slice(None),) * len(tensor.shape)
    within = [torch.arange(n) if p is None else torch.from_numpy(np.flatnonzero(p < 0)) for n, p in _dims(tensor)]
    return None if any(len(p) == 0 for p in within) else tuple(torch.meshgrid(*within, indexing="ij"))


def _common_within(tensor: TensorLayout, at: Positions) -> tuple[Tensor, ...] | tuple[slice, ...]:
    """Return that part's index within a subnet's tensor."""
    if tensor.shared:
        return (slice(None),) * len(tensor.shape)
    within = [
        torch.arange(n) if p is None or q is None else torch.from_numpy(np.flatnonzero(p[q.numpy()] < 0))
        for (n, p), q in zip(_dims(tensor), at, strict=True)
    ]
    return tuple(torch.meshgrid(*within, indexing="ij"))


def _dims(tensor: TensorLayout) -> Iterator[tuple[int, np.ndarray | None]]:
    return zip(tensor.shape, tensor.neurons, strict=True)
