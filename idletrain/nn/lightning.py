"""A LightningModule as it is: its training_step computes the loss, its configure_optimizers names the optimizer.

Nothing of Lightning is imported: its Trainer does not run. What validation_step logs is measured at each evaluation,
and its callbacks say when to stop and which network is the best. What a training_step logs goes nowhere, and
`batch_idx` is always 0: which batch a subnet has is no property of the run.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from idletrain.errors import JobError, user_code
from idletrain.nn.data.arrays import Samples, Source
from idletrain.nn.data.batches import labels_of, length
from idletrain.nn.data.datasets import Loading, loading_of
from idletrain.nn.data.streams import StreamSource
from idletrain.nn.optim.from_scheduler import SchedulerFactors, without_scheduler

BATCH = "lightning_batch"  # the name by which a whole batch goes to the module
LIGHTNING = ("lightning", "pytorch_lightning")
HOOKS = ("backward", "configure_gradient_clipping", "configure_model", "lr_scheduler_step", "optimizer_step", "setup")
TRIED_SAMPLES = 2  # a BatchNorm of one sample would be another matter


def is_lightning(module: nn.Module) -> bool:
    """Return whether a module is a LightningModule."""
    return any(cls.__name__ == "LightningModule" and _is_lightning_s(cls) for cls in type(module).__mro__)


class Stepping:
    """Comes before a LightningModule's own class: a whole batch goes to its training_step, all else to its forward."""

    _seen: list[Any] | None  # outputs of forward within a training_step
    _logged: dict[str, Any] | None  # values within a validation_step

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the loss of a whole batch, and the outputs that forward returned for it; else what forward returns."""
        if BATCH not in named:
            outputs = super().forward(*args, **named)  # type: ignore[misc]
            if self._seen is not None:
                self._seen.append(outputs)
            return outputs
        self._seen = []
        try:
            result = run_step(self.training_step, named[BATCH])  # type: ignore[attr-defined]
            seen = self._seen
        finally:
            self._seen = None
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            code = inspect.unwrap(self.training_step).__code__  # type: ignore[attr-defined]
            place = f"training_step at {code.co_filename}:{code.co_firstlineno}"
            raise TypeError(f"{place} returned a {type(result).__name__}; it should return the loss of every batch")
        return {"loss": loss, **({"logits": seen[-1]} if seen and isinstance(seen[-1], Tensor) else {})}

    def log(self, name: str, value: Any, *_args: Any, **_named: Any) -> None:
        """Log a number, or a metric of torchmetrics; only what a validation_step logs is kept."""
        if self._logged is not None:
            self._logged[name] = value

    def log_dict(self, values: Mapping[str, Any], *_args: Any, **_named: Any) -> None:
        """Log several."""
        for name, value in values.items():
            self.log(name, value)


def run_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call a training_step or validation_step, which may take the number of the batch, too."""
    return step(batch, *(0 for _ in range(len(inspect.signature(step).parameters) > 1)))


class Validation:
    """What a LightningModule's validation_step logs on test data; nothing of any other module.

    Args:
        module: A module that `stepping` made, in evaluation mode, or another one.
    """

    def __init__(self, module: nn.Module) -> None:
        own = getattr(type(module), "validation_step", None)
        self._module: Any = module if isinstance(module, Stepping) and own and not _is_lightning_s(own) else None
        self._sums: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._metrics: dict[str, Any] = {}

    def add(self, inputs: Any) -> None:
        """Run validation_step on a batch of `WholeBatches`.

        Raises:
            JobError: it fails, or logs what is no number.
        """
        if self._module is None:
            return
        logged: dict[str, Any] = {}
        self._module._logged = logged
        try:
            with user_code("validation_step fails (", ")"):
                run_step(self._module.validation_step, inputs[BATCH])
                for name, value in logged.items():
                    self._count(name, value, length(inputs))
        finally:
            self._module._logged = None

    def _count(self, name: str, value: Any, samples: int) -> None:
        if hasattr(value, "compute"):
            self._metrics[name] = value
        else:
            self._sums[name] = self._sums.get(name, 0.0) + samples * float(value)
            self._samples[name] = self._samples.get(name, 0) + samples

    def values(self) -> dict[str, float | None]:
        """Return the mean over samples of each number, and the value of each metric, which begins anew; None where one
        is not finite.
        """
        values = {name: self._sums[name] / count for name, count in self._samples.items()}
        for name, metric in self._metrics.items():
            values[name] = float(metric.compute())
            metric.reset()
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _is_lightning_s(member: Any) -> bool:
    """Return whether a class, or a method that nobody has overridden, is Lightning's own."""
    return member.__module__.split(".")[0] in LIGHTNING


