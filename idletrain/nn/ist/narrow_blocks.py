"""Cut a network by depth and by width: a subnet has some of its residual blocks, and some of the neurons of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from idletrain.errors import JobError
from idletrain.nn.ist.groups import Layout, TensorLayout, offsets


def block_of(depth: Layout, names: Iterable[str]) -> int | None:
    """Return the number of the residual block that all of these tensors are in; None if none of them is in one.

    Args:
        depth: The layout by depth alone.
        names: Names of parameters and buffers.

    Raises:
        ValueError: they are in several, or some are in none.
    """
    tensors = {tensor.name: tensor for tensor in depth.tensors}
    block, *others = {_owner(depth, name, tensors.get(name)) for name in names}
    if others:
        raise ValueError("in several blocks, or in some and elsewhere")
    return block


def _owner(depth: Layout, name: str, tensor: TensorLayout | None) -> int | None:
    if tensor is None:  # a buffer that does not travel
        return next((k for k, block in enumerate(depth.skippable) if name.startswith(f"{block.name}.")), None)
    return int(tensor.neurons[0][0]) if tensor.neurons and tensor.neurons[0] is not None else None


def within_blocks(layout: Layout, depth: Layout) -> Layout:
    """Return the layout whose first group are the residual blocks, and whose others are neurons, most within a block.

    A tensor of a block has no value in a subnet without the block: positions of its first dimension that are no
    neurons of a group are the block's.

    Args:
        layout: The layout by width alone.
        depth: The layout by depth alone.

    Raises:
        JobError: a group reaches beyond one block.
    """
    blocks, starts = len(depth.skippable), offsets(layout.sizes)
    by_depth = {tensor.name: tensor for tensor in depth.tensors}
    by_width = {tensor.name: tensor for tensor in layout.tensors}
    groups = []
    for group, start in zip(layout.groups, starts, strict=True):
        ids = range(start, start + group.size)
        names = [t.name for t in layout.tensors if any(n is not None and np.isin(n, ids).any() for n in t.neurons)]
        try:
            groups.append(replace(group, within=block_of(depth, names)))
        except ValueError as error:
            raise JobError(
                f"model.groups: {group.name} is {error}; with model.split: both leave it whole, or use neurons"
            ) from None

    def merged(tensor: TensorLayout) -> TensorLayout:
        neurons = [None if n is None else np.where(n < 0, -1, n + blocks) for n in tensor.neurons]
        owner = by_depth[tensor.name].neurons[0] if tensor.name in by_depth and neurons else None
        if owner is not None:
            neurons[0] = owner if neurons[0] is None else np.where(neurons[0] < 0, owner, neurons[0])
        return replace(tensor, neurons=tuple(neurons))

    tensors = [merged(tensor) for tensor in layout.tensors]
    tensors += [tensor for name, tensor in by_depth.items() if name not in by_width]  # buffers that travel
    return replace(
        layout,
        groups=(*depth.groups, *groups),
        tensors=tuple(tensors),
        skippable=depth.skippable,
        kept_whole=(*depth.kept_whole, *layout.kept_whole),
    )
