"""Check a module, data and a loss, and the cuts of the module, by trying each on a few samples.

Every function raises a JobError that names the job's field and says what to change.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError, user_code
from idletrain.job import MemorySettings, TrainingSettings
from idletrain.nn.data.arrays import Array, ArraySource, Samples, Source
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.ist import discovery, groups
from idletrain.nn.ist.groups import Layout, run_on_meta, weightless
from idletrain.nn.ist.partition import draw, widths
from idletrain.nn.ist.scaling import reason_to_keep_whole, with_scaling
from idletrain.nn.ist.scaling_trial import Subject
from idletrain.nn.ist.subnets import cut
from idletrain.nn.local_steps import assemble
from idletrain.nn.optim.table import kind_of
from idletrain.nn.program import IGNORED_LABEL, Loss, cross_entropy

SCAN_ROWS = 4096  # rows of arrays checked at a time: 12 MB of Fashion-MNIST as floats
TRIAL_SAMPLES = 8  # to compare a network with its subnets on: enough for a batch's statistics
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
    """Return inputs `[B, ...]` and labels `[B, ...]` of two samples, or of one if a batch holds no more."""
    return _read(samples, np.arange(min(2, batch_size, len(samples))), field)


def check_finite(samples: Samples, field: str) -> None:
    """Check that inputs and labels are finite; sparse rows are checked when they are converted."""
    if isinstance(samples, SparseSamples):
        return
    for row, *parts in _scan(samples, field):
        for name, part in zip(("inputs", "labels"), parts, strict=True):
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                raise JobError(f"{field}: its {name} hold NaN or infinity after row {row}; clean the data")


def check_labels(samples: Samples, outputs: Any, field: str) -> None:
    """Check that labels are classes of outputs `[B, ..., C]`, or torch's ignored label.

    Label sets are skipped: `check_sizes` checks their largest label.
    """
    if isinstance(samples, SparseSamples):
        return
    classes = outputs.shape[-1]
    for _, _, labels in _scan(samples, field):
        wrong = labels[((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= classes)]
        if len(wrong):
            raise JobError(
                f"{field}: label {int(wrong[0])} is beyond the model's {classes} outputs, 0 to {classes - 1}"
            )


def _scan(samples: Samples, field: str) -> Iterator[tuple[int, Array, Array]]:
    """Yield blocks of all rows of arrays, or SCAN_ITEMS items across a Dataset: first row, inputs, labels."""
    if isinstance(samples, ArraySource):
        for row in range(0, len(samples), SCAN_ROWS):
            yield row, samples.x[row : row + SCAN_ROWS], samples.y[row : row + SCAN_ROWS]
        return
    for item in np.unique(np.linspace(0, len(samples) - 1, SCAN_ITEMS).astype(np.int64)):
        inputs, labels = _read(samples, np.array([item]), field)
        yield int(item), inputs.numpy(), labels.numpy()


def _read(samples: Samples, index: NDArray[np.int64], field: str) -> tuple[Any, Any]:
    with user_code(f"{field}: its samples cannot be read (", "); each should be a pair (input, label) of one shape"):
        return samples.batch(index)


# --- model and loss ---------------------------------------------------------------------------------------------------


def check_parameters(module: nn.Module) -> nn.Module:
    """Check that parameters are float32 and at least one is trainable; return the module."""
    wrong = [f"{name} is {p.dtype}" for name, p in module.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise JobError(f"model: parameters should be float32, but {', '.join(wrong)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise JobError("model: has no parameter that requires a gradient; there is nothing to train")
    return module


def check_sizes(module: nn.Module, samples: Samples, field: str) -> None:
    """Check that the model has an input for every feature and an output for every label of sparse rows."""
    if not isinstance(samples, SparseSamples):
        return
    wide = _very_wide(module)
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


def _very_wide(module: nn.Module) -> str | None:
    """Return the name of the network's `SparseLinear`, if it has one."""
    named = module.named_modules()
    return next((name for name, layer in named if getattr(layer, "very_wide", False)), None)


def outputs_of(module: nn.Module, pair: tuple[Any, Any], field: str) -> Any:
    """Return the module's outputs for a few samples: in training mode for training data, else in evaluation mode."""
    shape = list(pair[0].shape[1:])
    training = field == "data.train"
    fault = f"model: does not take inputs of shape {shape}" if training else f"{field}: the model does not take {shape}"
    wide = _very_wide(module) is not None  # not copied: it may take gigabytes, and its tables minutes to build
    with user_code(f"{fault}: "):
        outputs = (module.eval() if wide else copy.deepcopy(module).train(training))(pair[0])
    if not isinstance(outputs, Tensor) and not wide:
        raise JobError(f"model: its forward returns a {type(outputs).__name__}; it should return one tensor")
    return outputs


