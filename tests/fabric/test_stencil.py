"""Cut or whole, hidden or not, a step of the stencil has the same values."""

from __future__ import annotations

import torch

from idletrain.fabric.company import Company
from idletrain.fabric.schedule import QUICK
from idletrain.fabric.stencil import Block


def reference(cells: torch.Tensor) -> torch.Tensor:
    inner = [slice(1, -1)] * 3
    total = cells[tuple(inner)].clone()
    for axis in range(3):
        for by in (slice(0, -2), slice(2, None)):
            box = inner.copy()
            box[axis] = by
            total += cells[tuple(box)]
    return total / 7


def alone() -> Block:
    return Block(Company(None, 1, 0, torch.device("cpu"), QUICK), (5, 4, 3))


def test_a_step_is_the_mean_of_a_cell_and_its_six_neighbours() -> None:
    for step in (Block.step_blocking, Block.step_overlapping):
        block = alone()
        before = block._cells.clone()
        step(block)
        torch.testing.assert_close(block._cells[1:-1, 1:-1, 1:-1], reference(before))


def test_one_node_has_nobody_to_exchange_with() -> None:
    block = alone()
    before = block._cells.clone()
    block.halo()
    assert torch.equal(block._cells, before)
