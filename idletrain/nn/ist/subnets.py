"""Cut a subnet, and copy its values out of the network into one flat buffer.

Letters: P parameter values of a subnet, R rows of all its tensors, T tensors. A flat buffer
`[slots * P + row slots * R]` holds all values, then the optimizer state in the same order, so that
an update is sent as one contiguous array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from idletrain.nn.ist.groups import INPUT_POWERS, Layout, TensorLayout
from idletrain.nn.ist.partition import Mask
from idletrain.nn.ist.skipping import SkippableBlock

Positions = tuple[Tensor | None, ...]  # for each dimension, the positions that a subnet has, None for all of them


@dataclass(frozen=True)
class Subnet:
    """The positions of a subnet's tensors in the network, their shapes and their scaling factors.

    Attributes:
        layout: The network's layout.
        positions: For each tensor, its positions in the network's tensor.
        shapes: For each tensor, its shape in the subnet.
        factors: For each tensor, the factor of the network's values in the subnet, broadcastable to its shape; None
            for 1. So a sum over a share of the neurons is as large as the network's sum over all of them (the inverse
            scaling of dropout), and the network computes the mean of its subnets' sums.
        input_factors: Names of modules and the factor of their inputs, where the tensor itself cannot be multiplied.
        frozen: The same of the parameters that do not train, which are no part of its flat buffer; None without any.
        branches: Each residual block of a network cut by depth, with the factor of its change; 0 where it is lacking.
        sharing: The most of its round's subnets that train one number, of those that not all of them train.
    """

    layout: Layout
    positions: tuple[Positions, ...]
    shapes: tuple[tuple[int, ...], ...]
    factors: tuple[Tensor | None, ...]
    input_factors: tuple[tuple[str, Tensor], ...] = ()
    frozen: Subnet | None = None
    branches: tuple[tuple[SkippableBlock, float], ...] = ()
    sharing: int = 1

    @property
    def parameters(self) -> int:
        """Return P, the number of values in one slot."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def by_row(self) -> Subnet:
        """Return the same subnet for tensors with one number for each row."""
        positions = tuple(at[:1] for at in self.positions)
        factors = tuple(_row_factor(f, shape) for f, shape in zip(self.factors, self.shapes, strict=True))
        shapes = tuple(shape[:1] for shape in self.shapes)
        return Subnet(by_row(self.layout), positions, shapes, factors, sharing=self.sharing)

    def slots(self, flat: Tensor, slots: int, row_slots: int) -> list[tuple[Subnet, Tensor]]:
        """Split a flat buffer into its slots, each with its subnet (`by_row` for row slots), without a copy."""
        subnets = [self] * slots + [self.by_row] * row_slots
        pieces = torch.split(flat, [subnet.parameters for subnet in subnets])
        return list(zip(subnets, pieces, strict=True))


def by_row(layout: Layout) -> Layout:
    """Return the layout of tensors with one number for each row of this layout's."""
    tensors = (replace(t, shape=t.shape[:1], neurons=t.neurons[:1]) for t in layout.tensors)
    return replace(layout, tensors=tuple(tensors))


def cut(layout: Layout, members: Mask, survival: float = 1.0, sharing: int = 1) -> Subnet:
    """Return the subnet of the neurons in the mask `members` `[neurons]`; positions keep their order for reshapes.

    A residual block's change is multiplied by the inverse of `survival`, the share of the round's subnets that have it.
    `sharing` is the most of them that train one number, of those that not all of them train.
    """
    has = np.append(members, True)  # index -1 (a position of every subnet) finds the last
    positions = tuple(tuple(_positions(neurons, has) for neurons in t.neurons) for t in layout.tensors)
    shapes = tuple(
        tuple(length if at is None else len(at) for length, at in zip(t.shape, where, strict=True))
        for t, where in zip(layout.tensors, positions, strict=True)
    )
    neuron_factors = _neuron_factors(layout, members)
    factors = tuple(
        _product(tensor, [_along(tensor, d, neuron_factors**power, has) for d, power in tensor.scaled])
        for tensor in layout.tensors
    )
    named = {tensor.name: tensor for tensor in (*layout.tensors, *layout.frozen)}
    input_factors = tuple(
        (layer, _along(named[c.tensor], c.dimension, neuron_factors ** INPUT_POWERS[c.scaling], has).to(torch.float32))
        for c in layout.contractions
        for layer in c.layers
    )
    frozen = replace(layout, tensors=layout.frozen, frozen=(), contractions=())
    branches = tuple(
        (block, (1 / survival if block.additive else 1.0) if is_member else 0.0)
        for block, is_member in zip(layout.skippable, members, strict=False)
    )
    of_frozen = cut(frozen, members) if layout.frozen else None
    return Subnet(layout, positions, shapes, factors, input_factors, of_frozen, branches, sharing)


