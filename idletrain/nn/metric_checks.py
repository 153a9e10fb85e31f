"""Read a job's metrics, and check that each takes the outputs and labels of the test data."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import psutil
from torch import Tensor, nn

from idletrain.errors import JobError, user_code
from idletrain.job import MetricSettings
from idletrain.nn.checks import outputs_of, trial_pair, very_wide
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import described, labels_of, prediction
from idletrain.nn.user_metrics import JobMetric, Tally, adds_up, checked_metrics

MEMORY_PART = 0.5  # of the free memory that the outputs of all test data may take, for a function


def named_metrics(
    settings: Mapping[str, MetricSettings], given: Mapping[str, Any], resolve: Callable[[str, str], Any]
) -> tuple[JobMetric, ...]:
    """Return the metrics that a job file names, and those that are given as objects.

    Args:
        settings: The job's metrics by name.
        given: Further metrics by name; see `checked_metrics`.
        resolve: Imports `package.module:name`, for a field.

    Raises:
        JobError: one cannot be imported, made or used.
    """
    if not hasattr(given, "items"):
        raise JobError(f"metrics: {given!r} should name each metric, such as {{'f1': MulticlassF1Score(3)}}")
    named = {name: _named(f"training.metrics.{name}", setting, resolve) for name, setting in settings.items()}
    return checked_metrics({**named, **dict(given.items())})


def _named(field: str, setting: MetricSettings, resolve: Callable[[str, str], Any]) -> Any:
    measure = resolve(setting.metric, field)
    if isinstance(measure, type):
        with user_code(f"{field}.args: {setting.metric} does not take {setting.args}: "):
            measure = measure(**setting.args)
    elif not adds_up(measure) and setting.args:
        measure = functools.partial(measure, **setting.args)
    return (measure, setting.better) if setting.better else measure


def check_metrics(metrics: tuple[JobMetric, ...], module: nn.Module, samples: Samples | None) -> None:
    """Check that metrics take a few samples' outputs and labels, and return one number each.

    Args:
        metrics: The metrics.
        module: The module.
        samples: The test data, or None.

    Raises:
        JobError: with a fault for each metric that does not.
    """
    if not metrics:
        return
    if samples is None:
        raise JobError(
            "training.metrics: are measured on test data, which are missing; give test, or leave metrics out"
        )
    if very_wide(module):
        raise JobError("training.metrics: are not for a very wide output; leave them out, `evaluate` ranks its labels")
    inputs, target = trial_pair(samples, "data.test", module)
    logits, labels = prediction(outputs_of(module, (inputs, target), "data.test")), labels_of(target)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        raise JobError("training.metrics: need outputs and labels that are tensors; leave them out for this model")
    faults = [fault for metric in metrics for fault in _faults(metric, logits.detach(), labels, len(samples))]
    if faults:
        raise JobError(faults)


def _faults(metric: JobMetric, logits: Tensor, labels: Tensor, samples: int) -> list[str]:
    """Return what keeps a metric from being measured on so many samples."""
    field = f"training.metrics.{metric.name}"
    given = f"outputs {described(logits)} and labels {described(labels)} of {labels.dtype}"
    tally = Tally(metric)
    tally.add(logits, labels)
    try:
        with user_code(""), warnings.catch_warnings(action="ignore"):
            value = math.nan if tally.fault else tally.raw()
    except JobError as error:
        return [f"{field}: does not fit {given}: {error}"]
    if tally.fault:
        return [f"{field}: does not fit {given}: {tally.fault.partition(': ')[2]}"]
    needed = (logits.nbytes // len(logits)) * samples
    if not metric.by_batch and needed > MEMORY_PART * psutil.virtual_memory().available:
        size = f"{needed / 2**30:.1f} GiB"
        return [f"{field}: a function gets all outputs, {size}, at once; give a torchmetrics metric, which adds up"]
    return [f"{field}: {fault}" for fault in [_no_number(value)] if fault]


def _no_number(value: Any) -> str:
    """Return why a metric's value is not one number, or an empty string."""
    if isinstance(value, Mapping):
        return f"returns {', '.join(map(str, value))}; give its metrics one by one"
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = str(list(value.shape)) if hasattr(value, "shape") else f"a {type(value).__name__}"
        return f"returns {shape}; return one number, such as with average='macro'"
    return ""
