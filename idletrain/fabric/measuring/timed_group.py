"""Nodes that do things together, and time them: a sample is what the slowest of them took."""

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
    """The first so many nodes.

    Attributes:
        group: Of torch.distributed; None for one node alone.
        nodes: How many.
        rank: This one's number among all nodes.
        device: Where tensors are.
        preset: How much is measured.
    """

    group: Any
    nodes: int
    rank: int
    device: torch.device
    preset: FabricPreset

    @property
    def has_me(self) -> bool:
        """Whether this node is one of them."""
        return self.rank < self.nodes

    def samples(
        self, work: Callable[[], Any], budget_seconds: float, *, least_once: bool = False, warm: bool = False
    ) -> list[float]:
        """Seconds of the work, again and again within a budget; none where even a few times would take too long, or
        with `least_once` the one that told so. It is done once before, for connections, buffers and caches, unless
        these are `warm`.
        """
        if not warm:
            self.timed(work)
        (once,) = self.slowest([self.timed(work)])
        count = presets.repeats(self.preset, once, budget_seconds)
        if not count:
            return [once] if least_once else []
        return [once, *self.slowest([self.timed(work) for _ in range(count - 1)])]

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds of the work, begun by all at once."""
        self.meet()
        started = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def meet(self) -> None:
        """Wait for the others."""
        if self.group is not None:
            distributed.barrier(self.group)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all nodes'; the same everywhere, so that all decide alike."""
        if self.group is None:
            return list(values)
        both = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(both, distributed.ReduceOp.MAX, group=self.group)
        return [float(value) for value in both]

    def all_can(self, own: bool) -> bool:
        """Whether all of them can do something."""
        return self.slowest([0.0 if own else 1.0]) == [0.0]
