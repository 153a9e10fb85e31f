"""All that a worker must know to train any subnet of a run."""

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
    """Cross entropy of logits `[B, ..., C]` against classes `[B, ...]`."""
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def sampled_softmax(outputs: Any, labels: Any) -> Tensor:
    """The loss of a network that ends in `idletrain.nn.wide.SparseLinear`, over the labels active in the batch."""
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
    """What trains: sent once to every worker.

    Attributes:
        module: The network on the meta device; BatchNorm uses batch statistics.
        layout: How its parameters are cut.
        source: The training data.
        loss: `(outputs, labels) -> scalar`.
        training: Method, steps, optimizer and seed.
        memory: What to do with a subnet that is too large for a worker.
        output: The name of its `SparseLinear`, if it ends in one.
    """

    module: nn.Module
    layout: Layout
    source: Source
    loss: Loss
    training: TrainingSettings
    memory: MemorySettings = MemorySettings()
    output: str | None = None

    def subnets(self, round_: int, shares: Sequence[float]) -> list[Subnet]:
        """Every subnet of a round."""
        masks = draw(self.training.seed, round_, self.layout.sizes, shares, self.layout.fixed)
        return [cut(self.layout, mask) for mask in masks]

    def subnet(self, round_: int, blocks: Sequence[Block]) -> Subnet:
        """One subnet of a round, by its blocks: what a worker needs."""
        dealt = permutations(self.training.seed, round_, self.layout.sizes, blocks, self.layout.fixed)
        return cut(self.layout, members(dealt, blocks))

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
        """How many slots and row slots go from round to round; the rest starts at zero."""
        return (len(self.slots), len(self.row_slots)) if self.training.optimizer.state == "travel" else (1, 0)

    @property
    def powers(self) -> tuple[int, ...]:
        """For each persistent slot, the power of a subnet's factors that it is multiplied by (see `StateSlot`)."""
        power_of = {"value": 1, **{slot.name: slot.power for slot in self._state}}
        slots, row_slots = self.persistent_slots
        return tuple(power_of[name] for name in (*self.slots[:slots], *self.row_slots[:row_slots]))

    @property
    def output_at(self) -> int:
        """The place of the very wide output's weight among the network's tensors."""
        return [tensor.name for tensor in self.layout.tensors].index(f"{self.output}.weight")

    @property
    def out_of_core(self) -> str:
        """What the job says of subnets beyond a node's memory; what is coded, or row-sparse, is trained in core."""
        in_core = self.output or self.row_slots or self.training.exchange.coded
        return "never" if in_core else self.memory.out_of_core

    def buffer_size(self, subnet: Subnet, *, persistent: bool) -> int:
        """Values in a subnet's flat buffer: as it is trained, or as it goes from round to round."""
        slots, row_slots = self.persistent_slots if persistent else (len(self.slots), len(self.row_slots))
        return slots * subnet.parameters + row_slots * subnet.by_row.parameters
