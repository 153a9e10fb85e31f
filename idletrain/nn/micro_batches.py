"""Decide how many samples of a step go through a network at a time: all of them, or micro-batches, whose gradients are
added up. It follows from the job and the subnets' width alone, not from a worker, and so do the bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from idletrain.errors import JobError, tried_code
from idletrain.nn.data import batches
from idletrain.nn.data.batches import call, fresh, map_parts, sample_count
from idletrain.nn.data.seeding import seeded
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.ist.modules import copied, in_training
from idletrain.nn.ist.shape_runs import run_for_shapes
from idletrain.nn.memory import subnet_need
from idletrain.nn.module_checks import batch_statistics
from idletrain.nn.program import Program
from idletrain.quantities import steady

# Of each weight in a micro-batch that a job does not ask for. With fewer, products of matrices are small, and a plan
# out of core is quicker: beside whole batches, MLPs took 1.2 to 1.5 times as long at 64 uses (widths of 512 and 1,536),
# 1.7 to 3 times at 16; a GPT 128 wide took 1.24 times at a sample of 128 tokens.
LEAST_USES = 64
# Of the norm of the batch's gradients: rounding is below it, and what compares samples with each other is far above.
ROUNDING = 1e-3
UNLIKE = "on a few samples, the gradients of micro-batches do not add up to the whole batch's"


class _MicroBatches(NamedTuple):
    """What goes through a module at a time.

    Attributes:
        size: Samples; None for all of a step's.
        summed: Whether the loss is a sum over samples, not a mean.
        notes: What a user should know of it.
    """

    size: int | None = None
    summed: bool = False
    notes: tuple[str, ...] = ()


def micro_batches(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> tuple[Program, tuple[str, ...]]:
    """Return the program with the size of its micro-batches, and notes on them for the user.

    They are those that the job asks for. If it says nothing, they are taken where `memory.budget` does not hold a step
    and their gradients add up to those of the whole batch.

    Args:
        program: The run's program.
        module: Its network, with values.
        pair: Inputs and target of a few samples.

    Raises:
        JobError: the job asks for micro-batches that cannot be.
    """
    taken = (_chosen if program.training.micro_batch is None else _asked_for)(program, module, pair)
    return replace(program, micro_batch=taken.size, summed=taken.summed), taken.notes


def _asked_for(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> _MicroBatches:
    """Return the micro-batches that the job asks for."""
    size = program.training.micro_batch
    assert size is not None
    if program.joined and isinstance(program.source.open(), StreamSource):
        raise JobError("training.micro_batch: a stream's batches cannot be parted that collate_fn joins; leave it out")
    if size == "auto":
        assert program.memory.budget  # checked with the job
        size = _fitting(program, program.memory.budget)
        if size is None:
            need = subnet_need(replace(program, micro_batch=1))(_mean_share(program))
            raise JobError(
                f"training.micro_batch: a subnet and one sample need {need >> 20} MiB, and memory.budget is "
                f"{program.memory.budget >> 20} MiB; use more training.subnets or a larger budget"
            )
    if size >= program.training.batch_size:
        return _MicroBatches()
    sums = None if program.joined else _sums(program, module, pair)
    if sums is not None or program.joined:
        return _MicroBatches(size, bool(sums))
    return _MicroBatches(size, notes=(f"training.micro_batch: {UNLIKE}; the job asks for them, so they are taken",))


def _chosen(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> _MicroBatches:
    """Return micro-batches that the job has not asked for, where they are needed and can be."""
    budget, whole = program.memory.budget, program.training.batch_size
    if budget is None or program.memory.out_of_core != "auto" or _fits(program, budget, whole):
        return _MicroBatches()
    sums, reason = None, _reason_against(program, module)
    if not reason:
        sums = _sums(program, module, pair)
        reason = UNLIKE if sums is None else ""
    if not reason:
        least = -(-LEAST_USES // max(1, int(_uses(program, pair))))
        size = _fitting(program, budget, least)
        if size is not None:
            note = f"training.micro_batch: {size}, as memory.budget does not hold a step; {whole} is all at once"
            return _MicroBatches(size, bool(sums), (note,))
        reason = f"it does not hold a step of {least} samples either, and fewer at a time are slow"
    return _MicroBatches(notes=(f"training.micro_batch: none, though memory.budget does not hold a step: {reason}",))


def _reason_against(program: Program, module: nn.Module) -> str:
    """Return why a batch cannot be parted, as far as that needs no trial; else ""."""
    if (norm := batch_statistics(module)) and not program.training.ghost_batches:
        return f"{norm} is a BatchNorm; training.ghost_batches: true lets it take the statistics of micro-batches"
    if program.output:
        return "a very wide output takes each batch as a whole"
    return "batches are joined of their samples" if program.joined else ""


# --- memory -----------------------------------------------------------------------------------------------------------


def _mean_share(program: Program) -> float:
    """Return the mean share of the widest phase's subnets."""
    shares = (phase.equal_shares[0] for phase in program.training.every_phase)
    return max(shares) if program.layout.groups else 1.0


