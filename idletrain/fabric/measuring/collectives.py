"""Collective operations of torch.distributed, of all sizes, until one takes too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from idletrain.fabric.analysis.samples import Collective
from idletrain.fabric.analysis.statistics import median
from idletrain.fabric.measuring.presets import OPERATIONS
from idletrain.fabric.measuring.timed_group import Company
from idletrain.worker.memory_limits import available_bytes

VALUE_BYTES = 4
CROSSINGS = 2  # of an operation's bytes over every link, at most
COPIES = 3  # of an operation's bytes, that its buffers and the backend's take


def measure(
    company: Company, backend: str, sharing: int, bytes_per_second: float
) -> tuple[list[Collective], list[str]]:
    """Every operation's samples, and what is missing.

    Args:
        company: Who takes part.
        backend: Its name.
        sharing: How many of them share this machine's memory.
        bytes_per_second: Of the links, by which what would take too long is not begun.
    """
    found: list[Collective] = []
    missing: list[str] = []
    for operation in OPERATIONS:
        last = 0.0
        for size in company.preset.sizes:
            count = max(1, size // VALUE_BYTES // company.nodes) * company.nodes
            before = found[-1].moved_bytes if found and found[-1].operation == operation else size
            expected = last + CROSSINGS * (size - before) / bytes_per_second
            too_slow = expected * company.preset.repeats[0] > 3 * company.preset.operation_seconds
            roomy = company.all_can(COPIES * size * sharing < available_bytes())
            if too_slow or not roomy:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(roomy=roomy)}")
                break
            try:
                seconds = company.samples(_work(company, operation, count), company.preset.operation_seconds)
            except RuntimeError as error:
                missing.append(f"{operation} over {backend}: {str(error).splitlines()[0]}")
                break
            if not seconds:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(roomy=True)}")
                break
            found.append(Collective(backend, operation, company.nodes, VALUE_BYTES * count, tuple(seconds)))
            last = median(seconds)
    return found, missing


def _why(*, roomy: bool) -> str:
    return "it takes longer than this preset's time" if roomy else "there is too little memory"


def _work(company: Company, operation: str, count: int) -> Callable[[], Any]:
    """One operation of so many values, all counted together where they are scattered or gathered."""
    whole = torch.zeros(count, device=company.device)  # sums of others would grow and grow
    part = torch.zeros(count // company.nodes, device=company.device)
    match operation:
        case "all-reduce":
            return lambda: distributed.all_reduce(whole, group=company.group)
        case "all-gather":
            return lambda: distributed.all_gather_into_tensor(whole, part, group=company.group)
        case "reduce-scatter":
            return lambda: distributed.reduce_scatter_tensor(part, whole, group=company.group)
        case _:
            return lambda: distributed.broadcast(whole, 0, group=company.group)
