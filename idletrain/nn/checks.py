"""What can be wrong with a module, data and a loss, and with the cuts of one: each is tried, none is started.

Every function raises a JobError whose sentence names the field.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError, user_code
from idletrain.job import TrainingSettings
from idletrain.nn import discover, groups
from idletrain.nn.data import Array, Arrays, Samples, Source
from idletrain.nn.groups import Layout, run_on_meta, weightless
from idletrain.nn.local_steps import assemble
from idletrain.nn.partition import draw, widths
from idletrain.nn.program import IGNORED_LABEL, Loss, cross_entropy
from idletrain.nn.subnets import cut

SCAN_ROWS = 4096  # rows of arrays looked at together: 12 MB of Fashion-MNIST as floats
SCAN_ITEMS = 256  # items of a Dataset that are looked at: a second, at 4 ms to decode an image


def open_samples(source: Source, field: str) -> Samples:
    """The samples of a source, which must be numbers."""
    with user_code(f"{field}: cannot be read (", "); give a pair of arrays or a map-style Dataset"):
        samples = source.open()
    if isinstance(samples, Arrays):
        for name, array in (("inputs", samples.x), ("labels", samples.y)):
            if array.dtype.kind not in "fiub":
                raise JobError(f"{field}: its {name} are {array.dtype}; they should be numbers")
    return samples


def first_samples(samples: Samples, batch_size: int, field: str) -> tuple[Tensor, Tensor]:
    """Inputs `[B, ...]` and labels `[B, ...]` of two samples, or of one where a batch holds no more."""
    return _read(samples, np.arange(min(2, batch_size, len(samples))), field)


def check_finite(samples: Samples, field: str) -> None:
    """Neither inputs nor labels may hold NaN or infinity."""
    for row, *parts in _scan(samples, field):
        for name, part in zip(("inputs", "labels"), parts, strict=True):
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                raise JobError(f"{field}: its {name} hold NaN or infinity after row {row}; clean the data")


def check_labels(samples: Samples, outputs: Tensor, field: str) -> None:
    """Classes must be numbers of outputs `[B, ..., C]`, or what torch's cross entropy leaves out."""
    classes = outputs.shape[-1]
    for _, _, labels in _scan(samples, field):
        odd = labels[((labels < 0) & (labels != IGNORED_LABEL)) | (labels >= classes)]
        if len(odd):
            raise JobError(f"{field}: label {int(odd[0])} is beyond the model's {classes} outputs, 0 to {classes - 1}")


def _scan(samples: Samples, field: str) -> Iterator[tuple[int, Array, Array]]:
    """The first's number, inputs and labels of all rows of arrays, and of SCAN_ITEMS items across a Dataset."""
    if isinstance(samples, Arrays):
        for row in range(0, len(samples), SCAN_ROWS):
            yield row, samples.x[row : row + SCAN_ROWS], samples.y[row : row + SCAN_ROWS]
        return
    for item in np.unique(np.linspace(0, len(samples) - 1, SCAN_ITEMS).astype(np.int64)):
        inputs, labels = _read(samples, np.array([item]), field)
        yield int(item), inputs.numpy(), labels.numpy()


def _read(samples: Samples, index: NDArray[np.int64], field: str) -> tuple[Tensor, Tensor]:
    with user_code(f"{field}: its samples cannot be read (", "); each should be a pair (input, label) of one shape"):
        return samples.batch(index)


# --- model and loss ---------------------------------------------------------------------------------------------------


def check_parameters(module: nn.Module) -> nn.Module:
    """The module, whose parameters must be float32, and one at least trainable."""
    odd = [f"{name} is {p.dtype}" for name, p in module.named_parameters() if p.dtype != torch.float32]
    if odd:
        raise JobError(f"model: parameters should be float32, but {', '.join(odd)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise JobError("model: has no parameter that requires a gradient; there is nothing to train")
    return module


def outputs_of(module: nn.Module, pair: tuple[Tensor, Tensor], field: str) -> Tensor:
    """What the module makes of samples: as in training of those to train with, else as in an evaluation."""
    shape = list(pair[0].shape[1:])
    training = field == "data.train"
    told = f"model: does not take inputs of shape {shape}" if training else f"{field}: the model does not take {shape}"
    with user_code(f"{told}: "):
        outputs = copy.deepcopy(module).train(training)(pair[0])
    if not isinstance(outputs, Tensor):
        raise JobError(f"model: its forward returns a {type(outputs).__name__}; it should return one tensor")
    return outputs


def check_loss(loss: Loss, name: str, outputs: Tensor, pair: tuple[Tensor, Tensor]) -> None:
    """The loss of that name must give one number for outputs and labels."""
    labels = pair[1]
    given = f"outputs {list(outputs.shape)} and labels {list(labels.shape)} of {labels.dtype}"
    told = f"training.loss: {name} does not fit {given}: "
    if loss is functional.mse_loss and outputs.shape != labels.shape:  # torch would warn, and broadcast
        raise JobError(f"{told}they should have one shape")
    if loss is cross_entropy and outputs.shape[:-1] != labels.shape:
        raise JobError(f"{told}labels should be {list(outputs.shape[:-1])}, the number of a class each")
    with user_code(told):
        value = loss(outputs, labels)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise JobError(f"training.loss: {name} should return one number for {given}")


# --- cuts -------------------------------------------------------------------------------------------------------------


def cuts_of(
    module: nn.Module,
    pair: tuple[Tensor, Tensor],
    training: TrainingSettings,
    exclude: Sequence[str],
    table: Mapping[str, Sequence[str | None]] | None,
) -> tuple[nn.Module, Layout]:
    """The module on the meta device, and the layout of its cuts, tried."""
    meta = groups.without_statistics(groups.to_meta(module))
    sample = torch.empty((2, *pair[0].shape[1:]), dtype=pair[0].dtype, device="meta")
    with torch.no_grad():
        expected = run_on_meta(weightless(meta), sample).shape
    if training.method == "local-sgd":
        return meta, groups.whole(meta)
    layout = groups.by_hand(meta, table) if table else discover.find(meta, sample, exclude)
    for group in layout.groups:
        try:
            widths(group.size, [1 / training.subnets] * training.subnets)
        except ValueError:
            raise JobError(
                f"training.subnets: {training.subnets} is more than the {group.size} neurons of group {group.name}; "
                f"ask for at most {group.size} or exclude the group"
            ) from None
    _check_subnets(meta, layout, sample, expected, training)
    return meta, layout


def _check_subnets(
    meta: nn.Module, layout: Layout, sample: Tensor, expected: torch.Size, training: TrainingSettings
) -> None:
    """Every width that equal workers' subnets have must run and give outputs of the network's shape."""
    shares = [1 / training.subnets] * training.subnets
    subnets = [cut(layout, members) for members in draw(training.seed, 0, layout.sizes, shares)]
    for subnet in {subnet.shapes: subnet for subnet in subnets}.values():
        small = weightless(assemble(meta, subnet, torch.empty(subnet.parameters, device="meta")))
        advice = "); name every dimension that the group's neurons index, and no other"
        with user_code("model.groups: a subnet does not run (", advice), torch.no_grad(), torch.device("meta"):
            shape = small(sample).shape
        if shape != expected:
            raise JobError(
                f"model.groups: a subnet's outputs for two samples are {list(shape)}, the network's {list(expected)}; "
                "leave what indexes the outputs whole"
            )
