"""Cut or whole, hidden or not, a step of the stencil has the same values."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed

from idletrain.fabric.measuring.presets import QUICK, dims
from idletrain.fabric.measuring.stencil import GridBlock
from idletrain.fabric.measuring.timed_group import TimedGroup

NODES, EDGES, STEPS = 4, (5, 4, 3), 3
KINDS = {"exchange first": GridBlock.step_blocking, "exchange hidden": GridBlock.step_overlapping}


def reference(cells: torch.Tensor) -> torch.Tensor:
    inner = [slice(1, -1)] * 3
    total = cells[tuple(inner)].clone()
    for axis in range(3):
        for by in (slice(0, -2), slice(2, None)):
            box = inner.copy()
            box[axis] = by
            total += cells[tuple(box)]
    return total / 7


def alone() -> GridBlock:
    return GridBlock(TimedGroup(None, 1, 0, torch.device("cpu"), QUICK), EDGES)


@pytest.mark.parametrize("step", KINDS.values(), ids=KINDS)
def test_a_step_is_the_mean_of_a_cell_and_its_six_neighbours(step: Callable[[GridBlock], None]) -> None:
    block = alone()
    before = block._cells.clone()
    step(block)
    torch.testing.assert_close(block._cells[1:-1, 1:-1, 1:-1], reference(before))


def test_one_node_has_nobody_to_exchange_with() -> None:
    block = alone()
    before = block._cells.clone()
    block.halo()
    assert torch.equal(block._cells, before)


def steps_of(block: GridBlock, kind: str) -> torch.Tensor:
    for _ in range(STEPS):
        KINDS[kind](block)
    return block._cells[1:-1, 1:-1, 1:-1]


def boxes(halo: int) -> list[tuple[slice, ...]]:
    """Where each node's block lies in the whole grid, with so much around it."""
    at = itertools.product(*(range(n) for n in dims(NODES)))
    return [tuple(slice(n * e, (n + 1) * e + 2 * halo) for n, e in zip(place, EDGES, strict=True)) for place in at]


def run_part(folder: Path, rank: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=NODES)
    whole = torch.load(folder / "whole")
    for kind in KINDS:
        block = GridBlock(TimedGroup(distributed.group.WORLD, NODES, rank, torch.device("cpu"), QUICK), EDGES)
        block._cells.copy_(whole[boxes(1)[rank]])
        block._next.copy_(block._cells)
        torch.save(steps_of(block, kind), folder / f"{kind} {rank}")
    distributed.destroy_process_group()


def test_four_nodes_have_the_values_of_one_that_has_the_whole_grid(tmp_path: Path) -> None:
    cut = dims(NODES)
    assert cut == (2, 2, 1)
    edges = (cut[0] * EDGES[0], cut[1] * EDGES[1], cut[2] * EDGES[2])
    whole = GridBlock(TimedGroup(None, 1, 0, torch.device("cpu"), QUICK), edges)
    torch.save(whole._cells, tmp_path / "whole")
    begin = multiprocessing.get_context("spawn").Process
    parts = [begin(target=run_part, args=(tmp_path, rank), daemon=True) for rank in range(NODES)]
    for part in parts:
        part.start()
    for part in parts:
        part.join(60)
    assert [part.exitcode for part in parts] == [0] * NODES
    expected = steps_of(whole, "exchange first")
    for kind in KINDS:
        for rank, box in enumerate(boxes(0)):
            assert torch.equal(torch.load(tmp_path / f"{kind} {rank}"), expected[box]), (kind, rank)