def check_loss(loss: Loss, name: str, outputs: Any, pair: tuple[Any, Any]) -> None:
    """Check that the loss returns one number for outputs and labels."""
    labels = pair[1]
    given = f"outputs {list(outputs.shape)} and labels {list(labels.shape)} of {labels.dtype}"
    fault = f"training.loss: {name} does not fit {given}: "
    if loss is functional.mse_loss and outputs.shape != labels.shape:  # torch would warn, and broadcast
        raise JobError(f"{fault}they should have one shape")
    if loss is cross_entropy and outputs.shape[:-1] != labels.shape:
        raise JobError(f"{fault}labels should be {list(outputs.shape[:-1])}, the number of a class each")
    with user_code(fault):
        value = loss(outputs, labels)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise JobError(f"training.loss: {name} should return one number for {given}")


# --- cuts -------------------------------------------------------------------------------------------------------------


class CutSettings(NamedTuple):
    """A job's settings for a network's groups.

    Attributes:
        exclude: Names of groups to keep whole.
        table: All groups written by hand (see `groups.by_hand`), or None to find them.
        fixed: Names of groups whose partition is drawn once for all rounds.
    """

    exclude: Sequence[str] = ()
    table: Mapping[str, Sequence[str | None]] | None = None
    fixed: Sequence[str] = ()


def trial_inputs(samples: Samples, field: str) -> Any:
    """Return the inputs `[B, ...]` of a few samples, to compare a network with its subnets on."""
    return _read(samples, np.arange(min(TRIAL_SAMPLES, len(samples))), field)[0]


def cuts_of(
    module: nn.Module, inputs: Any, training: TrainingSettings, requested: CutSettings
) -> tuple[nn.Module, Layout]:
    """Return the module on the meta device and the layout of its cuts, tried on a few samples' inputs `[B, ...]`."""
    meta = groups.without_statistics(groups.to_meta(module))
    dense = isinstance(inputs, Tensor)
    sample = torch.empty((2, *inputs.shape[1:]), dtype=inputs.dtype, device="meta") if dense else inputs.to("meta")
    with torch.no_grad():
        expected = _shape(run_on_meta(weightless(meta), sample))
    if training.method == "local-sgd":
        return meta, groups.whole(meta)
    parameters = [parameter.detach() for parameter in module.parameters()]
    subject = Subject(meta, parameters, inputs)
    layout = _layout(module, meta, sample, requested, functools.partial(reason_to_keep_whole, subject))
    layout = _fix(layout, requested.fixed)
    outputs = _label_groups(meta, layout)
    if outputs:
        layout = replace(layout, common="same" if training.mode == "lockstep" else "sum")
    for group in layout.groups:
        try:
            widths(group.size, [1 / training.subnets] * training.subnets)
        except ValueError:
            raise JobError(
                f"training.subnets: {training.subnets} is more than the {group.size} neurons of group {group.name}; "
                f"use at most {group.size} or exclude the group"
            ) from None
    _check_subnets(meta, layout, sample, expected, training)
    layout = with_scaling(replace(subject, outputs=outputs), layout)
    if not layout.groups:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in layout.kept_whole)
        raise JobError(f"model: has nothing to split ({reasons}); use training.method: local-sgd or another model")
    return meta, layout


def _shape(outputs: Any) -> torch.Size:
    """Return the shape of outputs, of a very wide output without its labels, of which a subnet may hold a share."""
    shape: torch.Size = outputs.shape
    return shape if isinstance(outputs, Tensor) else shape[:-1]


def _layout(
    module: nn.Module, meta: nn.Module, sample: Any, requested: CutSettings, refuse: Callable[[Layout], str]
) -> Layout:
    """Return the layout that the job or the module declares, or find it."""
    table = requested.table or _own_groups(module, requested.exclude)
    if table:
        return groups.by_hand(meta, table)
    if _very_wide(meta) is not None:
        raise JobError(
            "model.groups: a network that ends in SparseLinear needs its groups by hand, such as "
            "{output.weight: [labels, hidden], output.bias: [labels]}"
        )
    return discovery.find_groups(meta, sample, requested.exclude, refuse)


