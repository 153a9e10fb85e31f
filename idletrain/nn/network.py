"""The whole network's values and optimizer state, as one flat array on the head."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idletrain.nn.ist.groups import Layout, SharedRule
from idletrain.nn.ist.subnets import Subnet, add, by_row, gather, merge, views
from idletrain.nn.program import Program


class Network:
    """Slots of N parameters each: the values, then the optimizer's state, all in the module's order.

    Args:
        layout: The network's.
        slots: Slots with a value a parameter.
        values: The first slot's.
        row_slots: Slots with a value a row (a tensor's first dimension).
        powers: For each slot the power of a subnet's factors that its values are multiplied by (see
            `nn.ist.subnets.scaled`); all are values and momenta if left out.

    Attributes:
        flat: All slots in one, float32.
    """

    def __init__(
        self,
        layout: Layout,
        slots: int,
        values: Sequence[Tensor] | None = None,
        row_slots: int = 0,
        powers: Sequence[int] = (),
    ) -> None:
        self._powers = tuple(powers) or (1,) * slots + (-2,) * row_slots
        self._counts, self._common = (slots, row_slots), layout.common
        shapes = [[t.shape for t in kind.tensors] for kind in [layout] * slots + [by_row(layout)] * row_slots]
        sizes = [sum(math.prod(shape) for shape in slot) for slot in shapes]
        self.flat = torch.zeros(sum(sizes))
        pieces = torch.split(self.flat, sizes)
        self.slots = [list(views(piece, slot)) for piece, slot in zip(pieces, shapes, strict=True)]
        for target, value in zip(self.slots[0], values or (), strict=bool(values)):
            target.copy_(value)

    @classmethod
    def of(cls, program: Program, values: Sequence[Tensor] | None = None) -> Network:
        """The network of a program: what goes from round to round."""
        slots, row_slots = program.persistent_slots
        return cls(program.layout, slots, values, row_slots, program.powers)

    @property
    def values(self) -> list[Tensor]:
        """The parameters, in the module's order."""
        return self.slots[0]

    def pull(self, subnet: Subnet) -> Tensor:
        """A subnet's flat buffer."""
        slots, row_slots = self._counts
        flat = torch.empty(slots * subnet.parameters + row_slots * subnet.by_row.parameters)
        pieces = subnet.slots(flat, slots, row_slots)
        for tensors, (part, slot), power in zip(self.slots, pieces, self._powers, strict=True):
            gather(tensors, part, slot, power)
        return flat

    def commit(self, updates: Sequence[tuple[Subnet, Tensor, int]]) -> None:
        """Write back `(subnet, flat buffer, steps)`; a neuron has one owner, so their order is only for sums."""
        split = [(subnet.slots(flat, *self._counts), steps) for subnet, flat, steps in updates]
        for slot, tensors in enumerate(self.slots):
            averages = 0 < slot < self._counts[0]  # moments: the sum of their changes is none, and may be below zero
            common: SharedRule = "mean" if averages and self._common == "sum" else self._common
            merge(tensors, [(*pieces[slot], steps) for pieces, steps in split], common, self._powers[slot])

    def add(self, subnet: Subnet, change: Tensor, weight: float) -> None:
        """Add a change `[P]` of a subnet's values; of what every subnet has, as much of it as its copy counted for."""
        add(self.values, subnet, change, weight)

    def sha256(self) -> str:
        """Digest of the parameters (not of the optimizer's state): equal bits, equal digest."""
        count = sum(tensor.numel() for tensor in self.values)
        return hashlib.sha256(self.flat[:count].numpy().data).hexdigest()
