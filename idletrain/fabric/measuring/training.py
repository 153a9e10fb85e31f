"""Time data-parallel steps: computation alone, all-reduce of the same buckets alone, and both in torch's DDP."""

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

# Memory of a step, in times the network's bytes: parameters, gradients (in DDP's buckets), scratch of the update, and
# the buckets that are exchanged alone.
TRAINING_COPIES = 4
FIRST_STEPS = 2  # after its first step DDP rebuilds its buckets in the order in which gradients became ready
LEARNING_RATE = 1e-4


def measure_training(
    ranks: TimedGroup,
    backend: str,
    wanted: TimedModel,
    sharing: int,
    exchange_seconds: Callable[[int], float],
    alone: Sequence[TrainingSample] = (),
) -> tuple[list[TrainingSample], list[str]]:
    """Time a network's steps at each batch size; return the samples, and a sentence for each one left out.

    Args:
        ranks: The nodes that take part.
        backend: Its name in the results.
        wanted: The network and its batch sizes.
        sharing: How many of the nodes share this machine's memory.
        exchange_seconds: Expected seconds of an all-reduce, by its bytes.
        alone: Samples of one node, on the node that took them: the computation is the same on many nodes.
    """
    size = sum(4 * p.numel() for p in models.on_meta(wanted.name).parameters())
    if not ranks.all_true(TRAINING_COPIES * size * sharing < available_bytes()):
        return [], [
            f"{wanted.name} on {ranks.nodes} nodes: there is too little memory for {TRAINING_COPIES} times {size} bytes"
        ]
    (expected,) = ranks.slowest([exchange_seconds(size)])
    longest = 3 * ranks.preset.step_seconds
    if ranks.nodes > 1 and expected * (ranks.preset.repeats[0] + FIRST_STEPS) > longest:
        how = f"steps of {wanted.name} on {ranks.nodes} nodes are computed from one node's times, not measured"
        why = f"exchanges of {size / 1e6:.0f} MB take longer than this preset allows"
        return [replace(sample, nodes=ranks.nodes) for sample in alone if sample.model == wanted.name], [
            f"{how}: {why}"
        ]
    samples: list[TrainingSample] = []
    missing: list[str] = []
    sample_bytes = 0.0  # activations of one training sample, measured at the batch size before
    for batch_size in wanted.batch_sizes:
        larger = f"{wanted.name}, batch {batch_size} and more on {ranks.where}"
        if samples and statistics.median(samples[-1].compute) * ranks.preset.repeats[0] > longest:
            missing.append(f"{larger}: steps take longer than this preset allows")
            break
        needed = TRAINING_COPIES * size + batch_size * sample_bytes
        if not ranks.all_true(needed * sharing < available_bytes()):
            missing.append(f"{larger}: needs {needed / 1e9:.1f} GB on each node")
            break
        module = models.materialized(models.on_meta(wanted.name), ranks.device)
        x, y = (part.to(ranks.device) for part in models.batch(wanted.name, batch_size, ranks.preset.image))
        give_back_pages()  # pages that earlier steps freed would hide the memory of these
        peak = ResidentPeak()
        compute = ranks.samples(_stepper(module, x, y), ranks.preset.step_seconds, least_once=True)
        sample_bytes = max(0, peak.bytes - size) / batch_size  # without the gradients
        sample = TrainingSample(backend, wanted.name, ranks.nodes, batch_size, size, (), tuple(compute))
        samples.append(_with_exchange(ranks, module, sample, x, y) if ranks.nodes > 1 else sample)
    return samples, missing


def _with_exchange(
    ranks: TimedGroup, module: nn.Module, sample: TrainingSample, x: torch.Tensor, y: torch.Tensor
) -> TrainingSample:
    """Add times of the exchange alone and of DDP steps to a sample of the computation."""
    sizes: list[int] = []
    for parameter in module.parameters():
        parameter.grad = None  # DDP keeps gradients in its buckets
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    parallel = DistributedDataParallel(
        module,
        device_ids=ids,
        process_group=ranks.group,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,  # all nodes have the same values
    )
    # DDP refuses a hook with other annotations than its own, so the lambda has none.
    parallel.register_comm_hook(ranks.group, lambda group, bucket: _counted_all_reduce(sizes, group, bucket))
    step = _stepper(parallel, x, y)
    for _ in range(FIRST_STEPS):
        sizes.clear()
        step()
    buckets = tuple(sizes)
    steps = ranks.samples(step, ranks.preset.step_seconds, least_once=True, warm=True)
    for parameter in module.parameters():
        parameter.grad = None
    del parallel, step
    exchange = ranks.samples(_exchange(ranks, buckets), ranks.preset.step_seconds, least_once=True)
    return TrainingSample(
        sample.backend,
        sample.model,
        sample.nodes,
        sample.batch_size,
        sample.gradient_bytes,
        tuple(4 * bucket for bucket in buckets),
        sample.compute,
        tuple(exchange),
        tuple(steps),
    )


def _counted_all_reduce(sizes: list[int], group: Any, bucket: Any) -> Any:
    """All-reduce a bucket as DDP does by default, and append its number of values to `sizes`."""
    sizes.append(bucket.buffer().numel())
    return allreduce_hook(group, bucket)


def _stepper(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a function that takes one SGD step on the same batch."""
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
    """Return a function that all-reduces buckets of these numbers of values, all in flight at once as in DDP."""
    tensors = [torch.zeros(bucket, device=ranks.device) for bucket in buckets]

    def exchange() -> None:
        in_flight = [distributed.all_reduce(tensor, group=ranks.group, async_op=True) for tensor in tensors]
        for work in in_flight:
            work.wait()

    return exchange
