"""Data-parallel steps: arithmetic alone, the exchange of the same buckets alone, and both as torch's DDP does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from idletrain.fabric.analysis import statistics
from idletrain.fabric.analysis.samples import TrainingSample
from idletrain.fabric.measuring import models
from idletrain.fabric.measuring.presets import TimedModel
from idletrain.fabric.measuring.timed_group import TimedGroup
from idletrain.nn.outofcore.executing.resident import ResidentPeak, give_back_pages
from idletrain.worker.memory_limits import available_bytes

# Of a network's bytes, what a step takes: values, gradients (in DDP's buckets), an update's scratch, the buckets that
# are exchanged alone.
TRAINING_COPIES = 4
FIRST_STEPS = 2  # DDP lays its buckets out anew after the first, by the order in which gradients came
LEARNING_RATE = 1e-4


def measure_training(
    ranks: TimedGroup,
    backend: str,
    wanted: TimedModel,
    sharing: int,
    exchange_seconds: Callable[[int], float],
    alone: Sequence[TrainingSample] = (),
) -> tuple[list[TrainingSample], list[str]]:
    """A network's samples for each batch size, and what is missing.

    Args:
        company: Who takes part.
        backend: Its name.
        wanted: The network and its batch sizes.
        sharing: How many of them share this machine's memory.
        exchange_seconds: How long an all-reduce of so many bytes is expected to take.
        alone: What one node measured, if it is this one: arithmetic is the same on many.
    """
    size = sum(4 * p.numel() for p in models.on_meta(wanted.name).parameters())
    if not ranks.all_can(TRAINING_COPIES * size * sharing < available_bytes()):
        return [], [
            f"{wanted.name} on {ranks.nodes} nodes: there is too little memory for {TRAINING_COPIES} times {size} bytes"
        ]
    (expected,) = ranks.slowest([exchange_seconds(size)])
    longest = 3 * ranks.preset.step_seconds
    if ranks.nodes > 1 and expected * (ranks.preset.repeats[0] + FIRST_STEPS) > longest:
        how = f"steps of {wanted.name} on {ranks.nodes} nodes are computed by one node's arithmetic, not measured"
        why = f"exchanges of {size / 1e6:.0f} MB take longer than this preset's time"
        return [replace(one, nodes=ranks.nodes) for one in alone if one.model == wanted.name], [f"{how}: {why}"]
    found: list[TrainingSample] = []
    missing: list[str] = []
    sample_bytes = 0.0  # of a sample's activations, as far as is known
    for batch_size in wanted.batch_sizes:
        if found and statistics.median(found[-1].compute) * ranks.preset.repeats[0] > longest:
            missing.append(f"{wanted.name}, batch {batch_size} and more: steps take longer than this preset's time")
            break
        needed = TRAINING_COPIES * size + batch_size * sample_bytes
        if not ranks.all_can(needed * sharing < available_bytes()):
            missing.append(f"{wanted.name}, batch {batch_size} and more: needs {needed / 1e9:.1f} GB on each node")
            break
        module = models.materialized(models.on_meta(wanted.name), ranks.device)
        x, y = (part.to(ranks.device) for part in models.batch(wanted.name, batch_size, ranks.preset.image))
        give_back_pages()  # what earlier steps left would hide what these take
        peak = ResidentPeak()
        compute = ranks.samples(_stepper(module, x, y), ranks.preset.step_seconds, least_once=True)
        sample_bytes = max(0, peak.bytes - size) / batch_size  # beside gradients
        one = TrainingSample(backend, wanted.name, ranks.nodes, batch_size, size, (), tuple(compute))
        found.append(_exchanged(ranks, module, one, x, y) if ranks.nodes > 1 else one)
    return found, missing


def _exchanged(
    ranks: TimedGroup, module: nn.Module, one: TrainingSample, x: torch.Tensor, y: torch.Tensor
) -> TrainingSample:
    """The same with its exchange alone, and its DDP steps."""
    sizes: list[int] = []
    for parameter in module.parameters():
        parameter.grad = None  # those of DDP lie in its buckets
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    parallel = DistributedDataParallel(
        module,
        device_ids=ids,
        process_group=ranks.group,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,  # all have the same values
    )
    # DDP wants no other annotations than its own, so none.
    parallel.register_comm_hook(ranks.group, lambda group, bucket: _noted(sizes, group, bucket))
    step = _stepper(parallel, x, y)
    for _ in range(FIRST_STEPS):
        sizes.clear()
        step()
    buckets = tuple(sizes)
    steps = ranks.samples(step, ranks.preset.step_seconds, least_once=True, warm=True)
    for parameter in module.parameters():
        parameter.grad = None
    del parallel, step
    alone = ranks.samples(_exchange(ranks, buckets), ranks.preset.step_seconds, least_once=True)
    return TrainingSample(
        one.backend,
        one.model,
        one.nodes,
        one.batch_size,
        one.gradient_bytes,
        tuple(4 * bucket for bucket in buckets),
        one.compute,
        tuple(alone),
        tuple(steps),
    )


def _noted(sizes: list[int], group: Any, bucket: Any) -> Any:
    """What DDP does with a bucket by itself; its values are counted."""
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(group, bucket)


def _stepper(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One step of SGD on the same batch."""
    parameters = list(module.parameters())

    def step() -> None:
        outputs = module(x)
        loss: Any = functional.cross_entropy(outputs.flatten(0, -2), y.flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                    parameter.grad.zero_()

    return step


def _exchange(ranks: TimedGroup, buckets: Sequence[int]) -> Callable[[], None]:
    """All-reduces of buckets, all on their way at once, as DDP sends them."""
    tensors = [torch.zeros(bucket, device=ranks.device) for bucket in buckets]

    def exchange() -> None:
        going = [distributed.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors]
        for work in going:
            work.wait()

    return exchange
