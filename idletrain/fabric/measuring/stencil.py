"""Time a 7-point stencil with a 3-D halo exchange between up to six neighbours, much like a flow solver's step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, distributed

from idletrain.fabric.analysis.samples import StencilSample
from idletrain.fabric.measuring.presets import dims, neighbours
from idletrain.fabric.measuring.timed_group import TimedGroup

CELL_WEIGHT = 1 / 7  # of each of the seven cells: the mean, which stays finite


class GridBlock:
    """A node's part of the grid, with a halo of one cell around it."""

    def __init__(self, ranks: TimedGroup, edges: tuple[int, int, int]) -> None:
        self.edges = edges
        self._group = ranks.group
        self._cells = torch.rand([edge + 2 for edge in edges], device=ranks.device)
        self._next = self._cells.clone()
        self._neighbours = neighbours(ranks.rank, dims(ranks.nodes))
        self._incoming = {
            (axis, side): self._face(axis, side, halo=True).clone(memory_format=torch.contiguous_format)
            for axis, side, _ in self._neighbours
        }

    def halo(self) -> None:
        """Exchange the outermost cells with the neighbours."""
        self._wait(self._start())

    def compute(self) -> None:
        """Compute one step of all cells."""
        self._update((1, 1, 1), self.edges)

    def step_blocking(self) -> None:
        """Exchange the halo, then compute."""
        self.halo()
        self.compute()
        self._swap()

    def step_overlapping(self) -> None:
        """Compute the cells that need no halo while it travels, then the rest."""
        in_flight = self._start()
        self._update((2, 2, 2), tuple(edge - 2 for edge in self.edges))
        self._wait(in_flight)
        for axis, side in itertools.product(range(3), (-1, 1)):
            start, count = [1, 1, 1], list(self.edges)
            start[axis], count[axis] = (1 if side < 0 else self.edges[axis]), 1
            self._update(tuple(start), tuple(count))
        self._swap()

    def _start(self) -> list[distributed.Work]:
        """Start sending and receiving all faces."""
        sends, receives = [], []
        for axis, side, node in self._neighbours:
            face = self._face(axis, side, halo=False).contiguous()
            sends.append(distributed.P2POp(distributed.isend, face, node, self._group))
            receives.append(distributed.P2POp(distributed.irecv, self._incoming[axis, side], node, self._group))
        works: list[distributed.Work] = distributed.batch_isend_irecv(sends + receives) if sends else []
        return works

    def _wait(self, in_flight: list[distributed.Work]) -> None:
        for work in in_flight:
            work.wait()
        for (axis, side), face in self._incoming.items():
            self._face(axis, side, halo=True).copy_(face)

    def _face(self, axis: int, side: int, *, halo: bool) -> Tensor:
        """Return a view of the outermost cells on a side, or of the halo beyond them; without the halo's edges."""
        at = (0 if halo else 1) if side < 0 else self.edges[axis] + (1 if halo else 0)
        inner = [slice(1, edge + 1) for edge in self.edges]
        inner[axis] = slice(at, at + 1)
        return self._cells[tuple(inner)]

    def _update(self, start: tuple[int, ...], count: tuple[int, ...]) -> None:
        """Set the cells of a box to the mean of themselves and their six neighbours."""

        def box(axis: int = 0, by: int = 0) -> tuple[slice, ...]:
            moved = [s + by if n == axis else s for n, s in enumerate(start)]
            return tuple(slice(s, s + c) for s, c in zip(moved, count, strict=True))

        total = self._next[box()].copy_(self._cells[box()])
        for axis, by in itertools.product(range(3), (-1, 1)):
            total.add_(self._cells[box(axis, by)])
        total.mul_(CELL_WEIGHT)

    def _swap(self) -> None:
        self._cells, self._next = self._next, self._cells


def measure_stencil(ranks: TimedGroup, label: str) -> list[StencilSample]:
    """Time strong and weak scaling at this number of nodes, with the exchange waited for or hidden.

    Args:
        ranks: The nodes that take part.
        label: Their backend's name in the results.
    """
    edge, budget = ranks.preset.edge, ranks.preset.operation_seconds
    cut = dims(ranks.nodes)
    samples = []
    for scaling in ("strong", "weak"):
        edges = tuple(max(3, edge // n) for n in cut) if scaling == "strong" else (edge, edge, edge)
        block = GridBlock(ranks, (edges[0], edges[1], edges[2]))
        cells = ranks.nodes * edges[0] * edges[1] * edges[2]
        compute = tuple(ranks.samples(block.compute, budget, least_once=True))
        halo = tuple(ranks.samples(block.halo, budget, least_once=True))
        kinds: dict[bool, Callable[[], None]] = {True: block.step_blocking, False: block.step_overlapping}
        for blocking, step in kinds.items():
            steps = tuple(ranks.samples(step, budget, least_once=True))
            samples.append(StencilSample(label, scaling, blocking, ranks.nodes, cells, compute, halo, steps))
    return samples
