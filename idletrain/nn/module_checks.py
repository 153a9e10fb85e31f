"""Check what a module is made of, and find the buffers that training changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from idletrain.errors import JobError, user_code
from idletrain.job import TrainingSettings
from idletrain.nn import travel
from idletrain.nn.buffer_trial import observe
from idletrain.nn.buffers import BufferKind, Observed, kinds_of, of_torch_norms
from idletrain.nn.checks import first_samples, open_samples, very_wide
from idletrain.nn.data.arrays import Source
from idletrain.nn.data.batches import call, described, fresh
from idletrain.nn.ist.modules import copied, in_training
from idletrain.nn.ist.randomness import key
from idletrain.nn.precision import HALF, Forward, Precision, in_float32
from idletrain.nn.program import Loss, Program, cross_entropy

ORIGINAL = "_orig_mod"  # of what torch.compile returns for a module
IN_CORE_NOTE = "memory.compile: does nothing here, as this network is trained in core or in micro-batches"
COMPILED_NOTE = "model: it is trained without torch.compile; to have workers compile it, set training.compile to true"


def materialized(module: nn.Module, source: Source, training: TrainingSettings) -> nn.Module:
    """Return the module, or a copy whose lazy layers have got their sizes from a few samples."""
    if not any(
        isinstance(t, UninitializedParameter | UninitializedBuffer) for t in (*module.parameters(), *module.buffers())
    ):
        return module
    inputs, _ = first_samples(open_samples(source, "data.train"), training.batch_size, "data.train")
    result = copied(module).eval()  # lazy BatchNorm would count these samples
    fault = f"model: its lazy layers cannot take their sizes from inputs of shape {described(inputs, first=1)}: "
    with user_code(fault), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(training.seed, "lazy") % 2**63)
        call(result, inputs)
    _take_modes(result, module)
    return result


def _take_modes(to: nn.Module, of: nn.Module) -> None:
    """Put each layer of a copy into the mode of the module's."""
    modes = {name: layer.training for name, layer in of.named_modules()}
    for name, layer in to.named_modules():
        layer.training = modes[name]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what a DataParallel holds; another module as it is."""
    wraps = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    held: nn.Module = module.module if wraps else module  # type: ignore[assignment]
    return held


def check_layers(module: nn.Module) -> nn.Module:
    """Check that the module can be copied; return it."""
    if very_wide(module) is None:  # which may take gigabytes
        with travel.naming({"model": module}, _copied, "be copied"):
            _copied(module)
    return module


def _copied(part: Any) -> Any:
    if not isinstance(part, nn.Module):
        return copy.deepcopy(part)
    return copied(part, {id(p): p for p in part.parameters() if type(p) is nn.Parameter})  # which can be copied


def check_parameters(module: nn.Module) -> nn.Module:
    """Check that parameters are floats of 32 or 16 bits and at least one trains; return the module, in float32."""
    known = (torch.float32, *HALF)
    wrong = [f"{name} is {p.dtype}" for name, p in module.named_parameters() if p.dtype not in known]
    if wrong:
        raise JobError(
            f"model: parameters should be float32, bfloat16 or float16, but {', '.join(wrong)}; give it .float()"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise JobError("model: has no parameter that requires a gradient; there is nothing to train")
    return in_float32(module)


def check_computing(
    module: nn.Module, pair: tuple[Any, Any], loss: Loss, training: TrainingSettings, precision: Precision
) -> None:
    """Try steps in bfloat16, and compiled, on a few samples, if that is how they are to compute."""
    inputs, target = pair
    if precision == "bfloat16":
        with user_code("training.precision: the model does not compute in bfloat16 (", "); leave it out"):
            _step(Forward(in_training(copied(module)), precision), inputs, target, loss)
    if training.compile:
        with user_code("training.compile: the model cannot be compiled (", "); leave it out"):
            _step(Forward(in_training(copied(module)), precision, compiled=True), inputs, target, loss)


def _step(forward: Forward, inputs: Any, target: Any, loss: Loss) -> None:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of its own code
        torch.autograd.backward(loss(forward(fresh(inputs)), target))


def settled(module: nn.Module, pair: tuple[Any, Any], loss: Loss) -> tuple[nn.Module, list[Observed]]:
    """Return the module and what training changes in it beside parameters, found by a few steps on a few samples.

    Of a module whose buffers take their shapes from the first inputs, as tables of relative positions do, it is a copy
    that has seen some.
    """
    wide = very_wide(module) is not None
    observed = observe(module, *pair, loss, wide=wide)
    if wide or not any(one.reshaped for one in observed):
        return module, observed
    result = copied(module).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        call(result, fresh(pair[0]))
    _take_modes(result, module)
    return result, observe(result, *pair, loss, wide=wide)


def buffer_kinds(module: nn.Module, observed: Sequence[Observed], training: TrainingSettings) -> dict[str, BufferKind]:
    """Return how each buffer that training changes goes from round to round."""
    return kinds_of(
        observed, [name for name, _ in module.named_buffers() if name not in of_torch_norms(module)], training
    )


def check_steps(module: nn.Module, loss: Loss, training: TrainingSettings) -> None:
    """Check that the job's settings of a step suit the module and the loss.

    Raises:
        JobError: with each that does not.
    """
    faults = []
    if training.label_smoothing and loss is not cross_entropy:
        faults.append("training.label_smoothing: is for loss: cross_entropy alone; leave it out")
    if isinstance(size := training.micro_batch, int) and size > training.batch_size:
        faults.append(f"training.micro_batch: {size} is more than batch_size: {training.batch_size}; leave it out")
    if training.micro_batch and (norm := batch_statistics(module)) and not training.ghost_batches:
        faults.append(
            f"training.micro_batch: {norm} is a BatchNorm, whose statistics would be those of a micro-batch; "
            "leave it out, use GroupNorm, or accept that by training.ghost_batches: true"
        )
    by_rows = [name or "it" for name, layer in module.named_modules() if getattr(layer, "sparse", False) is True]
    if (by_rows or very_wide(module)) and training.optimizer.clip_norm:
        faults.append(
            f"training.optimizer.clip_norm: the gradients of {(by_rows or [very_wide(module)])[0]} are row-sparse and "
            "are not clipped; leave it out"
        )
    if very_wide(module) and training.micro_batch:
        faults.append("training.micro_batch: a very wide output takes each batch as a whole; leave it out")
    if faults:
        raise JobError(faults)


def batch_statistics(module: nn.Module) -> str | None:
    """Return the name of the first BatchNorm that a user has not frozen by `eval()` in a module in training mode."""
    return next(
        (
            name or "it"
            for name, layer in module.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or not module.training)
        ),
        None,
    )


def uncompiled(module: nn.Module) -> nn.Module:
    """Return a module without what `torch.compile` has made of it or of layers within: one that is read and cut.

    Where a worker is to compile it, the job says so (`training.compile`).
    """
    module = getattr(module, ORIGINAL, module)
    if not any(hasattr(layer, ORIGINAL) for layer in module.modules()):
        return module
    result = copied(module)
    for layer in list(result.modules()):
        for name, child in list(layer.named_children()):
            setattr(layer, name, getattr(child, ORIGINAL, child))
    return result


def notes_of_compiling(program: Program, *, compiled: bool) -> list[str]:
    """Return what a user should know of torch.compile.

    Args:
        program: The run's program.
        compiled: Whether the user has compiled the module, of which nothing is left.
    """
    in_core = program.memory.compile == "auto" and not program.compiled_on
    return [COMPILED_NOTE] * compiled + [IN_CORE_NOTE] * in_core
