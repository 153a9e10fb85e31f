"""The whole network's values and optimizer state, as one flat array on the head node."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idletrain.nn import outer
from idletrain.nn.ist.first_values import shrink_drawn
from idletrain.nn.ist.groups import Layout, SharedRule
from idletrain.nn.ist.subnets import Subnet, by_row, gather, views
from idletrain.nn.ist.write_back import add_change, held_by_all, held_by_several, merge, write_one
from idletrain.nn.program import Program
from idletrain.optimizer_settings import OuterOptimizerSettings


class Network:
    """Hold the values and the optimizer state of all N parameters: one slot each, all in the module's order.

    Args:
        layout: The network's layout.
        slots: Number of slots with one number for each parameter value.
        values: The parameters, for the first slot; zeros if None.
        row_slots: Number of slots with one number for each row (a tensor's first dimension).
        powers: For each slot, the power of a subnet's factors that its numbers are multiplied by (see
            `nn.ist.subnets.scaled`); if left out, all slots are values and momenta, all row slots mean squares.
        ema: Decay a commit of an exponential moving average of the values; None without one.
        outer_optimizer: What moves values that several subnets have; None for their mean.

    Attributes:
        flat: All slots in one float32 tensor; behind them what there is of the outer optimizer's momentum, the average
            and the number of commits in it.
        slots: For each slot, its tensors as views of `flat`.
        averaged: The average's tensors in the module's order, buffers as they are; without one, the values.
    """

    def __init__(
        self,
        layout: Layout,
        slots: int,
        values: Sequence[Tensor] | None = None,
        row_slots: int = 0,
        powers: Sequence[int] = (),
        ema: float | None = None,
        outer_optimizer: OuterOptimizerSettings | None = None,
    ) -> None:
        self._powers = tuple(powers) or (1,) * slots + (-2,) * row_slots
        self._layout, self._counts, self._common = layout, (slots, row_slots), layout.common
        self._ema, self._outer = ema, outer_optimizer
        shapes = [[t.shape for t in kind.tensors] for kind in [layout] * slots + [by_row(layout)] * row_slots]
        sizes = [sum(math.prod(shape) for shape in slot) for slot in shapes]
        sizes += [] if outer_optimizer is None else [sizes[0]]
        sizes += [] if ema is None else [sizes[0], 1]
        self.flat = torch.zeros(sum(sizes))
        pieces = torch.split(self.flat, sizes)
        self._momenta = [] if outer_optimizer is None else list(views(pieces[len(shapes)], shapes[0]))
        self.slots = [list(views(piece, slot)) for piece, slot in zip(pieces, shapes, strict=False)]
        for target, value in zip(self.slots[0], values or (), strict=bool(values)):
            target.copy_(value)
        self.averaged = self.values
        if ema is not None:
            average, self._commits = pieces[-2:]
            average.copy_(pieces[0])
            self.averaged = [
                value if tensor.buffer else mean
                for tensor, value, mean in zip(layout.tensors, self.values, views(average, shapes[0]), strict=True)
            ]

    @classmethod
    def of(cls, program: Program, values: Sequence[Tensor] | None = None) -> Network:
        """Create the network of a program, with the slots that go from round to round.

        Freshly drawn weights among the module's `values` begin as its first subnets need them, see
        `nn.ist.first_values`.
        """
        slots, row_slots = program.persistent_slots
        training = program.training
        network = cls(
            program.layout,
            slots,
            values,
            row_slots,
            program.powers,
            training.ema,
            training.outer_optimizer,
        )
        if values is not None:
            phase = training.phase(0)
            network._begin(program.subnets(0, program.specs(phase.equal_shares, phase.copies)))
        return network

    def _begin(self, subnets: Sequence[Subnet]) -> None:
        shrink_drawn(self.values, subnets)
        for mean, value in zip(self.averaged, self.values, strict=True):
            if mean is not value:
                mean.copy_(value)

    def copy_of_values(self) -> Network:
        """Return a copy of the values and of their average, without any state."""
        copy = Network(self._layout, 1, self.values, powers=self._powers[:1], ema=self._ema)
        for target, mean in zip(copy.averaged, self.averaged, strict=True):
            if target is not mean:
                target.copy_(mean)
        return copy

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
        """Write a round's updates `(subnet, flat buffer, steps)` into the network.

        The order of updates matters only to parameters that several subnets have.
        """
        before = [value.clone() for value in self.values] if self._outer else []
        split = [(subnet.slots(flat, *self._counts), steps) for subnet, flat, steps in updates]
        for slot, tensors in enumerate(self.slots):
            is_moment = 0 < slot < self._counts[0]  # averaged: summed changes are meaningless and can be negative
            common: SharedRule = "mean" if is_moment and self._common == "sum" else self._common
            part = [(*pieces[slot], steps) for pieces, steps in split]
            merge(tensors, part, common, self._powers[slot])
        if self._outer and updates:
            several = functools.partial(held_by_several, [subnet for subnet, *_ in updates])
            outer.move(self._outer, self.values, before, self._momenta, self._layout, several)
        self.average()

    def commit_one(self, subnet: Subnet, flat: Tensor, began: Tensor, weight: float) -> None:
        """Write one update into the network while other subnets train (see `write_one`).

        Args:
            subnet: The subnet, whose neurons no other one holds.
            flat: Its update, a flat buffer.
            began: What it began with, as `pull` returned it.
            weight: Its weight in a mean over subnets.
        """
        before = [value.clone() for value in self.values] if self._outer else []
        pieces = zip(subnet.slots(flat, *self._counts), subnet.slots(began, *self._counts), strict=True)
        for slot, (tensors, (update, (_, first))) in enumerate(zip(self.slots, pieces, strict=True)):
            common: SharedRule = "mean" if slot and self._common == "sum" else self._common
            write_one(tensors, update, first, weight, common, self._powers[slot], is_state=slot > 0)
        if self._outer:
            shared = [held_by_all(tensor) for tensor in self._layout.tensors]
            outer.move(self._outer, self.values, before, self._momenta, self._layout, shared.__getitem__)

    def average(self) -> None:
        """Take the values into the average, if there is one: each time weighs the decay times as much as the next.

        Weights add up to 1 from the first time on, so that the values before training do not count.
        """
        if (decay := self._ema) is None:
            return
        self._commits += 1
        weight = (1 - decay) / (1 - decay ** int(self._commits))
        for value, mean in zip(self.values, self.averaged, strict=True):
            if mean is not value:
                mean.lerp_(value, weight)

    def add(self, subnet: Subnet, change: Tensor, weight: float) -> None:
        """Add a change `[P]` of a subnet's values, `weight` times as much to the parameters that every subnet has."""
        add_change(self.values, subnet, change, weight)

    def sha256(self) -> str:
        """Return a digest of the parameters without the optimizer state: equal bits give equal digests."""
        count = sum(tensor.numel() for tensor in self.values)
        return hashlib.sha256(self.flat[:count].numpy().data).hexdigest()
