"""Time the collective operations of torch.distributed at growing sizes, until one takes too long."""

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

VALUE_BYTES = 4  # float32
CROSSINGS = 2  # at most so many times an operation's bytes cross every link
COLLECTIVE_COPIES = 3  # memory for an operation, in times its bytes: its own buffers and the backend's


def measure_collectives(
    ranks: TimedGroup, backend: str, sharing: int, bytes_per_second: float
) -> tuple[list[CollectiveSample], list[str]]:
    """Time every operation at every size of the preset; return the samples, and a sentence for each size left out.

    Args:
        ranks: The nodes that take part.
        backend: Its name in the results.
        sharing: How many of the nodes share this machine's memory.
        bytes_per_second: Speed of the links; an operation that would take too long at it is not started.
    """
    samples: list[CollectiveSample] = []
    missing: list[str] = []
    for operation in OPERATIONS:
        last = 0.0
        for size in ranks.preset.sizes:
            count = max(1, size // VALUE_BYTES // ranks.nodes) * ranks.nodes
            before = samples[-1].moved_bytes if samples and samples[-1].operation == operation else size
            expected = last + CROSSINGS * (size - before) / bytes_per_second
            too_slow = expected * ranks.preset.repeats[0] > 3 * ranks.preset.operation_seconds
            fits = ranks.all_true(COLLECTIVE_COPIES * size * sharing < available_bytes())
            if too_slow or not fits:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(fits=fits)}")
                break
            try:
                seconds = ranks.samples(_work(ranks, operation, count), ranks.preset.operation_seconds)
            except RuntimeError as error:
                missing.append(f"{operation} over {backend}: {str(error).splitlines()[0]}")
                break
            if not seconds:
                missing.append(f"{operation} over {backend} beyond {before / 1e6:g} MB: {_why(fits=True)}")
                break
            samples.append(CollectiveSample(backend, operation, ranks.nodes, VALUE_BYTES * count, tuple(seconds)))
            last = median(seconds)
    return samples, missing


def _why(*, fits: bool) -> str:
    return "it takes longer than this preset allows" if fits else "there is too little memory"


def _work(ranks: TimedGroup, operation: str, count: int) -> Callable[[], Any]:
    """Return a function that runs one operation; `count` values is the whole buffer, scattered or gathered."""
    whole = torch.zeros(count, device=ranks.device)  # repeated sums of other values would overflow
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
