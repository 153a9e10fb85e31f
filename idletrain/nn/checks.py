"""Check a module, data and a loss by trying each on a few samples.

Every function raises a JobError that names the job's field and says what to change.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError, user_code
from idletrain.nn.data.arrays import ArraySource, ArrayTree, Samples, Source
from idletrain.nn.data.batches import (
    LABEL_NAMES,
    call,
    described,
    fields_of,
    fresh,
    labels_of,
    named_parts,
    prediction,
    sample_count,
    tensors_of,
    uneven,
)
from idletrain.nn.data.csr import Rows
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.data.graphs import is_graph
from idletrain.nn.data.seeding import seeded
from idletrain.nn.data.tables import SparseTable
from idletrain.nn.ist.modules import copied, in_training
from idletrain.nn.lightning import Stepping
from idletrain.nn.program import IGNORED_LABEL, LOSSES, Loss, bce_with_logits, cross_entropy, mse

SCAN_ROWS = 4096  # rows of arrays checked at a time: 12 MB of Fashion-MNIST as floats
TRIAL_SAMPLES = 8  # to compare a network with its subnets on: enough for a batch's statistics
FEW_SAMPLES = 2  # for a large network that takes no such statistics
LARGE = 10_000_000  # parameters
READ_SEED = 0
SCAN_ITEMS = 256  # items of a Dataset that are checked: a second, at 4 ms to decode an image


def open_samples(source: Source, field: str) -> Samples:
    """Open a source and check that its samples are numbers."""
    with user_code(f"{field}: cannot be read (", "); give a pair of arrays or a map-style Dataset"):
        samples = source.open()
    if isinstance(samples, ArraySource):
        for name, array in (("inputs", samples.x), ("labels", samples.y)):
            if array.dtype.kind not in "fiub":
                raise JobError(f"{field}: its {name} are {array.dtype}; they should be numbers")
    return samples


def first_samples(samples: Samples, batch_size: int, field: str) -> tuple[Any, Any]:
    """Return inputs and target of two samples, or of one if a batch holds no more.

    Where items are joined, the model and the loss tell whether parts of a batch fit.
    """
    pair = _read(samples, np.arange(min(2, batch_size, len(samples))), field)
    if are_joined(samples, pair[0]):
        return pair
    if fault := uneven(pair[0]):
        raise JobError(f"{field}: of its inputs, {fault}; there should be as many of each")
    if pair[1] is not pair[0] and (fault := uneven({"inputs": pair[0], "labels": pair[1]})):
        raise JobError(f"{field}: of a batch, {fault}; there should be as many of both, in the first dimension")
    return pair


def are_joined(samples: Any, inputs: Any) -> bool:
    """Return whether parts of a batch may have other numbers of rows: graphs, or what the user's `collate_fn` makes."""
    return is_graph(inputs) or is_collated(samples)


def is_collated(samples: Any) -> bool:
    """Return whether batches are made by the user's own `collate_fn`."""
    return getattr(getattr(samples, "samples", samples), "collate", None) is not None


def trial_size(module: nn.Module) -> int:
    """Return on how many samples a network is compared with its subnets."""
    is_large = sum(parameter.numel() for parameter in module.parameters()) > LARGE
    has_statistics = any(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in module.modules())
    return FEW_SAMPLES if is_large and not has_statistics else TRIAL_SAMPLES


def trial_pair(samples: Samples, field: str, module: nn.Module) -> tuple[Any, Any]:
    """Return inputs and target of a few samples, to compare a network with its subnets on."""
    return _read(samples, np.arange(min(trial_size(module), len(samples))), field)


def check_finite(samples: Samples, field: str) -> None:
    """Check that inputs and labels are finite; sparse rows are checked when they are converted."""
    if isinstance(samples, SparseSamples):
        return
    for rows, inputs, target in _scan(samples, field):
        of_target = () if target is inputs else named_parts(target)
        for whole, parts in (("inputs", named_parts(inputs)), ("labels", of_target)):
            for name, part in parts:
                if isinstance(part, Rows):
                    continue
                array = np.asarray(part)
                if array.dtype.kind == "f" and not (is_finite := _finite_as_float32(array)).all():
                    held = f"{whole} {name}" if name else whole
                    first = int(np.argwhere(~is_finite)[0][0])
                    row = rows[min(first, len(rows) - 1)]  # of one item, also where it has several rows
                    too_large = "" if not np.isfinite(array).all() else ", as float32,"
                    raise JobError(f"{field}: its {held} hold NaN or infinity{too_large} in row {row}; clean the data")


