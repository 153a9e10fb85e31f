"""From a job's words to a program, a network's first values and test data.

Everything a user can get wrong about a model, data or a loss is found here, before anything starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.errors import JobError, user_code
from idletrain.job import DataSettings, MemorySettings, ModelSettings, TrainingSettings
from idletrain.nn import checks
from idletrain.nn.checks import CutSettings
from idletrain.nn.data import remote
from idletrain.nn.data.arrays import FactorySource, FileSource, Source, digits, fashion_mnist
from idletrain.nn.data.extreme import SparseFiles, sparse_names
from idletrain.nn.data.remote import Remote
from idletrain.nn.program import LOSSES, Loss, Program, cross_entropy, sampled_softmax
from idletrain.nn.units import pieces_of


@dataclass(frozen=True)
class Prepared:
    """A program with the network's first values and the test data: what the head holds."""

    program: Program
    network: tuple[Tensor, ...]
    module: nn.Module
    test: Source | None


class FaultCollector:
    """Steps that depend on each other: what can be looked at is, and all that is wrong is told together."""

    FAULTY = object()  # in place of the result of a step that failed or could not be taken

    def __init__(self) -> None:
        self._told: dict[str, None] = {}

    def check(self, step: Callable[..., Any], *inputs: Any, after: Any = None) -> Any:
        """What the step makes of the inputs, or FAULTY if it fails or an input, or what it comes after, is FAULTY."""
        if any(value is FaultCollector.FAULTY for value in (*inputs, after)):
            return FaultCollector.FAULTY
        try:
            return step(*inputs)
        except JobError as error:
            self._told |= dict.fromkeys(error.faults)
            return FaultCollector.FAULTY

    def raise_all(self) -> None:
        """Raise what was found.

        Raises:
            JobError: with every fault, once.
        """
        if self._told:
            raise JobError(tuple(self._told))


def resolve(path: str, field: str) -> Any:
    """Import `package.module:attribute`.

    Raises:
        JobError: there is no such module or attribute, or importing it fails.
    """
    module, _, attribute = path.replace(":", ".").rpartition(".")
    with user_code(f"{field}: {path!r} cannot be imported (", "); write it as package.module:name"):
        return getattr(importlib.import_module(module), attribute)


def from_settings(
    model: ModelSettings,
    data: DataSettings,
    training: TrainingSettings,
    memory: MemorySettings = MemorySettings(),  # noqa: B008 (frozen)
) -> Prepared:
    """Build what a job file describes.

    Raises:
        JobError: with every fault that can be found.
    """
    torch.manual_seed(training.seed)
    faults = FaultCollector()
    module = faults.check(_module, model)
    train, test = _sources(faults, data)
    cuts = CutSettings(model.exclude, model.groups, model.fixed)
    prepared = _prepare(faults, module, train, test, training.loss, training, cuts, memory)
    if prepared.program.output and hasattr(module, "start_from"):
        module.start_from(prepared.program.source.open())
    return prepared


def prepare(
    module: nn.Module,
    train: Source,
    test: Source | None,
    loss: Loss | str,
    training: TrainingSettings,
    *,
    exclude: Sequence[str] = (),
    table: Mapping[str, Sequence[str | None]] | None = None,
    fixed: Sequence[str] = (),
    memory: MemorySettings = MemorySettings(),  # noqa: B008 (frozen)
) -> Prepared:
    """Check that module, data and loss fit together, and find the neuron groups.

    Raises:
        JobError: with every fault that can be found.
    """
    return _prepare(FaultCollector(), module, train, test, loss, training, CutSettings(exclude, table, fixed), memory)


def named_loss(loss: str | Loss) -> Loss:
    """A loss by its short name or as `package.module:function`; one that is at hand as it is.

    Raises:
        JobError: there is no such loss.
    """
    if not isinstance(loss, str):
        if not callable(loss):
            raise JobError(f"training.loss: {loss!r} should be a name or a function (outputs, labels) -> scalar")
        return loss
    if loss in LOSSES:
        return LOSSES[loss]
    if ":" not in loss and "." not in loss:
        raise JobError(f"training.loss: {loss!r} should be one of {', '.join(LOSSES)} or package.module:function")
    found: Loss = resolve(loss, "training.loss")
    return found


