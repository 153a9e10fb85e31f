"""Data parallel steps by a plan: the bits of plain data parallel, and parameters that move before the pass is over."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.executing.phases import update_in_phases
from outofcore.networks import Case

RANKS, STEPS, LR = 2, 3, 0.05
BUCKET_MB = 0.1  # several to this network


def rank_of(rank: int, folder: str, told: Any) -> None:
    """One rank: plain DDP and its optimizer, then DDP by a plan with updates in phases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    case = Case("mlp")
    x, y = case.x.chunk(RANKS)[rank], case.y.chunk(RANKS)[rank]

    def loss(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y)

    plain = DistributedDataParallel(copy.deepcopy(case.module), bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(plain(x)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    module, pieces = case.fresh()
    phased = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MB)
    moved: list[nn.Parameter] = []

    def move(parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.add_(gradient, alpha=-LR)
        moved.append(parameter)

    update_in_phases(phased, move)
    first = next(module.parameters())
    early: list[int] = []
    stepped = 0

    def wait(_gradient: Tensor) -> None:
        """Behind what is exchanged in other threads, before the first layer's own gradient is there."""
        if not stepped:  # DDP cuts its buckets when it has seen one backward pass
            return
        deadline = time.monotonic() + 30
        while not moved and time.monotonic() < deadline:
            time.sleep(0.001)
        early.append(len(moved))

    first.register_hook(wait)
    swap = DiskSwap(Path(folder), 64 << 20)
    executor = Executor(module, pieces, case.footprint("S" * (len(case.units) - 1) + "K"), swap)
    for stepped in range(STEPS):  # noqa: B007 (read above)
        moved.clear()
        phased.zero_grad()
        with executor.step():
            loss(phased(x)).backward()  # type: ignore[no-untyped-call]
    executor.close()
    swap.close()
    same = [torch.equal(a, b) for a, b in zip(phased.parameters(), plain.parameters(), strict=True)]
    told.put((rank, same, early, len(moved), executor.swapped_bytes))
    dist.destroy_process_group()


def test_phases_have_the_bits_of_plain_data_parallel_and_begin_before_the_pass_is_over(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    ranks = [context.Process(target=rank_of, args=(rank, str(tmp_path), told), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for _ in ranks:
        _, same, early, moved, swapped = told.get()
        assert all(same)
        assert moved == len(same)
        assert len(early) == STEPS - 1
        assert all(0 < count < moved for count in early)  # before the first layer's gradient was there
        assert swapped > 0