def _finite_as_float32(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are finite in the type that networks take."""
    is_wide = array.dtype.itemsize > np.dtype(np.float32).itemsize
    is_finite: NDArray[np.bool_] = np.abs(array) <= np.finfo(np.float32).max if is_wide else np.isfinite(array)
    return is_finite


def check_labels(samples: Samples, outputs: Any, field: str) -> None:
    """Check that labels are classes of outputs `[B, ..., C]`, or torch's ignored label.

    Label sets are skipped: `check_sizes` checks their largest label.
    """
    if isinstance(samples, SparseSamples):
        return
    classes = prediction(outputs).shape[-1]
    lowest, highest = math.inf, -math.inf
    for _, _, target in _scan(samples, field):
        labels = np.asarray(labels_of(target))
        counted = labels[labels != IGNORED_LABEL]
        if counted.size:
            lowest, highest = min(lowest, counted.min()), max(highest, counted.max())
    if lowest < 0 or highest >= classes:
        wrong = int(lowest if lowest < 0 else highest)
        shift = lowest > 0 and highest - lowest < classes
        remedy = f"; they begin at {int(lowest)}: subtract {int(lowest)} from each" if shift else ""
        raise JobError(f"{field}: label {wrong} is beyond the model's {classes} outputs, 0 to {classes - 1}{remedy}")


def _scan(samples: Samples, field: str) -> Iterator[tuple[range, Any, Any]]:
    """Yield blocks of all rows of arrays, or SCAN_ITEMS items across a Dataset: rows, inputs, target."""
    if isinstance(samples, ArraySource | ArrayTree | SparseTable):
        for start in range(0, len(samples), SCAN_ROWS):
            rows = range(start, min(start + SCAN_ROWS, len(samples)))
            part = slice(rows.start, rows.stop)
            if isinstance(samples, ArraySource):
                yield rows, samples.x[part], samples.y[part]
            elif isinstance(samples, SparseTable):  # whose inputs were checked when they were given
                yield rows, (), samples.y[part]
            else:
                yield rows, *_read(samples, np.arange(rows.start, rows.stop), field)
        return
    for item in np.unique(np.linspace(0, len(samples) - 1, SCAN_ITEMS).astype(np.int64)):
        yield range(item, item + 1), *_read(samples, np.array([item]), field)


def _read(samples: Samples, index: NDArray[np.int64], field: str) -> tuple[Any, Any]:
    collated = is_collated(samples)
    remedy = "); each item should be a pair (input, label), a tuple that ends in the label, or a dict, of one shape"
    if collated:
        remedy = f"); collate_fn should return a row for each of any number of items, here {len(index)}"
    # What is found on samples should not depend on random numbers.
    with user_code(f"{field}: its samples cannot be read (", remedy), seeded(READ_SEED):
        return samples.batch(index)


# --- model and loss ---------------------------------------------------------------------------------------------------


def check_sizes(module: nn.Module, samples: Samples, field: str) -> None:
    """Check that the model has an input for every feature and an output for every label of sparse rows."""
    if not isinstance(samples, SparseSamples):
        return
    wide = very_wide(module)
    bags: list[Any] = [layer for layer in module.modules() if getattr(layer, "sparse_input", False)]
    sizes = [("features", samples.census.features, len(bag.weight)) for bag in bags]
    if wide:
        output: Any = module.get_submodule(wide)
        sizes.append(("labels", samples.census.labels, len(output.weight)))
    faults = [
        f"{field}: has {count} {name} and the model {size}; set model.args.{name}: {count}"
        for name, count, size in sizes
        if count > size
    ]
    if faults:
        raise JobError(faults)


def check_label_lookup(samples: Samples) -> None:
    """Check that the rows with a given label can be looked up, as a partition of the labels needs."""
    if not isinstance(samples, SparseSamples) and not (isinstance(samples, ArraySource) and samples.y.ndim == 1):
        raise JobError(
            "model: partitions the labels, which needs sparse rows, or arrays with one label a row; exclude that group"
        )


def very_wide(module: nn.Module) -> str | None:
    """Return the name of the network's `SparseLinear`, if it has one."""
    named = module.named_modules()
    return next((name for name, layer in named if getattr(layer, "very_wide", False)), None)


def first_outputs(module: nn.Module, samples: Samples, pair: tuple[Any, Any], field: str) -> Any:
    """Return the module's outputs for the first samples; where it computes its loss, wrong labels are told as such."""
    try:
        return outputs_of(module, pair, field)
    except JobError:
        labels, named = labels_of(pair[1]), fields_of(pair[0]) or {}
        bare = {name: part for name, part in named.items() if name not in LABEL_NAMES}
        if isinstance(labels, Tensor) and 0 < len(bare) < len(named):
            outputs = None
            with contextlib.suppress(JobError):  # the first reason is the one to tell
                outputs = outputs_of(module, (bare, bare), field)
            if outputs is not None and prediction(outputs).shape[:-1] == labels.shape:
                check_labels(samples, outputs, field)
        raise


def outputs_of(module: nn.Module, pair: tuple[Any, Any], field: str) -> Any:
    """Return the module's outputs for a few samples: in training mode for training data, else in evaluation mode."""
    shape = described(pair[0], first=1)
    training = field == "data.train"
    fault = f"model: does not take inputs of shape {shape}" if training else f"{field}: the model does not take {shape}"
    wide = very_wide(module) is not None  # not copied: it may take gigabytes, and its tables minutes to build
    looks_up = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules())
    is_whole = not looks_up and all(part.dtype == torch.int64 for part in tensors_of(pair[0]))
    remedy = "; they are whole numbers: give floats, such as x.float(), to layers that take those" if is_whole else ""
    steps = isinstance(module, Stepping)
    if steps:
        fault, remedy = "model", "; correct it (no Trainer runs: leave out self.trainer)"
    with user_code(f"{fault}: ", remedy), torch.enable_grad():  # whatever the caller's mode, as on workers
        tried = module if wide else copied(module)
        tried = in_training(tried) if training and not wide else tried.eval()
        outputs = call(tried, fresh(pair[0]))
    tensors = tensors_of(outputs)
    if not tensors and not wide:
        raise JobError(
            f"model: its forward returns a {type(outputs).__name__}; it should return a tensor, or a tuple, dict or "
            "dataclass of tensors"
        )
    if tensors and training and not any(tensor.requires_grad for tensor in tensors):
        raise JobError("model: its outputs have no gradient; leave out detach() and torch.no_grad() in its forward")
    return outputs