def _prepare(
    faults: FaultCollector,
    module: Any,
    train: Any,
    test: Any,
    loss_name: str | Loss,
    training: TrainingSettings,
    asked_cuts: CutSettings,
    memory: MemorySettings,
) -> Prepared:
    """What `prepare` does, of a module and sources that may be FAULTY already."""
    name = loss_name if isinstance(loss_name, str) else getattr(loss_name, "__name__", repr(loss_name))
    module = faults.check(checks.check_parameters, module)
    loss = faults.check(named_loss, loss_name)
    samples, pair, outputs, fits = _check_data(faults, train, "data.train", module, loss, name, training.batch_size)
    if test is not None:  # tried with what fits the training data: a reason is told once
        fitting = (FaultCollector.FAULTY, FaultCollector.FAULTY) if fits is FaultCollector.FAULTY else (module, loss)
        _check_data(faults, test, "data.test", *fitting, name, training.batch_size)
    inputs = faults.check(checks.trial_inputs, samples, "data.train", after=pair)
    cuts = faults.check(checks.cuts_of, module, inputs, training, asked_cuts, after=outputs)
    faults.check(pieces_of, module, memory.units)
    output = faults.check(checks.check_wide, cuts, samples, training, memory)
    faults.raise_all()
    meta, layout = cuts
    program = Program(meta, layout, train, loss, training, memory, output)
    return Prepared(program, tuple(p.detach() for p in module.parameters()), module, test)


def _module(model: ModelSettings) -> nn.Module:
    factory = resolve(model.factory, "model.factory")
    with user_code(f"model.args: {model.factory} does not take {model.args}: "):
        module = factory(**model.args)
    if not isinstance(module, nn.Module):
        raise JobError(f"model.factory: {model.factory!r} returned a {type(module).__name__}, not a torch.nn.Module")
    return module


def _sources(faults: FaultCollector, data: DataSettings) -> tuple[Any, Any]:
    """The sources of training and test data (None without), each FAULTY where it is not to be had."""
    nothing = (FaultCollector.FAULTY, FaultCollector.FAULTY)
    if faults.check(_check_choice, data) is FaultCollector.FAULTY:
        return nothing
    if data.name == "digits":
        return FactorySource(digits, 0), FactorySource(digits, 1)
    if data.name == "fashion-mnist":
        found = faults.check(fashion_mnist, data.path)
        return nothing if found is FaultCollector.FAULTY else found
    if data.factory is not None:
        factory = faults.check(resolve, data.factory, "data.factory")
        return tuple(faults.check(FactorySource, factory, part, data.args) for part in (0, 1))
    test = None if data.test is None else faults.check(_files, data.test, "data.test", data, data.test_rows)
    return faults.check(_files, data.train, "data.train", data, None), test


def _check_choice(data: DataSettings) -> None:
    """One way to name the data, and nothing beside it that belongs to another."""
    chosen = [f for f in ("name", "train", "factory") if getattr(data, f) is not None]
    if len(chosen) != 1:
        raise JobError(f"data: has {' and '.join(chosen) or 'neither'}; give one of name, train (with test) or factory")
    owners = {"path": data.name == "fashion-mnist", "test": data.train is not None, "args": data.factory is not None}
    needs = {"path": "name: fashion-mnist", "test": "train", "args": "factory"}
    strays = [
        f"data.{field}: {getattr(data, field)!r} goes with {needs[field]} alone; leave it out"
        for field, belongs in owners.items()
        if getattr(data, field) and not belongs
    ]
    if strays:
        raise JobError(strays)


def _files(where: str | tuple[str, str], field: str, data: DataSettings, most_rows: int | None) -> Source:
    if names := sparse_names(where):
        return SparseFiles(tuple(_pinned(name, field) for name in names), field, data.empty, most_rows)
    if most_rows is not None:
        raise JobError(f"data.test_rows: {most_rows} goes with sparse rows alone; leave it out")
    if isinstance(where, tuple):
        return FileSource(_pinned(where[0], field), _pinned(where[1], field), field=field)
    if not where.endswith(".npz"):
        raise JobError(
            f"{field}: {where!r} should be an .npz file, a pair [inputs, labels] of .npy or IDX files, or sparse rows: "
            "an extreme-classification .txt, or a pair of CSR .npz"
        )
    both = _pinned(where, field)
    return FileSource(both, both, field=field)


def _pinned(where: str, field: str) -> str | Remote:
    return remote.find_remote(where, field) if where.startswith(remote.SCHEME) else where


def _check_data(
    faults: FaultCollector, source: Any, field: str, module: Any, loss: Any, name: str, batch_size: int
) -> tuple[Any, Any, Any, Any]:
    """Look at one part of the data, and try the model and the loss on its first samples.

    Returns:
        The samples, the first of them, the model's outputs for these and whether the loss fits, each FAULTY where it is
        not.
    """
    look = faults.check
    samples = look(checks.open_samples, source, field)
    look(checks.check_finite, samples, field)
    pair = look(checks.first_samples, samples, batch_size, field)
    outputs = look(checks.outputs_of, module, pair, field, after=look(checks.check_sizes, module, samples, field))
    fits = look(checks.check_loss, loss, name, outputs, pair)
    if loss in (cross_entropy, sampled_softmax):
        look(checks.check_labels, samples, outputs, field, after=fits)
    return samples, pair, outputs, fits
