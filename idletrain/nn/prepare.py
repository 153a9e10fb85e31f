"""From a job's words to a program, a network's first values and test data.

Everything a user can get wrong about a model, data or a loss is found here, before anything starts.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.job import DataSettings, ModelSettings, TrainingSettings
from idletrain.nn import discover, groups, remote
from idletrain.nn.data import Arrays, Files, Made, Samples, Source, digits, fashion_mnist
from idletrain.nn.groups import Layout
from idletrain.nn.partition import widths
from idletrain.nn.program import LOSSES, Loss, Program, cross_entropy
from idletrain.nn.remote import Remote

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's ignore_index
SCAN_ROWS = 4096  # rows of data checked for NaN at a time: 12 MB of Fashion-MNIST as floats


@dataclass(frozen=True)
class Prepared:
    """A program with the network's first values and the test data: what the head holds."""

    program: Program
    network: tuple[Tensor, ...]
    module: nn.Module
    test: Source | None


def resolve(path: str, field: str) -> Any:
    """Import `package.module:attribute`.

    Raises:
        JobError: there is no such module or attribute, or importing it fails.
    """
    module, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise JobError(f"{field}: {path!r} cannot be imported ({error}); write it as package.module:name") from None


def from_settings(model: ModelSettings, data: DataSettings, training: TrainingSettings) -> Prepared:
    """Build what a job file describes.

    Raises:
        JobError: with every fault that can be found.
    """
    torch.manual_seed(training.seed)
    module, (train, test), loss = _gather_faults(
        lambda: _module(model), lambda: _sources(data), lambda: named_loss(training.loss)
    )
    return prepare(module, train, test, loss, training, exclude=model.exclude, table=model.groups)


