"""Keep parameters that do not train out of what travels in every round."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.modules import copied, tensor_of


def without_frozen(module: nn.Module, meta: nn.Module, layout: Layout) -> tuple[nn.Module, Layout]:
    """Give a module on the meta device the values of the parameters that do not train: they go to a worker once.

    Args:
        module: The module with its values.
        meta: Its form on the meta device.
        layout: The layout of its cuts.

    Returns:
        The module on the meta device but for these values, and the layout with them as its `frozen`.
    """
    frozen = tuple(tensor for tensor in layout.tensors if not tensor.trainable and not tensor.buffer)
    values = {
        id(tensor_of(meta, tensor.name)): nn.Parameter(tensor_of(module, tensor.name).detach(), requires_grad=False)
        for tensor in frozen
    }
    tensors = tuple(tensor for tensor in layout.tensors if tensor.trainable or tensor.buffer)
    return copied(meta, values), replace(layout, tensors=tensors, frozen=frozen)