@dataclass(frozen=True)
class Callbacks:
    """What becomes of a LightningModule's callbacks.

    Attributes:
        stop: Settings of the section `stop`.
        better: Which of two values of the watched one is better, by its name.
        notes: Which callbacks do not run, one sentence each.
    """

    stop: Mapping[str, Any] = field(default_factory=dict)
    better: Mapping[str, Literal["higher", "lower"]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def callbacks_of(module: nn.Module, test: Source | None) -> Callbacks:
    """Return what `configure_callbacks` says of stopping (EarlyStopping) and the best network (ModelCheckpoint).

    Args:
        module: A module that `stepping` made.
        test: Test data of whole batches, or None.

    Raises:
        JobError: configure_callbacks or validation_step fails, or the callbacks watch two values, or one that
            validation_step does not log.
    """
    with user_code("fit: configure_callbacks fails (", "); return a list of callbacks"):
        given = module.configure_callbacks()  # type: ignore[operator]
        callbacks = list(given) if isinstance(given, Sequence) else [given]
    notes = [f"{name} is left out: no Trainer runs that would call it" for name in _hooks_of(module)]
    watching: list[Any] = []
    for callback in callbacks:
        name, kinds = type(callback).__name__, {c.__name__ for c in type(callback).__mro__}
        if not kinds & {"EarlyStopping", "ModelCheckpoint"}:
            notes.append(f"{name} is left out: no Trainer runs that would call it")
        elif test is None:
            notes.append(f"{name} is left out: there are no test data to watch")
        elif callback.monitor is not None:
            watching.append(callback)
    stopping = [callback for callback in watching if hasattr(callback, "patience")]
    for callback in watching if stopping else ():
        if callback.monitor not in {other.monitor for other in stopping}:
            name, of = type(callback).__name__, stopping[0].monitor
            notes.append(f"{name} is left out: {of}, which EarlyStopping watches, tells the best network, too")
    watched = {callback.monitor: _better(callback) for callback in stopping or watching}
    if not watched:
        return Callbacks(notes=tuple(notes))
    if len(watched) > 1:
        raise JobError(f"fit: callbacks watch {' and '.join(watched)}; let all of them watch one value")
    (name,) = watched
    names = _logged_names(module, test)
    if name not in ("loss", "accuracy", *names):
        raise JobError(f"fit: callbacks watch {name}, which validation_step does not log; it logs {', '.join(names)}")
    patience = min((callback.patience for callback in stopping), default=None)
    stop = {"metric": name, **({} if patience is None else {"patience": max(1, patience)})}
    return Callbacks(stop, watched, tuple(notes))


def _hooks_of(module: nn.Module) -> list[str]:
    """Return the names of the methods of a LightningModule's own that only a Trainer would call."""
    members = inspect.getmembers(type(module), inspect.isfunction)
    return [name for name, of in members if (name.startswith("on_") or name in HOOKS) and not _is_lightning_s(of)]


def _better(callback: Any) -> Literal["higher", "lower"]:
    return "higher" if callback.mode == "max" else "lower"


def _logged_names(module: nn.Module, test: Source | None) -> list[str]:
    """Return the names of what validation_step logs on some test data.

    Raises:
        JobError: it fails, or there are no test data.
    """
    assert test is not None
    validation = Validation(copy.deepcopy(module).eval())
    with torch.no_grad():
        validation.add(test.open().batch(np.arange(TRIED_SAMPLES))[0])
    return list(validation.values())


def stepping(module: nn.Module) -> nn.Module:
    """Return a copy of a LightningModule that takes whole batches; its parameters keep their names.

    Raises:
        JobError: it has no training_step of its own, or optimizes by hand.
    """
    own = type(module)
    if not getattr(module, "automatic_optimization", True):
        raise JobError("fit: the LightningModule optimizes by hand; leave out automatic_optimization = False")
    if _is_lightning_s(own.training_step):  # type: ignore[attr-defined]
        raise JobError("fit: the LightningModule has no training_step; write one that returns the loss")
    result = copy.deepcopy(module)
    result.__class__ = type(own.__name__, (Stepping, own), {"__module__": own.__module__})
    result._seen = result._logged = None  # type: ignore[assignment]
    return result


def plain(module: nn.Module) -> nn.Module:
    """Return a module that `stepping` made, of its own class again."""
    module.__class__ = type(module).__bases__[1]
    del module._seen, module._logged
    return module


def optimizer_of(module: nn.Module) -> tuple[Optimizer, SchedulerFactors | None]:
    """Return the optimizer that a LightningModule configures, and its schedule of the learning rate, if it has one.

    Raises:
        JobError: there is none, or there are several; or the schedule follows a metric.
    """
    with user_code("fit: configure_optimizers fails (", "); give fit an optimizer"):
        configured = module.configure_optimizers()  # type: ignore[operator]
    schedules: Any = ()
    if isinstance(configured, Mapping):
        configured, schedules = configured["optimizer"], configured.get("lr_scheduler") or ()
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured, schedules = configured
    if isinstance(configured, Sequence) and len(configured) == 1:
        configured = configured[0]
    if not isinstance(configured, Optimizer):
        parts = configured if isinstance(configured, Sequence) else [configured]
        kinds = " and ".join(type(part).__name__ for part in parts) or "none"
        raise JobError(f"fit: configure_optimizers returns {kinds}; return one optimizer, or give fit one")
    given = list(schedules) if isinstance(schedules, Sequence) else [schedules]
    if len(given) > 1:
        raise JobError("fit: configure_optimizers returns several schedules; make one with SequentialLR")
    factors = _factors_of(given[0]) if given else None
    return without_scheduler(configured), factors


def _factors_of(given: Any) -> SchedulerFactors:
    """Return the schedule of a scheduler, or of Lightning's settings of one."""
    settings = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = settings.get("scheduler")
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise JobError(
            f"fit: configure_optimizers returns a {type(scheduler).__name__}, which is no schedule of steps or epochs; "
            "give fit an optimizer with one"
        )
    by_epoch = settings.get("interval", "epoch") == "epoch"
    return SchedulerFactors(scheduler, by_epoch=by_epoch, every=settings.get("frequency", 1))


@dataclass(frozen=True)
class WholeBatches:
    """Data whose batches go whole to a training_step, beside their labels for the metrics."""

    source: Source

    def open(self) -> Samples:
        """Open the samples.

        Raises:
            JobError: they are a stream.
        """
        samples = self.source.open()
        if isinstance(samples, StreamSource):
            raise JobError("fit: a LightningModule takes no stream; give a map-style Dataset, or a plain module")
        return _WholeBatches(samples, loading_of(samples))


@dataclass(frozen=True)
class _WholeBatches:
    samples: Samples
    loading: Loading

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        inputs, target = self.samples.batch(index)
        whole = inputs if target is inputs else (*inputs, target) if isinstance(inputs, tuple) else (inputs, target)
        labels = labels_of(target)
        named = {BATCH: whole, **({"labels": labels} if isinstance(labels, Tensor) else {})}
        return named, named