def _label_groups(meta: nn.Module, layout: Layout) -> frozenset[str]:
    """Return the names of the groups whose neurons are a very wide output's labels."""
    weight = f"{_very_wide(meta)}.weight"
    labels = [t.neurons[0] for t in layout.tensors if t.name == weight and t.neurons[0] is not None]
    starts = groups.offsets(layout.sizes)
    return frozenset(
        group.name
        for group, start in zip(layout.groups, starts, strict=True)
        if any(((n >= start) & (n < start + group.size)).any() for n in labels)
    )


def _own_groups(module: nn.Module, exclude: Sequence[str]) -> dict[str, tuple[str | None, ...]] | None:
    """Return the groups in a module's `neuron_groups` without the excluded ones; None without that attribute."""
    declared: Mapping[str, Sequence[str | None]] | None = getattr(module, "neuron_groups", None)
    if declared is None:
        return None
    names = {name for name, _ in module.named_parameters()}
    known = list(dict.fromkeys(group for entries in declared.values() for group in entries if group))
    if unknown := set(exclude) - set(known):
        raise JobError(f"model.exclude: {', '.join(sorted(unknown))} is not a group; found are {', '.join(known)}")
    if not set(known) - set(exclude):
        raise JobError("model.exclude: names every group; leave one, or use training.method: local-sgd")
    return {
        name: tuple(None if group in exclude else group for group in entries)
        for name, entries in declared.items()
        if name in names
    }


def _fix(layout: Layout, fixed: Sequence[str]) -> Layout:
    """Return the layout with some groups' partitions fixed for all rounds."""
    known = [group.name for group in layout.groups]
    if unknown := set(fixed) - set(known):
        raise JobError(f"model.fixed: {', '.join(sorted(unknown))} is not a group; found are {', '.join(known)}")
    return replace(layout, groups=tuple(replace(group, fixed=group.name in fixed) for group in layout.groups))


def _check_subnets(
    meta: nn.Module, layout: Layout, sample: Any, expected: torch.Size, training: TrainingSettings
) -> None:
    """Check that subnets of equal shares run, of every width among them, with outputs of the network's shape."""
    shares = [1 / training.subnets] * training.subnets
    subnets = [cut(layout, members) for members in draw(training.seed, 0, layout.sizes, shares)]
    for subnet in {subnet.shapes: subnet for subnet in subnets}.values():
        small = weightless(assemble(meta, subnet, torch.empty(subnet.parameters, device="meta")))
        advice = "); name every dimension that the group's neurons index, and no other"
        with user_code("model.groups: a subnet does not run (", advice), torch.no_grad(), torch.device("meta"):
            outputs = small(sample)
            if scores := getattr(
                outputs, "dense", None
            ):  # a very wide output, which computes no score before it is called
                scores()
            shape = _shape(outputs)
        if shape != expected:
            raise JobError(
                f"model.groups: a subnet's outputs for two samples are {list(shape)}, the network's {list(expected)}; "
                "leave what indexes the outputs whole"
            )


def check_wide(
    cuts: tuple[nn.Module, Layout], samples: Samples, training: TrainingSettings, memory: MemorySettings
) -> str | None:
    """Check that the settings suit sparse rows and very wide outputs; return the name of such an output, or None."""
    module, layout = cuts
    if training.mode == "lockstep" and (layout.common != "same" or len(layout.groups) > 1):
        raise JobError(
            "training.mode: lockstep is for networks that end in SparseLinear, with its labels as their only group; "
            "exclude the other groups, or use rounds"
        )
    wide = _very_wide(module)
    if training.exchange.coded and wide:
        raise JobError("training.exchange: rows of a very wide output travel as fp32; leave it out")
    if training.exchange.coded and memory.out_of_core == "always":
        raise JobError("training.exchange: parts of a subnet out of core travel as fp32; leave one of the two out")
    if not isinstance(samples, SparseSamples) and wide is None:
        return None
    if refusal := kind_of(training.optimizer).refuse_rows(training.optimizer):
        raise JobError(refusal)
    if memory.out_of_core == "always":
        raise JobError("memory.out_of_core: always is for dense layers; leave it out, labels are sharded to fit")
    if layout.common == "sum":
        check_label_lookup(samples)
    if wide:
        layer: Any = module.get_submodule(wide)
        layer.check_tables(math.ceil(len(layer.weight) / (training.subnets if _label_groups(module, layout) else 1)))
    return wide
