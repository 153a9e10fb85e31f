"""The program of a run: all that a worker needs to train any of its subnets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.data.arrays import Source
from idletrain.nn.ist.groups import Layout
from idletrain.nn.ist.partition import Block, draw, members, permutations
from idletrain.nn.ist.subnets import Subnet, cut
from idletrain.nn.optim.table import StateSlot, kind_of

Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's ignore_index: neither loss nor accuracy counts it


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of logits `[B, ..., C]` against classes `[B, ...]`."""
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def sampled_softmax(outputs: Any, labels: Any) -> Tensor:
    """Return the loss of a network that ends in `idletrain.nn.wide.SparseLinear`, over the batch's active labels."""
    loss: Tensor = outputs.loss(labels)
    return loss


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
    "sampled_softmax": sampled_softmax,
}


@dataclass(frozen=True)
class Program:
    """Everything that training a subnet needs; sent once to every worker.

    Attributes:
        module: The network on the meta device; BatchNorm uses batch statistics.
        layout: The groups that its parameters are cut by.
        source: The training data.
        loss: `(outputs, labels) -> scalar`.
        training: Method, steps, optimizer and seed.
        memory: Settings for a subnet that is too large for a worker.
        output: The name of its `SparseLinear`, if it ends in one, else None.
    """

    module: nn.Module
    layout: Layout
    source: Source
    loss: Loss
    training: TrainingSettings
    memory: MemorySettings = MemorySettings()
    output: str | None = None

    def subnets(self, round_: int, shares: Sequence[float]) -> list[Subnet]:
        """Return every subnet of a round, in the order of their shares of every group."""
        masks = draw(self.training.seed, round_, self.layout.sizes, shares, self.layout.fixed)
        return [cut(self.layout, mask) for mask in masks]

    def subnet(self, round_: int, blocks: Sequence[Block]) -> Subnet:
        """Return one subnet of a round from its blocks, without drawing the others."""
        permuted = permutations(self.training.seed, round_, self.layout.sizes, blocks, self.layout.fixed)
        return cut(self.layout, members(permuted, blocks))

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of a flat buffer's first slots: the values, then the optimizer state with one number for each value."""
        return ("value", *(slot.name for slot in self._state if not slot.per_row))

    @property
    def row_slots(self) -> tuple[str, ...]:
        """Names of the slots after `slots`: state with one number for each row (a tensor's first dimension)."""
        return tuple(slot.name for slot in self._state if slot.per_row)

    @property
    def _state(self) -> tuple[StateSlot, ...]:
        optimizer = self.training.optimizer
        return kind_of(optimizer).state(optimizer)

    @property
    def persistent_slots(self) -> tuple[int, int]:
        """Return the numbers of slots and row slots that go from round to round; the others start at zero."""
        return (len(self.slots), len(self.row_slots)) if self.training.optimizer.state == "travel" else (1, 0)

    @property
    def powers(self) -> tuple[int, ...]:
        """For each persistent slot, the power of a subnet's factors that it is multiplied by (see `StateSlot`)."""
        power_of = {"value": 1, **{slot.name: slot.power for slot in self._state}}
        slots, row_slots = self.persistent_slots
        return tuple(power_of[name] for name in (*self.slots[:slots], *self.row_slots[:row_slots]))

    @property
    def output_at(self) -> int:
        """Return the place of the very wide output's weight among the network's tensors."""
        return [tensor.name for tensor in self.layout.tensors].index(f"{self.output}.weight")

    @property
    def out_of_core(self) -> str:
        """Return the job's `memory.out_of_core`, or `never` if rows are sparse or the exchange is coded."""
        in_core = self.output or self.row_slots or self.training.exchange.coded
        return "never" if in_core else self.memory.out_of_core

    def buffer_size(self, subnet: Subnet, *, persistent: bool) -> int:
        """Return the numbers in a subnet's flat buffer: the persistent slots' alone, or all of training's."""
        slots, row_slots = self.persistent_slots if persistent else (len(self.slots), len(self.row_slots))
        return slots * subnet.parameters + row_slots * subnet.by_row.parameters
