"""Metrics beside loss and accuracy: those of torchmetrics, and functions of all outputs and labels.

A metric with `update`, `compute` and `reset`, as torchmetrics has them, adds up batch by batch; a function gets all of
them at once. Both get the outputs that a loss compares with labels (`batches.prediction`), and the labels.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from idletrain.errors import JobError, user_code
from idletrain.nn.data.batches import labels_of, prediction

OWN_SCORES = ("accuracy", "loss", "calibration_error", "temperature", "constant_loss")


@dataclass(frozen=True)
class JobMetric:
    """A metric of a job.

    Attributes:
        measure: An object with `update`, `compute` and `reset`, or a function `(outputs, labels) -> number`.
        better: Which of two values is the better one.
    """

    name: str
    measure: Any
    better: Literal["higher", "lower"]

    @property
    def by_batch(self) -> bool:
        """Return whether it takes batch after batch; else it gets all outputs and labels at once."""
        return adds_up(self.measure)


def checked_metrics(given: Mapping[str, Any]) -> tuple[JobMetric, ...]:
    """Check metrics by name, each a torchmetrics metric or a pair of a metric or function and what is better.

    Raises:
        JobError: a name is taken, or a value is no metric.
    """
    faults: list[str] = []
    metrics: list[JobMetric] = []
    for name, value in given.items():
        measure, better = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        known: Any = getattr(measure, "higher_is_better", None)
        better = better or {True: "higher", False: "lower"}.get(known)
        field = f"training.metrics.{name}"
        if not isinstance(name, str) or name in OWN_SCORES:
            faults.append(f"{field}: is measured anyway or is no name; give the metric another name")
        elif not (adds_up(measure) or callable(measure)) or isinstance(measure, type):
            faults.append(f"{field}: {measure!r} should be a torchmetrics metric or a function (outputs, labels)")
        elif better not in ("higher", "lower"):
            faults.append(f"{field}: does not say which value is better; give (metric, 'higher') or (metric, 'lower')")
        else:
            metrics.append(JobMetric(name, measure, "higher" if better == "higher" else "lower"))
    if faults:
        raise JobError(faults)
    return tuple(metrics)


def adds_up(measure: Any) -> bool:
    """Return whether a metric has the methods of torchmetrics'."""
    return all(callable(getattr(measure, method, None)) for method in ("update", "compute", "reset"))


class Tally:
    """The value of a metric over batches.

    Args:
        metric: The metric, which stays as it is.

    Attributes:
        fault: Why the value is no number, once it was asked for; else empty.
    """

    def __init__(self, metric: JobMetric) -> None:
        self.name, self.fault, self._metric = metric.name, "", metric
        self._measure = copy.deepcopy(metric.measure) if metric.by_batch else metric.measure
        self._batches: list[tuple[Tensor, Any]] = []
        if metric.by_batch:
            self._measure.reset()

    def add(self, outputs: Any, target: Any) -> None:
        """Take the outputs and the target of a batch."""
        if self.fault:
            return
        pair = prediction(outputs), labels_of(target)
        if not self._metric.by_batch:
            self._batches.append(pair)
            return
        try:
            with user_code(""), warnings.catch_warnings(action="ignore"):
                self._measure.update(*pair)
        except JobError as error:
            self.fault = f"metric {self.name} cannot be computed: {error}"

    def value(self) -> float | None:
        """Return the value; None where it is no finite number, or cannot be computed."""
        number: Any = math.nan
        if not self.fault:
            try:
                with user_code(""), warnings.catch_warnings(action="ignore"):
                    number = float(self.raw())
            except JobError as error:
                self.fault = f"metric {self.name} cannot be computed: {error}"
        if math.isfinite(number):
            return float(number)
        self.fault = self.fault or f"metric {self.name} is {number} on the test data"
        return None

    def raw(self) -> Any:
        """Return what the metric itself returns."""
        if self._metric.by_batch:
            return self._measure.compute()
        outputs, labels = zip(*self._batches, strict=True)
        return self._measure(torch.cat(outputs), torch.cat(labels))
