"""The whole network's values and optimizer state, as one flat array on the head node."""

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
    """Hold the values and the optimizer state of all N parameters: one slot each, all in the module's order.

    Args:
        layout: The network's layout.
        slots: Number of slots with one number for each parameter value.
        values: The parameters, for the first slot; zeros if None.
        row_slots: Number of slots with one number for each row (a tensor's first dimension).
        powers: For each slot, the power of a subnet's factors that its numbers are multiplied by (see
            `nn.ist.subnets.scaled`); if left out, all slots are values and momenta, all row slots mean squares.

    Attributes:
        flat: All slots in one float32 tensor.
        slots: For each slot, its tensors as views of `flat`.
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
        """Create the network of a program, with the slots that go from round to round."""
        slots, row_slots = program.persistent_slots
        return cls(program.layout, slots, values, row_slots, program.powers)

    @property
    def values(self) -> list[Tensor]:
        """The parameters, in the module's order."""
        return self.slots[0]

    def pull(self, subnet: Subnet) -> Tensor:
        """Copy a subnet's values and state into a new flat buffer."""
        slots, row_slots = self._counts
        flat = torch.empty(slots * subnet.parameters + row_slots * subnet.by_row.parameters)
        pieces = subnet.slots(flat, slots, row_slots)
        for tensors, (part, slot), power in zip(self.slots, pieces, self._powers, strict=True):
            gather(tensors, part, slot, power)
        return flat

    def commit(self, updates: Sequence[tuple[Subnet, Tensor, int]]) -> None:
        """Write updates `(subnet, flat buffer, steps)` into the network.

        A neuron belongs to one subnet, so the order of updates matters only to parameters that all subnets have.
        """
        split = [(subnet.slots(flat, *self._counts), steps) for subnet, flat, steps in updates]
        for slot, tensors in enumerate(self.slots):
            is_moment = 0 < slot < self._counts[0]  # averaged: summed changes are meaningless and can be negative
            common: SharedRule = "mean" if is_moment and self._common == "sum" else self._common
            merge(tensors, [(*pieces[slot], steps) for pieces, steps in split], common, self._powers[slot])

    def add(self, subnet: Subnet, change: Tensor, weight: float) -> None:
        """Add a change `[P]` of a subnet's values, `weight` times as much to the parameters that every subnet has."""
        add(self.values, subnet, change, weight)

    def sha256(self) -> str:
        """Return a digest of the parameters without the optimizer state: equal bits give equal digests."""
        count = sum(tensor.numel() for tensor in self.values)
        return hashlib.sha256(self.flat[:count].numpy().data).hexdigest()