def _fits(program: Program, budget: int, size: int) -> bool:
    """Return whether a budget holds a subnet of the mean share with so many samples at a time.

    The budget is rounded as that of workers, whose subnets would be narrower otherwise.
    """
    return subnet_need(replace(program, micro_batch=size))(_mean_share(program)) <= steady(budget)


def _fitting(program: Program, budget: int, least: int = 1) -> int | None:
    """Return the most samples that fit into a budget of bytes at a time, by halving a batch; None if `least` do not."""
    size = min(program.training.batch_size, len(program.source.open()))
    while not _fits(program, budget, size):
        if size <= least:
            return None
        size = max(least, -(-size // 2))
    return size


def _uses(program: Program, pair: tuple[Any, Any]) -> float:
    """Return how often a sample uses each weight: once in a dense layer, for each token or pixel in others."""
    inputs = map_parts(lambda part: part.to("meta"), pair[0])
    parameters = sum(parameter.numel() for parameter in program.module.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        try:
            run_for_shapes(program.module, inputs)
        except JobError:  # its forward looks at values
            return 1.0
    return float(counted.get_total_flops() / 2 / parameters / sample_count(*pair))


# --- a trial ----------------------------------------------------------------------------------------------------------


def _sums(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> bool | None:
    """Return whether gradients of parts of a batch add up to the whole's as those of a sum (True) or of a mean
    (False) over samples; None if they do not, or if it cannot be tried.
    """
    count = sample_count(*pair)
    parts = [batches.rows_of(pair, 0, count // 3 or 1), batches.rows_of(pair, count // 3 or 1, count)]
    if count < 2:
        return None
    try:
        with tried_code(), seeded(0):
            for trial in (_training, _evaluation):
                whole, random = _gradients(program, trial(module), pair)
                if not random:  # or else dropout would differ
                    break
            each = [_gradients(program, trial(module), part)[0] for part in parts]
    except JobError:
        return None
    counts = [program.label_count(*part) for part in parts]
    for sums, weights in ((False, [n / max(1, sum(counts)) for n in counts]), (True, [1.0, 1.0])):
        added = [
            sum((w * g for w, g in zip(weights, of_parts, strict=True) if w), start=torch.zeros(()))
            for of_parts in zip(*each, strict=True)
        ]
        if _alike(whole, added):
            return sums
    return None


def _training(module: nn.Module) -> nn.Module:
    """Return a copy in training mode; BatchNorm, which the job lets take other statistics, in evaluation mode."""
    result = in_training(copied(module))
    for layer in result.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return result


def _evaluation(module: nn.Module) -> nn.Module:
    return copied(module).eval()


def _gradients(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> tuple[list[Tensor], bool]:
    """Return the loss of a batch and its gradients, and whether random numbers were drawn."""
    before = torch.get_rng_state()
    loss = program.training_loss(call(module, fresh(pair[0])), pair[1])
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in module.parameters()]
    return [loss.detach(), *gradients], not torch.equal(before, torch.get_rng_state())


def _alike(whole: list[Tensor], added: list[Tensor]) -> bool:
    """Return whether losses and gradients differ by no more than rounding."""
    loss, *gradients = whole
    difference = sum(float((a - b).square().sum()) for a, b in zip(gradients, added[1:], strict=True))
    norm = sum(float(a.square().sum()) for a in gradients)
    same_loss = torch.allclose(loss, added[0], rtol=ROUNDING, atol=1e-6)
    return same_loss and difference <= ROUNDING**2 * norm
