"""Collective operations of torch.distributed, of all sizes, until one takes too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from idletrain.fabric.analysis.samples import CollectiveSample
from idletrain.fabric.analysis.statistics import median
from idletrain.fabric.measuring.presets import OPERATIONS
from idletrain.fabric.measuring.timed_group import TimedGroup
from idletrain.worker.memory_limits import available_bytes

VALUE_BYTES = 4
CROSSINGS = 2  # of an operation's bytes over every link, at most
COLLECTIVE_COPIES = 3  # of an operation's bytes, that its buffers and the backend's take


def measure_collectives(
    ranks: TimedGroup, backend: str, sharing: int, bytes_per_second: float
) -> tuple[list[CollectiveSample], list[str]]:
    """Every operation's samples, and what is missing.

    Args:
        company: Who takes part.
        backend: Its name.
        sharing: How many of them share this machine's memory.
        bytes_per_second: Of the links, by which what would take too long is not begun.
    """
    found: list[CollectiveSample] = []
    missing: list[str] = []
    for operation in OPERATIONS:
        last = 0.0
        for size in ranks.preset.sizes:
            count = max(1, size // VALUE_BYTES // ranks.nodes) * ranks.nodes
            before = found[-1].moved_bytes if found and found[-1].operation == operation else size
            expected = last + CROSSINGS * (size - before) / bytes_per_second
            too_slow = expected * ranks.preset.repeats[0] > 3 * ranks.preset.operation_seconds
            roomy = ranks.all_can(COLLECTIVE_COPIES * size * sharing < available_bytes())
            if too_slow or not roomy:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(roomy=roomy)}")
                break
            try:
                seconds = ranks.samples(_work(ranks, operation, count), ranks.preset.operation_seconds)
            except RuntimeError as error:
                missing.append(f"{operation} over {backend}: {str(error).splitlines()[0]}")
                break
            if not seconds:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(roomy=True)}")
                break
            found.append(CollectiveSample(backend, operation, ranks.nodes, VALUE_BYTES * count, tuple(seconds)))
            last = median(seconds)
    return found, missing


def _why(*, roomy: bool) -> str:
    return "it takes longer than this preset's time" if roomy else "there is too little memory"


def _work(ranks: TimedGroup, operation: str, count: int) -> Callable[[], Any]:
    """One operation of so many values, all counted together where they are scattered or gathered."""
    whole = torch.zeros(count, device=ranks.device)  # sums of others would grow and grow
    part = torch.zeros(count // ranks.nodes, device=ranks.device)
    match operation:
        case "all-reduce":
            return lambda: distributed.all_reduce(whole, group=ranks.group)
        case "all-gather":
            return lambda: distributed.all_gather_into_tensor(whole, part, group=ranks.group)
        case "reduce-scatter":
            return lambda: distributed.reduce_scatter_tensor(part, whole, group=ranks.group)
        case _:
            return lambda: distributed.broadcast(whole, 0, group=ranks.group)
