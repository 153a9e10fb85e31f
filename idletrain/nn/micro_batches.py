"""Decide how many samples of a step go through a network at a time: all of them, or micro-batches, whose gradients are
added up. It follows from the job and the subnets' width alone, not from a worker, and so do the bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.flop_counter import FlopCounterMode

from idletrain.errors import JobError, tried_code
from idletrain.nn.data import batches
from idletrain.nn.data.batches import call, fresh, labels_of, map_parts, sample_count
from idletrain.nn.data.seeding import seeded
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.ist.modules import copied, in_training
from idletrain.nn.ist.shape_runs import run_for_shapes
from idletrain.nn.memory import subnet_need
from idletrain.nn.module_checks import batch_statistics
from idletrain.nn.program import Program, cross_entropy, model_loss
from idletrain.quantities import steady

# Of each weight in a micro-batch that a job does not ask for. With fewer, products of matrices are small, and a plan
# out of core is quicker: beside whole batches, MLPs took 1.2 to 1.5 times as long at 64 uses (widths of 512 and 1,536),
# 1.7 to 3 times at 16; a GPT 128 wide took 1.24 times at a sample of 128 tokens.
LEAST_USES = 64
ROUNDING = 1e-4  # of a loss and the norm of its gradients; float32 rounds sums of few samples to a hundredth of it
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
    sums = None if program.joined else _try_parts(program, module, pair).sums
    if sums is not None or program.joined:
        return _MicroBatches(size, bool(sums))
    return _MicroBatches(size, notes=(f"training.micro_batch: {UNLIKE}; the job asks for them, so they are taken",))


def _chosen(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> _MicroBatches:
    """Return micro-batches that the job has not asked for, where they are needed and can be."""
    budget, whole = program.memory.budget, program.training.batch_size
    if budget is None or program.memory.out_of_core != "auto" or _fits(program, budget, whole):
        return _MicroBatches()
    trial, reason = _Trial(), _reason_against(program, module, pair)
    if not reason:
        trial = _try_parts(program, module, pair)
        reason = "the network draws random numbers beside dropout layers" if trial.random else ""
        reason = reason or (UNLIKE if trial.sums is None else "")
    if not reason:
        least = -(-LEAST_USES // max(1, int(_uses(program, pair))))
        size = _fitting(program, budget, least)
        if size is not None:
            note = f"training.micro_batch: {size}, as memory.budget does not hold a step; {whole} is all at once"
            return _MicroBatches(size, bool(trial.sums), (note,))
        few = f"it does not hold a step of {least} samples either, and fewer at a time are slow"
        reason = few if least > 1 else "it does not hold one sample either"
    return _MicroBatches(notes=(f"training.micro_batch: none, though memory.budget does not hold a step: {reason}",))


def _reason_against(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> str:
    """Return why a batch cannot be parted, as far as that needs no trial; else ""."""
    if (norm := batch_statistics(module)) and not program.training.ghost_batches:
        return f"{norm} is a BatchNorm; training.ghost_batches: true lets it take the statistics of micro-batches"
    if program.output:
        return "a very wide output takes each batch as a whole"
    labels, known = labels_of(pair[1]), (cross_entropy, model_loss, functional.cross_entropy)
    if program.loss not in known and isinstance(labels, Tensor) and labels.dtype == torch.int64:
        return "a loss of your own may ignore some labels; training.micro_batch: auto takes them where it does not"
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


class _Trial(NamedTuple):
    """What a few samples say of micro-batches.

    Attributes:
        sums: Whether gradients of parts add up as those of a sum over samples (True) or of a mean (False); None if they
            do not, or if it cannot be tried.
        random: Whether numbers were drawn beside dropout layers, so that nothing is known of training mode.
    """

    sums: bool | None = None
    random: bool = False


def _try_parts(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> _Trial:
    """Try whether the gradients of two parts of a batch add up to the whole's, without dropout.

    BatchNorm, which the job may let take other statistics, is in evaluation mode. Where training mode draws random
    numbers, all of the module is: that tells a mean from a sum, and no more.
    """
    if sample_count(*pair) < 2:
        return _Trial()
    try:
        with tried_code(), seeded(0):
            sums, random = _add_up(program, _without_dropout(module), pair)
            if random:
                sums, _ = _add_up(program, copied(module).eval(), pair)
    except JobError:
        return _Trial()
    return _Trial(sums, random)


def _without_dropout(module: nn.Module) -> nn.Module:
    """Return a copy in training mode, with dropout and BatchNorm layers in evaluation mode."""
    result = in_training(copied(module))
    for layer in result.modules():
        if isinstance(layer, _DropoutNd | _BatchNorm):
            layer.eval()
    return result


def _add_up(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> tuple[bool | None, bool]:
    """Return `_Trial`'s figures of one module, on which the gradients are left."""
    count = sample_count(*pair)
    parts = [batches.rows_of(pair, 0, count // 3 or 1), batches.rows_of(pair, count // 3 or 1, count)]
    before = torch.get_rng_state()
    whole = _add_gradients(program, module, pair, 1.0)
    random = not torch.equal(before, torch.get_rng_state())
    norm = _norm(module)
    with torch.no_grad():
        losses = [_loss(program, module, part) for part in parts]
    counts = [program.label_count(*part) for part in parts]
    shares = [n / max(1, sum(counts)) for n in counts]
    for sums, weights in ((False, shares), (True, [1.0, 1.0])):
        added = sum(w * float(loss) for w, loss in zip(weights, losses, strict=True) if w)
        if math.isclose(added, whole, rel_tol=ROUNDING, abs_tol=1e-6):
            for part, weight in zip(parts, weights, strict=True):
                if weight:
                    _add_gradients(program, module, part, -weight)
            return (sums if _norm(module) <= ROUNDING * norm else None), random
    return None, random


def _loss(program: Program, module: nn.Module, pair: tuple[Any, Any]) -> Tensor:
    return program.training_loss(call(module, fresh(pair[0])), pair[1])


def _add_gradients(program: Program, module: nn.Module, pair: tuple[Any, Any], weight: float) -> float:
    """Add a batch's gradients, times a weight, to the module's; return its loss."""
    loss = _loss(program, module, pair)
    (weight * loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _norm(module: nn.Module) -> float:
    """Return the norm of the module's gradients."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return math.sqrt(sum(float(gradient.to_dense().float().square().sum()) for gradient in gradients))