def check_loss(loss: Loss, name: str, outputs: Any, pair: tuple[Any, Any]) -> None:
    """Check that the loss returns one number, with a gradient, for outputs and labels."""
    if isinstance(loss, type):
        raise JobError(f"training.loss: {loss.__name__} is a class; give an instance, {loss.__name__}()")
    name = next((known for known, built_in in LOSSES.items() if built_in is loss), name)
    logits, labels = prediction(outputs), labels_of(pair[1])
    kind = f" of {labels.dtype}" if hasattr(labels, "dtype") else ""
    target = f"labels {described(labels)}{kind}" if labels is not None else f"a batch {described(pair[1])}"
    odd = uneven(pair[0]) if pair[1] is pair[0] else uneven({"inputs": pair[0], "labels": pair[1]})
    given = f"outputs {described(outputs)} and {target}" + (f" (of the batch, {odd})" if odd else "")
    fault = f"training.loss: {name} does not fit {given}: "
    if labels is None and loss in (cross_entropy, bce_with_logits, mse):
        raise JobError(f"{fault}call its labels `labels`, or use a function (outputs, batch) -> scalar")
    alike = (mse, functional.mse_loss, bce_with_logits, functional.binary_cross_entropy_with_logits)
    if loss in alike and getattr(labels, "shape", None) != logits.shape:  # torch would broadcast, or say less
        raise JobError(f"{fault}they should have one shape{_same_shape(logits, labels)}")
    if loss is cross_entropy and (wrong := _wrong_classes(logits, labels)):
        raise JobError(fault + wrong)
    is_class = isinstance(labels, Tensor) and labels.dtype == torch.int64
    if loss is cross_entropy and is_class and not _within(labels, logits.shape[-1]):
        return  # `check_labels` says which, and by how much they are to be shifted
    with user_code(fault), torch.enable_grad():
        value = loss(outputs, pair[1])
    if not isinstance(value, Tensor):
        raise JobError(f"training.loss: {name} should return a tensor of one number for {given}")
    if value.numel() != 1 or (value.ndim and sample_count(*pair) == 1):  # of one sample, a loss each looks like one
        shape = list(value.shape)
        raise JobError(f"training.loss: {name} returns {shape} for {given}; return one number, such as its mean()")
    if not value.requires_grad and any(tensor.requires_grad for tensor in tensors_of(outputs)):
        raise JobError(
            f"training.loss: {name} returns a number without a gradient; leave out detach() and torch.no_grad() in it"
        )


def _same_shape(outputs: Any, labels: Any) -> str:
    """Return what gives outputs and labels one shape, where they differ by a last dimension of 1; or ""."""
    shape, other = getattr(outputs, "shape", None), getattr(labels, "shape", None)
    if shape is None or other is None:
        return ""
    if shape == (*other, 1):
        return "; give labels[:, None] as labels, or return outputs.squeeze(-1)"
    return "; give labels.squeeze(-1)" if other == (*shape, 1) else ""


def _wrong_classes(logits: Tensor, labels: Any) -> str:
    """Return why labels are not the classes that logits `[..., C]` are of, with what to do; or ""."""
    shape = getattr(labels, "shape", None)
    is_float = isinstance(labels, Tensor) and labels.is_floating_point()
    if is_float and logits.shape[-1] == 1:
        return "it is for classes; for regression name mse"
    if shape == logits.shape[:-1]:
        return "" if labels.dtype == torch.int64 else "the number of a class is a whole number: give labels.long()"
    if logits.ndim > 2 and shape == (*logits.shape[:1], *logits.shape[2:]):
        return "it takes classes last; for classes second, use torch.nn.functional.cross_entropy"
    remedy = ""
    if shape == (*logits.shape[:-1], 1):
        remedy = "; give labels[..., 0]"
    elif shape == logits.shape:
        remedy = "; or name mse, if they are numbers, or bce_with_logits, if a sample may have several of these labels"
    return f"labels should be {list(logits.shape[:-1])}, the number of a class each{remedy}"


def _within(labels: Tensor, classes: int) -> bool:
    """Return whether all labels are the numbers of classes, or torch's ignored label."""
    counted = labels[labels != IGNORED_LABEL]
    return bool(((counted >= 0) & (counted < classes)).all())
