"""All that a worker must know to train any subnet of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.data import Source
from idletrain.nn.groups import Layout
from idletrain.nn.partition import Block, draw, members, orders
from idletrain.nn.subnets import Subnet, cut

Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's ignore_index: neither loss nor accuracy counts it


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of logits `[B, ..., C]` against classes `[B, ...]`."""
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce_with_logits": functional.binary_cross_entropy_with_logits,
    "mse": functional.mse_loss,
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
    """

    module: nn.Module
    layout: Layout
    source: Source
    loss: Loss
    training: TrainingSettings
    memory: MemorySettings = MemorySettings()

    def subnets(self, round_: int, shares: Sequence[float]) -> list[Subnet]:
        """Every subnet of a round."""
        masks = draw(self.training.seed, round_, self.layout.sizes, shares)
        return [cut(self.layout, mask) for mask in masks]

    def subnet(self, round_: int, mine: Sequence[Block]) -> Subnet:
        """One subnet of a round, by its blocks: what a worker needs."""
        sizes = self.layout.sizes
        return cut(self.layout, members(orders(self.training.seed, round_, sizes, mine), mine))

    @property
    def slots(self) -> tuple[str, ...]:
        """What a flat buffer holds, in order: the values, then the optimizer's state."""
        optimizer = self.training.optimizer
        if optimizer.name == "adamw":
            return ("value", "exp_avg", "exp_avg_sq")
        return ("value", "momentum_buffer") if optimizer.momentum else ("value",)

    @property
    def travelling(self) -> int:
        """How many slots go from round to round; the rest starts at zero."""
        return len(self.slots) if self.training.optimizer.state == "travel" else 1
