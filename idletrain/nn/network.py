"""The whole network's values and optimizer state, as one flat array on the head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from idletrain.nn.groups import Layout
from idletrain.nn.subnets import Subnet, gather, merge, views


class Network:
    """Slots of N parameters each: the values, then the optimizer's state, all in the module's order.

    Attributes:
        flat: `[slots * N]` float32.
    """

    def __init__(self, layout: Layout, slots: int, values: Sequence[Tensor] | None = None) -> None:
        shapes = [tensor.shape for tensor in layout.tensors]
        size = sum(torch.Size(shape).numel() for shape in shapes)
        self.flat = torch.zeros(slots * size)
        self.slots = [list(views(self.flat[s * size : (s + 1) * size], shapes)) for s in range(slots)]
        for target, value in zip(self.slots[0], values or (), strict=bool(values)):
            target.copy_(value)

    @property
    def values(self) -> list[Tensor]:
        """The parameters, in the module's order."""
        return self.slots[0]

    def pull(self, subnet: Subnet) -> Tensor:
        """A subnet's flat buffer `[slots * P]`."""
        flat = torch.empty(len(self.slots) * subnet.parameters)
        for slot, tensors in enumerate(self.slots):
            gather(tensors, subnet, flat[slot * subnet.parameters : (slot + 1) * subnet.parameters])
        return flat

    def commit(self, updates: Sequence[tuple[Subnet, Tensor, int]]) -> None:
        """Write back `(subnet, flat [slots * P], steps)`; a neuron has one owner, so their order is only for sums."""
        for slot, tensors in enumerate(self.slots):
            parts = [(s, flat[slot * s.parameters : (slot + 1) * s.parameters], steps) for s, flat, steps in updates]
            merge(tensors, parts)

    def sha256(self) -> str:
        """Digest of the parameters (not of the optimizer's state): equal bits, equal digest."""
        count = self.flat.numel() // len(self.slots)
        return hashlib.sha256(self.flat[:count].numpy().data).hexdigest()