def prepare(
    module: nn.Module,
    train: Source,
    test: Source | None,
    loss: Loss,
    training: TrainingSettings,
    *,
    exclude: Sequence[str] = (),
    table: Mapping[str, Sequence[str | None]] | None = None,
) -> Prepared:
    """Check that module, data and loss fit together, and find the neuron groups.

    Raises:
        JobError: with every fault that can be found.
    """
    odd = [f"{name} is {p.dtype}" for name, p in module.named_parameters() if p.dtype != torch.float32]
    if odd:
        raise JobError(f"model: parameters should be float32, but {', '.join(odd)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise JobError("model: has no parameter that requires a gradient; there is nothing to train")
    samples, tests = _gather_faults(lambda: _checked(train, "data.train"), lambda: test and _checked(test, "data.test"))
    classes = _check_fit(module, samples, loss, training)
    if loss is cross_entropy:
        _gather_faults(
            *(
                lambda s=s, field=field: _check_labels(s, field, classes)
                for s, field in ((samples, "data.train"), (tests, "data.test"))
            )
        )
    meta = groups.without_statistics(groups.to_meta(module))
    layout = _layout(meta, samples, training, exclude, table)
    program = Program(meta, layout, train, loss, training)
    return Prepared(program, tuple(p.detach() for p in module.parameters()), module, test)


def named_loss(name: str) -> Loss:
    """A loss by its short name or as `package.module:function`.

    Raises:
        JobError: there is no such loss.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name and "." not in name:
        raise JobError(f"training.loss: {name!r} should be one of {', '.join(LOSSES)} or package.module:function")
    loss: Loss = resolve(name, "training.loss")
    return loss


def _gather_faults(*steps: Callable[[], Any]) -> list[Any]:
    """Run independent checks and raise all their faults as one."""
    results: list[Any] = []
    faults: list[str] = []
    for step in steps:
        try:
            results.append(step())
        except JobError as error:
            faults.extend(error.faults)
    if faults:
        raise JobError(faults)
    return results


def _module(model: ModelSettings) -> nn.Module:
    factory = resolve(model.factory, "model.factory")
    try:
        module = factory(**model.args)
    except (TypeError, ValueError, RuntimeError) as error:
        raise JobError(f"model.args: {model.factory} does not take {model.args}: {error}") from None
    if not isinstance(module, nn.Module):
        raise JobError(f"model.factory: {model.factory!r} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def _sources(data: DataSettings) -> tuple[Source, Source | None]:
    chosen = [f for f in ("name", "train", "factory") if getattr(data, f) is not None]
    if len(chosen) != 1:
        raise JobError(f"data: has {' and '.join(chosen) or 'neither'}; give one of name, train (with test) or factory")
    if data.name == "digits":
        return Made(digits, 0), Made(digits, 1)
    if data.name == "fashion-mnist":
        return fashion_mnist(data.path)
    if data.factory is not None:
        factory = resolve(data.factory, "data.factory")
        return Made(factory, 0, data.args), Made(factory, 1, data.args)
    assert data.train is not None
    return _files(data.train, "data.train"), _files(data.test, "data.test") if data.test else None


def _files(where: str | tuple[str, str], field: str) -> Files:
    if isinstance(where, tuple):
        return Files(_pinned(where[0], field), _pinned(where[1], field), field=field)
    if not where.endswith(".npz"):
        raise JobError(f"{field}: {where!r} should be an .npz file, or a pair [inputs, labels] of .npy or IDX files")
    both = _pinned(where, field)
    return Files(both, both, field=field)


def _pinned(where: str, field: str) -> str | Remote:
    return remote.find(where, field) if where.startswith(remote.SCHEME) else where


def _checked(source: Source, field: str) -> Samples:
    samples = source.open()
    if isinstance(samples, Arrays):
        for name, array in (("inputs", samples.x), ("labels", samples.y)):
            if array.dtype.kind not in "fiub":
                raise JobError(f"{field}: its {name} are {array.dtype}; they should be numbers")
            for start in range(0, len(array) if array.dtype.kind == "f" else 0, SCAN_ROWS):
                if not np.isfinite(array[start : start + SCAN_ROWS]).all():
                    raise JobError(f"{field}: its {name} hold NaN or infinity after row {start}; clean the data")
    return samples


def _check_fit(module: nn.Module, samples: Samples, loss: Loss, training: TrainingSettings) -> int:
    """Try two samples: the widths must chain and the loss must fit the labels; returns the last layer's width."""
    inputs, labels = samples.batch(np.arange(min(2, training.batch_size, len(samples))))
    loss_name = training.loss
    probe = copy.deepcopy(module).train()
    try:
        outputs = probe(inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise JobError(f"model: does not take inputs of shape {list(inputs.shape[1:])}: {reason}") from None
    expected = f"outputs {list(outputs.shape)} and labels {list(labels.shape)} of {labels.dtype}"
    if loss is functional.mse_loss and outputs.shape != labels.shape:  # torch would warn, and broadcast
        raise JobError(f"training.loss: {loss_name} does not fit {expected}: they should have one shape")
    try:
        value = loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise JobError(f"training.loss: {loss_name} does not fit {expected}: {reason}") from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise JobError(f"training.loss: {loss_name} should return one number for {expected}")
    return int(outputs.shape[-1]) if outputs.ndim else 1


def _check_labels(samples: Samples | None, field: str, classes: int) -> None:
    """Labels must be numbers of outputs, or what torch's cross entropy leaves out."""
    if isinstance(samples, Arrays):
        odd = samples.y[((samples.y < 0) & (samples.y != IGNORED_LABEL)) | (samples.y >= classes)]
        if len(odd):
            raise JobError(f"{field}: label {int(odd[0])} is beyond the model's {classes} outputs, 0 to {classes - 1}")


def _layout(
    meta: nn.Module,
    samples: Samples,
    training: TrainingSettings,
    exclude: Sequence[str],
    table: Mapping[str, Sequence[str | None]] | None,
) -> Layout:
    if training.method == "local-sgd":
        return groups.whole(meta)
    sample = samples.batch(np.arange(min(2, len(samples))))[0].to("meta")
    layout = groups.by_hand(meta, table) if table else discover.find(meta, sample, exclude)
    for group in layout.groups:
        try:
            widths(group.size, [1 / training.subnets] * training.subnets)
        except ValueError:
            raise JobError(
                f"training.subnets: {training.subnets} is more than the {group.size} neurons of group {group.name}; "
                f"ask for at most {group.size} or exclude the group"
            ) from None
    return layout