def _neuron_factors(layout: Layout, members: Mask) -> np.ndarray:
    """Return, for every neuron, its group's number of neurons over the subnet's; 1 for a block and for index -1."""
    factors = np.ones(len(members) + 1)
    start = 0
    for size in layout.sizes:
        factors[start : start + size] = size / max(1, int(members[start : start + size].sum()))
        start += size
    factors[: len(layout.skippable)] = 1
    return factors


def _along(tensor: TensorLayout, dimension: int, neuron_factors: np.ndarray, has: Mask) -> Tensor:
    """Return the factors of a subnet's positions along one dimension `[length]`, or one factor for all `[]`."""
    neurons = tensor.neurons[dimension]
    assert neurons is not None
    factors = torch.from_numpy(neuron_factors[neurons[has[neurons]]])
    return factors[0] if len(factors) and bool((factors == factors[0]).all()) else factors


def _product(tensor: TensorLayout, along: Sequence[Tensor]) -> Tensor | None:
    """Return the product of all dimensions' factors, rounded to float32 once; None if all are 1."""
    result = torch.ones((), dtype=torch.float64)
    for (dimension, _), factors in zip(tensor.scaled, along, strict=True):
        shape = [-1 if d == dimension else 1 for d in range(len(tensor.shape))]
        result = result * (factors.view(shape) if factors.ndim else factors)
    return None if bool((result == 1).all()) else result.to(torch.float32)


def _row_factor(factor: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the factor of each row's mean square `[rows]` or `[]`: gradients scale inversely to weights."""
    if factor is None or not factor.ndim or not shape:
        return factor
    squares = factor.broadcast_to(*[n if d == 0 else factor.shape[d] for d, n in enumerate(shape)]).pow(-2)
    return squares.reshape(shape[0], -1).mean(1).rsqrt()


def scaled(values: Tensor, factor: Tensor | None, power: int) -> Tensor:
    """Convert the network's values to a subnet's: multiply them by a power of the factor.

    The power is 1 for weights and SGD's momentum, -1 for a mean of gradients, -2 for a mean of their squares. Negative
    powers divide, so that `unscaled` undoes this bit for bit where the factor is a power of two, else to one rounding.
    """
    if factor is None:
        return values
    by = factor if abs(power) == 1 else factor.square()
    return values * by if power > 0 else values / by


def unscaled(values: Tensor, factor: Tensor | None, power: int) -> Tensor:
    """Convert a subnet's values to the network's: the inverse of `scaled`."""
    return scaled(values, factor, -power)


class ScaledInputs:
    """Multiply a linear or convolutional layer's inputs, channel by channel, before it runs.

    Args:
        factor: One factor for every channel `[C]`, or one for all `[]`.
        layer: The layer; a convolution's channels are its inputs' second dimension `[B, C, ...]`, others' the last.
    """

    def __init__(self, factor: Tensor, layer: nn.Module) -> None:
        spatial = len(layer.kernel_size) if isinstance(layer, nn.modules.conv._ConvNd) else 0
        self._factor = factor.view(-1, *[1] * spatial) if factor.ndim else factor

    def __call__(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See `torch.nn.Module.register_forward_pre_hook`."""
        first, *rest = inputs
        return (first * self._factor.to(first.device, first.dtype), *rest)


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """Yield the tensors inside one slot `[P]` of a flat buffer, without a copy."""
    offset = 0
    for shape in shapes:
        count = math.prod(shape)
        yield flat[offset : offset + count].view(shape)
        offset += count


def gather(network: Sequence[Tensor], subnet: Subnet, out: Tensor, power: int = 1) -> None:
    """Copy the subnet's values out of the network's tensors (T of them) into one slot `[P]`, scaled by a power."""
    for tensor, at, target in zip(network, subnet.positions, views(out, subnet.shapes), strict=True):
        split = [d for d, positions in enumerate(at) if positions is not None]
        if not split:
            target.copy_(tensor)
        elif len(split) == 1:
            index = at[split[0]]
            assert index is not None
            torch.index_select(tensor, split[0], index, out=target)
        else:
            torch.ops.aten.index.Tensor_out(tensor, grid(tensor, at), out=target)
    for factor, target in zip(subnet.factors, views(out, subnet.shapes), strict=True):
        if factor is not None:
            target.copy_(scaled(target, factor, power))


def _positions(neurons: np.ndarray | None, has: Mask) -> Tensor | None:
    if neurons is None:
        return None
    return torch.from_numpy(np.flatnonzero(has[neurons]))


def grid(tensor: Tensor, at: Positions) -> list[Tensor]:
    """Return positions as index tensors that broadcast to the subnet's shape."""
    indices = (torch.arange(length) if p is None else p for length, p in zip(tensor.shape, at, strict=True))
    return [p.view(*(-1 if d == e else 1 for e in range(tensor.ndim))) for d, p in enumerate(indices)]
