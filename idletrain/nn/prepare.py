"""Make a program, the network's initial values and test data from a job's settings.

Faults of a model, data or a loss are detected here, before anything starts.
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
    """A program with the network's initial values and the test data, as the head node holds them."""

    program: Program
    network: tuple[Tensor, ...]
    module: nn.Module
    test: Source | None


class FaultCollector:
    """Run checks that depend on each other as far as possible, and report all faults together."""

    FAULTY = object()  # in place of the result of a check that failed or could not run

    def __init__(self) -> None:
        self._faults: dict[str, None] = {}

    def check(self, step: Callable[..., Any], *inputs: Any, after: Any = None) -> Any:
        """Return the step's result for the inputs; FAULTY if it raises a JobError or follows a FAULTY one."""
        if any(value is FaultCollector.FAULTY for value in (*inputs, after)):
            return FaultCollector.FAULTY
        try:
            return step(*inputs)
        except JobError as error:
            self._faults |= dict.fromkeys(error.faults)
            return FaultCollector.FAULTY

    def raise_all(self) -> None:
        """Raise all faults at once, if there are any.

        Raises:
            JobError: with every fault, once.
        """
        if self._faults:
            raise JobError(tuple(self._faults))


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
    """Build model, data and program from a job file's settings.

    Raises:
        JobError: with every fault that can be detected.
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
        JobError: with every fault that can be detected.
    """
    return _prepare(FaultCollector(), module, train, test, loss, training, CutSettings(exclude, table, fixed), memory)


def named_loss(loss: str | Loss) -> Loss:
    """Return a loss, given as a short name, as `package.module:function`, or as the function itself.

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
    function: Loss = resolve(loss, "training.loss")
    return function


def _prepare(
    faults: FaultCollector,
    module: Any,
    train: Any,
    test: Any,
    loss_name: str | Loss,
    training: TrainingSettings,
    cut_settings: CutSettings,
    memory: MemorySettings,
) -> Prepared:
    """Do the work of `prepare` for a module and sources that may be FAULTY already."""
    name = loss_name if isinstance(loss_name, str) else getattr(loss_name, "__name__", repr(loss_name))
    module = faults.check(checks.check_parameters, module)
    loss = faults.check(named_loss, loss_name)
    samples, pair, outputs, fits = _check_data(faults, train, "data.train", module, loss, name, training.batch_size)
    if test is not None:  # skipped if module or loss failed on training data: the reason is reported once
        usable = (FaultCollector.FAULTY, FaultCollector.FAULTY) if fits is FaultCollector.FAULTY else (module, loss)
        _check_data(faults, test, "data.test", *usable, name, training.batch_size)
    inputs = faults.check(checks.trial_inputs, samples, "data.train", after=pair)
    cuts = faults.check(checks.cuts_of, module, inputs, training, cut_settings, after=outputs)
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
    """Return the sources of training and test data (None without), each FAULTY if it is not available."""
    faulty = (FaultCollector.FAULTY, FaultCollector.FAULTY)
    if faults.check(_check_choice, data) is FaultCollector.FAULTY:
        return faulty
    if data.name == "digits":
        return FactorySource(digits, 0), FactorySource(digits, 1)
    if data.name == "fashion-mnist":
        sources = faults.check(fashion_mnist, data.path)
        return faulty if sources is FaultCollector.FAULTY else sources
    if data.factory is not None:
        factory = faults.check(resolve, data.factory, "data.factory")
        return tuple(faults.check(FactorySource, factory, part, data.args) for part in (0, 1))
    test = None if data.test is None else faults.check(_files, data.test, "data.test", data, data.test_rows)
    return faults.check(_files, data.train, "data.train", data, None), test


def _check_choice(data: DataSettings) -> None:
    """Check that the job names its data in one way only, and sets no field that belongs to another way."""
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
    """Check the training or the test data, and try the model and the loss on its first samples.

    Returns:
        The samples, the first of them, the model's outputs for these, and None if the loss fits; each FAULTY if its
        check failed.
    """
    check = faults.check
    samples = check(checks.open_samples, source, field)
    check(checks.check_finite, samples, field)
    pair = check(checks.first_samples, samples, batch_size, field)
    outputs = check(checks.outputs_of, module, pair, field, after=check(checks.check_sizes, module, samples, field))
    fits = check(checks.check_loss, loss, name, outputs, pair)
    if loss in (cross_entropy, sampled_softmax):
        check(checks.check_labels, samples, outputs, field, after=fits)
    return samples, pair, outputs, fits
