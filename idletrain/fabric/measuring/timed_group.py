"""Time work that several nodes do together: a sample is the time of the slowest node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from idletrain.fabric.measuring import presets
from idletrain.fabric.measuring.presets import FabricPreset


@dataclass(frozen=True)
class TimedGroup:
    """The first `nodes` nodes of a measurement.

    Attributes:
        group: Their process group in torch.distributed; None for one node alone.
        nodes: Number of nodes in the group.
        rank: This node's number among all nodes.
        device: Device of the tensors.
        preset: How much is measured.
    """

    group: Any
    nodes: int
    rank: int
    device: torch.device
    preset: FabricPreset

    @property
    def includes_this_node(self) -> bool:
        """Return whether this node is in the group."""
        return self.rank < self.nodes

    @property
    def where(self) -> str:
        """Return the number of nodes in words, for messages."""
        return f"{self.nodes} nodes" if self.nodes > 1 else "one node"

    def samples(
        self, work: Callable[[], Any], budget_seconds: float, *, least_once: bool = False, warm: bool = False
    ) -> list[float]:
        """Repeat work within a time budget and return the seconds of each time.

        Args:
            work: What to time.
            budget_seconds: Time for all repetitions.
            least_once: Return one sample where even the preset's fewest would take too long; without it, none.
            warm: Skip the untimed first time, which sets up connections, buffers and caches.
        """
        if not warm:
            self.timed(work)
        (once,) = self.slowest([self.timed(work)])
        count = presets.repeats(self.preset, once, budget_seconds)
        if not count:
            return [once] if least_once else []
        return [once, *self.slowest([self.timed(work) for _ in range(count - 1)])]

    def timed(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the work takes on this node; all nodes start it together."""
        self.barrier()
        started = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def barrier(self) -> None:
        """Wait until all nodes of the group are here."""
        if self.group is not None:
            distributed.barrier(self.group)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over all nodes of each value; every node gets the same, so that all decide alike."""
        if self.group is None:
            return list(values)
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in largest]

    def all_true(self, own: bool) -> bool:
        """Return whether a condition holds on every node, given whether it holds on this one."""
        return self.slowest([0.0 if own else 1.0]) == [0.0]
