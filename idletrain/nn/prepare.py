"""Make a program, the network's initial values and test data from a job's settings.

Faults of a model, data or a loss are detected here, before anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from idletrain.errors import JobError, user_code
from idletrain.job import DataSettings, Job, MemorySettings, ModelSettings, Split, TrainingSettings
from idletrain.nn import checks, module_checks, outer, sources
from idletrain.nn.buffers import traveling_rules
from idletrain.nn.cuts import CutSettings, check_wide, cuts_or_whole
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import is_joined
from idletrain.nn.data_notes import data_notes
from idletrain.nn.evaluate import is_of_classes
from idletrain.nn.faults import FAULTY, FaultCollector, made, resolve
from idletrain.nn.ist.frozen import without_frozen
from idletrain.nn.ist.modules import tensor_of
from idletrain.nn.metric_checks import check_metrics, named_metrics
from idletrain.nn.micro_batches import micro_batches
from idletrain.nn.optim import parameter_groups
from idletrain.nn.optim.from_scheduler import SchedulerFactors
from idletrain.nn.optim.schedule import Schedule
from idletrain.nn.precision import Precision, is_half
from idletrain.nn.program import LOSSES, Loss, Program, cross_entropy, default_loss, model_loss, sampled_softmax
from idletrain.nn.reading import Reading, fit_reading
from idletrain.nn.units import pieces_of
from idletrain.nn.user_metrics import JobMetric


@dataclass(frozen=True)
class Prepared:
    """A program with the network's initial values and the test data, as the head node holds them.

    Attributes:
        program: The program, whose settings hold the method that suits the module.
        network: The initial values.
        module: The module before training.
        test: The test data.
        fallback: Why the method is not the one that the job names, in one sentence; else empty.
        notes: What of the data's own settings is not kept, and what is odd about the data, one sentence each.
        metrics: The metrics on the test data.
        logged_better: Which of two values that a validation_step logs is better, by name, where a callback says so.
        is_factory_made: Whether the job's factory made the module, so that no code of the user's holds it.
    """

    program: Program
    network: tuple[Tensor, ...]
    module: nn.Module
    test: Source | None
    fallback: str = ""
    notes: tuple[str, ...] = ()
    metrics: tuple[JobMetric, ...] = ()
    logged_better: Mapping[str, Literal["higher", "lower"]] = field(default_factory=dict)
    is_factory_made: bool = False

    def share(self, values: Sequence[Tensor]) -> None:
        """Let module and `network` use other tensors as their own, whose memory is free then; they change with these.

        Does nothing where a user may hold the module.
        """
        if not self.is_factory_made:
            return
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        for parameter, own, value in zip(trained, self.network, values, strict=False):  # behind these are buffers
            if parameter.dtype == value.dtype:
                parameter.data = own.data = value

    @property
    def better(self) -> dict[str, str]:
        """Return which of two values is the better one, by the name of each metric where that is known."""
        return {**self.logged_better, **{metric.name: metric.better for metric in self.metrics}}


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
    train, test = sources.of_settings(faults, data)
    cuts = CutSettings(model.exclude, model.groups, model.fixed, model.split)
    schedule = faults.check(named_schedule, None, training)
    prepared = _prepare(faults, module, train, test, training.loss, training, cuts, memory)
    prepared = replace(prepared, program=replace(prepared.program, schedule=schedule), is_factory_made=True)
    if prepared.program.output and hasattr(module, "start_from"):
        module.start_from(prepared.program.source.open())
    return prepared


def prepare_job(job: Job) -> Prepared:
    """Build the network and open the data that a job file names."""
    return from_settings(job.model, job.data, job.training, job.memory)


def prepare(  # noqa: PLR0913 (each is a section of a job, or its part)
    module: nn.Module,
    train: Source,
    test: Source | None,
    loss: Loss | str | None,
    training: TrainingSettings,
    *,
    exclude: Sequence[str] = (),
    table: Mapping[str, Sequence[str | None]] | None = None,
    fixed: Sequence[str] = (),
    split: Split = "neurons",
    memory: MemorySettings = MemorySettings(),  # noqa: B008 (frozen)
    schedule: Schedule | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Prepared:
    """Check that module, data and loss fit together, and find the neuron groups.

    Raises:
        JobError: with every fault that can be detected.
    """
    faults, cuts = FaultCollector(), CutSettings(exclude, table, fixed, split)
    schedule = faults.check(named_schedule, schedule, training)
    prepared = _prepare(faults, module, train, test, loss, training, cuts, memory, metrics)
    program = prepared.program
    if isinstance(schedule, SchedulerFactors):
        schedule = named_schedule(schedule.of_data(len(program.source.open()), program.training), training)
    return replace(prepared, program=replace(program, schedule=schedule))


def named_schedule(schedule: Schedule | None, training: TrainingSettings) -> Schedule | None:
    """Return the function of the job's schedule, given as such or by its path; None if it is a built-in one.

    Raises:
        JobError: it is no function `(step, steps) -> factor`, or a factor is not a number from 0 on.
    """
    field, name = "training.optimizer.schedule", training.optimizer.schedule
    if schedule is None and ":" not in name:
        return None
    function: Schedule = resolve(name, field) if schedule is None else schedule
    steps = training.steps
    for step in (0, steps // 2, steps - 1):
        with user_code(f"{field}: {name} fails at step {step} (", "); it should be (step, steps) -> factor"):
            factor = float(function(step, steps))
        if not (math.isfinite(factor) and factor >= 0):
            raise JobError(f"{field}: {name} returns {factor} at step {step}; it should be a factor of lr, 0 or more")
    return function


def named_loss(loss: str | Loss | None) -> Loss | None:
    """Return a loss, given as a short name, as `package.module:function`, or as the function itself.

    None stays None: the loss that a job does not name depends on the model's outputs (see `default_loss`).

    Raises:
        JobError: there is no such loss.
    """
    if loss is None:
        return None
    if not isinstance(loss, str):
        if not callable(loss):
            raise JobError(f"training.loss: {loss!r} should be a name or a function (outputs, labels) -> scalar")
        return loss
    if loss in LOSSES:
        return LOSSES[loss]
    if ":" not in loss and "." not in loss:
        own = "package.module:function, such as torch.nn.functional:l1_loss"
        raise JobError(f"training.loss: {loss!r} should be one of {', '.join(LOSSES)} or {own}")
    function: Loss = resolve(loss, "training.loss")
    return function


def _prepare(
    faults: FaultCollector,
    module: Any,
    train: Any,
    test: Any,
    loss_name: str | Loss | None,
    training: TrainingSettings,
    cut_settings: CutSettings,
    memory: MemorySettings,
    metrics: Mapping[str, Any] | None = None,
) -> Prepared:
    """Do the work of `prepare` for a module and sources that may be FAULTY already."""
    name = loss_name if isinstance(loss_name, str) else getattr(loss_name, "__name__", repr(loss_name))
    given = faults.check(module_checks.check_layers, module)
    module = faults.check(module_checks.uncompiled, given)
    compiled = module is not given
    was_half = isinstance(module, nn.Module) and is_half(module)
    precision: Precision = training.precision or ("bfloat16" if was_half else "float32")
    how = faults.check(fit_reading, module, train, training)
    if how is not FAULTY:
        train, test, training = how.of(train, ordered=True), _fit_test(how, test), how.training
    module = faults.check(module_checks.materialized, module, train, training)
    module = faults.check(module_checks.check_parameters, module)
    loss = faults.check(named_loss, loss_name)
    samples, pair, outputs, fits = _check_data(faults, train, "data.train", module, loss, name, training.batch_size)
    tests = None if test is None else _check_test(faults, test, module, fits, name, training.batch_size)
    measured = faults.check(named_metrics, training.metrics, metrics or {}, resolve)
    faults.check(check_metrics, measured, module, tests, after=fits)
    trial = faults.check(checks.trial_pair, samples, "data.train", module, after=pair)
    faults.check(_check_joined, module, samples, trial, fits)
    faults.check(module_checks.check_computing, module, trial, fits, training, precision)
    observed = faults.check(module_checks.settled, module, trial, fits)
    if observed is not FAULTY:
        module, observed = observed
    kinds = faults.check(module_checks.buffer_kinds, module, observed, training)
    rules = kinds if kinds is FAULTY else traveling_rules(kinds)
    inputs = trial if trial is FAULTY else trial[0]
    cuts = faults.check(cuts_or_whole, module, inputs, training, cut_settings, rules, after=outputs)
    faults.check(pieces_of, module, memory.units)
    faults.check(parameter_groups.check, module, training.optimizer)
    faults.check(module_checks.check_steps, module, fits, training)
    output = faults.check(check_wide, cuts, samples, memory)
    faults.check(lambda cuts: outer.check_shared(cuts.layout, cuts.training), cuts)
    faults.raise_all()
    (meta, layout), training = without_frozen(module, cuts.module, cuts.layout), cuts.training
    program = Program(meta, layout, train, fits, training, memory, output, kinds, precision=precision)
    program = replace(program, joined=is_joined(*pair) or is_joined(*trial))
    program, parting = micro_batches(program, module, trial)
    network = tuple(tensor_of(module, t.name).detach() for t in layout.tensors)
    of_compiling = module_checks.notes_of_compiling(program, compiled=compiled)
    notes = (*how.notes, *of_compiling, *data_notes(samples, fits, training.batch_size), *parting)
    return Prepared(program, network, module, test, cuts.fallback, notes, measured)


def _fit_test(how: Reading, test: Any) -> Any:
    return test if test is FAULTY else how.of(test, ordered=False)


def _module(model: ModelSettings) -> nn.Module:
    module = made(resolve(model.factory, "model.factory"), model.factory, model.args, "model")
    if not isinstance(module, nn.Module):
        raise JobError(f"model.factory: {model.factory!r} returned a {type(module).__name__}, not a torch.nn.Module")
    return module_checks.unwrapped(module)


def _check_test(faults: FaultCollector, test: Any, module: Any, loss: Any, name: str, batch_size: int) -> Any:
    """Check the test data; skipped if module or loss failed on training data, so that a reason is reported once."""
    usable = (FAULTY, FAULTY) if loss is FAULTY else (module, loss)
    return _check_data(faults, test, "data.test", *usable, name, batch_size)[0]


def _check_data(
    faults: FaultCollector, source: Any, field: str, module: Any, loss: Any, name: str, batch_size: int
) -> tuple[Any, Any, Any, Any]:
    """Check the training or the test data, and try the model and the loss on its first samples.

    Returns:
        The samples, the first of them, the model's outputs for these, and the loss, which fits them; each FAULTY if its
        check failed.
    """
    check = faults.check
    samples = check(checks.open_samples, source, field)
    pair = check(checks.first_samples, samples, batch_size, field)
    check(checks.check_finite, samples, field, after=pair)
    sizes = check(checks.check_sizes, module, samples, field)
    outputs = check(checks.first_outputs, module, samples, pair, field, after=sizes)
    fits = check(_fitting_loss, loss, name, outputs, pair)
    if check(_is_of_classes, fits, outputs, pair) is True:
        fits = check(_with_labels, fits, samples, outputs, field)
    return samples, pair, outputs, fits


def _fitting_loss(loss: Loss | None, name: str, outputs: Any, pair: tuple[Any, Any]) -> Loss:
    """Return the loss, or the one that suits the outputs, once it has returned one number for them."""
    if loss is None:
        name = default_loss(pair[0], outputs)
        loss = LOSSES[name]
    checks.check_loss(loss, name, outputs, pair)
    return loss


def _with_labels(loss: Loss, samples: Samples, outputs: Any, field: str) -> Loss:
    """Return the loss once all labels are known to be classes of the outputs."""
    checks.check_labels(samples, outputs, field)
    return loss


def _check_joined(module: nn.Module, samples: Samples, trial: tuple[Any, Any], loss: Loss) -> None:
    """Check that the loss fits a few samples, too, where they are joined."""
    if checks.are_joined(samples, trial[0]):
        name = next((name for name, known in LOSSES.items() if known is loss), getattr(loss, "__name__", repr(loss)))
        checks.check_loss(loss, name, checks.outputs_of(module, trial, "data.train"), trial)


def _is_of_classes(loss: Loss, outputs: Any, pair: tuple[Any, Any]) -> bool:
    """Return True if labels have to be classes of the outputs."""
    if loss is model_loss:
        return is_of_classes(float(loss(outputs, pair[1]).detach()), outputs, pair[1])
    return loss in (cross_entropy, sampled_softmax)
