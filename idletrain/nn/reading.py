"""Fit how samples are read to the module that takes them, and to what a DataLoader says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.job import TrainingSettings
from idletrain.nn.checks import first_samples, open_samples, very_wide
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import call, tensors_of
from idletrain.nn.data.datasets import kept_names, loading_of
from idletrain.nn.data.streams import StreamSource, check_stream, keeps_state, state_fault
from idletrain.nn.ist.modules import copied
from idletrain.nn.orders import unrepeatable
from idletrain.nn.scripted import parameters_of


@dataclass(frozen=True)
class FittedSource:
    """A source whose samples are opened with other values in some of their fields.

    Attributes:
        source: The source.
        changes: The values, by field; fields that samples of this kind do not have are left out.
    """

    source: Source
    changes: Mapping[str, Any]

    def open(self) -> Samples:
        samples: Any = self.source.open()
        own = {field.name for field in dataclasses.fields(samples)} if dataclasses.is_dataclass(samples) else set()
        changed: Samples = replace(samples, **{name: value for name, value in self.changes.items() if name in own})
        return changed


@dataclass(frozen=True)
class Reading:
    """A run's way of reading its samples.

    Attributes:
        changes: Values of fields of the samples, see `FittedSource`.
        training: The job's settings, with the batch size that a DataLoader says if they have none of their own.
        notes: What of a DataLoader is not kept, one sentence each.
    """

    changes: Mapping[str, Any]
    training: TrainingSettings
    notes: tuple[str, ...] = ()

    def of(self, source: Source | None, *, ordered: bool) -> Source | None:
        """Return a source that is read so; `ordered` if the order is this reading's, too, as for training data."""
        changes = {name: value for name, value in self.changes.items() if ordered or name != "loading"}
        return FittedSource(source, changes) if source is not None and changes else source


def fit_reading(module: nn.Module, source: Source, training: TrainingSettings) -> Reading:
    """Decide how samples are read.

    Of the rows of a `datasets.Dataset` those columns are kept that the module takes. Bytes stay integers if they are
    looked up in an embedding. Sparse inputs stay sparse if a layer takes them so. The batch size and the order are a
    DataLoader's, if the samples are.

    Raises:
        JobError: the samples cannot be opened, or a sampler fails.
    """
    samples = open_samples(source, "data.train")
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if isinstance(samples, StreamSource):
        check_stream(samples, max(phase.subnets for phase in training.every_phase))
        if keeps_state(samples.dataset):
            fault = state_fault(samples.dataset)
            changes["resumes"] = not fault
            name = type(samples.dataset).__name__
            note = f"data: the {name} is read anew by a worker that goes on with a subnet, since {fault}"
            notes += [note] if fault else []
    loading = loading_of(samples)
    if loading.batch_size and "batch_size" not in training.model_fields_set:
        training = training.model_copy(update={"batch_size": loading.batch_size})
    if note := unrepeatable(loading, training):
        notes.append(note)
        loading = replace(loading, sampler=None)
    if loading != loading_of(samples):
        changes["loading"] = loading
    if hasattr(samples, "dense") and any(getattr(layer, "sparse_input", False) for layer in module.modules()):
        changes["dense"] = False
    elif names := kept_names(getattr(samples, "dataset", None), _taken(module)):
        changes["names"] = names
    elif not very_wide(module) and _looks_up_bytes(module, samples, training.batch_size):
        changes["integers"] = True
    return Reading(changes, training, (*loading.notes, *notes))


def _taken(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of forward's arguments, without those that only `**kwargs` takes; None if it names none."""
    parameters = parameters_of(module.forward)
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)) or None


def _looks_up_bytes(module: nn.Module, samples: Any, batch_size: int) -> bool:
    """Return True if 8-bit inputs reach an embedding as they are."""
    if not hasattr(samples, "integers") or not any(_is_embedding(layer) for layer in module.modules()):
        return False
    as_floats, as_integers = (
        first_samples(replace(samples, integers=kept), batch_size, "data.train")[0] for kept in (False, True)
    )
    of_bytes = [b for a, b in zip(tensors_of(as_floats), tensors_of(as_integers), strict=True) if a.dtype != b.dtype]
    seen: list[bool] = []

    def look(_layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen.extend(
                part.numel() == inputs[0].numel() and bool(torch.isin(inputs[0], part).all()) for part in of_bytes
            )

    if not of_bytes:
        return False
    trial = copied(module).eval()
    for layer in trial.modules():
        if _is_embedding(layer):
            layer.register_forward_pre_hook(look)
    # It may fail, because it takes no integers, or for a reason that is told later.
    with contextlib.suppress(Exception), torch.no_grad():
        call(trial, as_integers)
    return any(seen)


def _is_embedding(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag)
