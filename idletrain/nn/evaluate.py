"""Build and score the assembled network."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idletrain.errors import user_code
from idletrain.nn.constant import ConstantPrediction
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.batches import call, labels_of, prediction, sample_count
from idletrain.nn.data.csr import Rows
from idletrain.nn.ist.modules import copied
from idletrain.nn.lightning import Validation
from idletrain.nn.program import IGNORED_LABEL, Loss, bce_with_logits, cross_entropy, model_loss
from idletrain.nn.user_metrics import OWN_SCORES, Tally

EVALUATION_BATCH = 512  # samples per batch outside training
CONFIDENCE_BINS = 15  # Guo et al., arXiv 1706.04599, section 4
TEMPERATURES = tuple(2 ** (k / 4) for k in range(-16, 25))  # 1/16 to 64: beyond, no network learns
CALIBRATION_VALUES = 1 << 23  # 800,000 rows of 10 classes; 0.5 s of one core


def assembled(module: nn.Module, network: Sequence[Tensor]) -> nn.Module:
    """Return a copy of `module` whose parameters that train are the first tensors of `network`, in order, not copied.

    The others are the values of buffers, which `statistics.set_buffers` takes.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    memo = {id(p): nn.Parameter(tensor) for p, tensor in zip(parameters, network[: len(parameters)], strict=True)}
    return copied(module, memo)


@dataclass(frozen=True)
class Score:
    """A network's quality on data that it was not trained on.

    Attributes:
        accuracy: Fraction of labels predicted correctly, P@1 for label sets; None where labels are not classes.
        loss: Mean loss over all labels that are not ignored.
        calibration_error: Expected calibration error: the mean distance of confidence from accuracy over bins of
            confidence, weighted by their size (Guo et al., arXiv 1706.04599); None without class probabilities.
        constant_loss: Loss of the best prediction that is the same for all samples; None for losses of which it is not
            known (see `idletrain.nn.constant`).
        temperature: Best temperature: the divisor of the logits that gives the lowest loss; above 1 the network is
            overconfident.
        metrics: The job's metrics, and what a validation_step logs, by name; None where one is no number.
    """

    accuracy: float | None
    loss: float
    calibration_error: float | None = None
    temperature: float | None = None
    constant_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def of(self, name: str) -> float | None:
        """Return the loss, the accuracy or a metric by its name; None where it is no finite number."""
        value = {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}.get(name)
        return value if value is not None and math.isfinite(value) else None


@torch.no_grad()
def score(
    module: nn.Module,
    samples: Samples,
    loss: Loss,
    tallies: Sequence[Tally] = (),
    numbers: NDArray[np.int64] | None = None,
) -> Score:
    """Score a network by the loss, these tallies and what a LightningModule's validation_step logs.

    Args:
        module: The network, which is left in evaluation mode.
        samples: The test data.
        loss: The loss.
        tallies: Metrics, empty before.
        numbers: The samples to use `[N]`; all of them if None.

    Raises:
        JobError: that fails.
    """
    module.eval()
    validation = Validation(module)
    correct, total, values, weights = 0.0, 0, 0.0, 0
    calibration, constant = Calibration(), ConstantPrediction(loss)
    for inputs, target in batches(samples, np.arange(len(samples)) if numbers is None else numbers):
        outputs = _run("model", call, module, inputs)
        if hasattr(outputs, "hits"):  # of a very wide output
            weight = outputs.labelled(target)
            correct += outputs.hits(target)
            total += len(target) if isinstance(target, Rows) else weight
            if weight:
                values += float(_run("training.loss", loss, outputs, target)) * weight
                weights += weight
            continue
        for tally in tallies:
            tally.add(outputs, target)
        validation.add(inputs)
        constant.add(outputs, target)
        logits, labels = prediction(outputs), labels_of(target)
        if not isinstance(labels, Tensor):  # one to count for each sample
            labels = torch.zeros(sample_count(inputs, target))
        are_classes = labels.dtype == torch.int64 and isinstance(logits, Tensor) and logits.shape[:-1] == labels.shape
        skips = loss is cross_entropy or (loss is model_loss and labels.dtype == torch.int64)
        counted = labels != IGNORED_LABEL if skips else torch.ones_like(labels, dtype=torch.bool)
        weight = int(counted.sum())
        if not weight:  # the mean over no label is NaN
            continue
        value = float(_run("training.loss", loss, outputs, target))
        values, weights = values + value * weight, weights + weight
        if are_classes and (loss is not model_loss or is_of_classes(value, outputs, target)):
            hits = (logits.argmax(-1) == labels)[counted]
            calibration.add(logits[counted], labels[counted])
        elif loss in (bce_with_logits, nn.functional.binary_cross_entropy_with_logits):
            hits = (logits > 0) == (labels > 0.5)
            calibration.add(torch.stack([-logits / 2, logits / 2], -1).flatten(0, -2), (labels > 0.5).long().flatten())
        else:
            continue
        correct, total = correct + float(hits.sum()), total + hits.numel()
    accuracy, mean = correct / total if total else None, values / weights if weights else math.nan
    logged = {name: value for name, value in validation.values().items() if name not in OWN_SCORES}
    metrics = logged | {tally.name: tally.value() for tally in tallies}
    return Score(accuracy, mean, calibration.error, calibration.temperature, constant.loss, metrics)


def _run(field: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return what the user's module or loss makes of test data.

    Raises:
        JobError: it raises something.
    """
    with user_code(f"{field}: fails on test data (", ")"):
        return function(*inputs)


def is_of_classes(value: float, outputs: Any, target: Any) -> bool:
    """Return True if a model's own loss is the cross entropy of its logits and labels as they stand.

    A language model's is not: it compares each logit with the next label, so that its logits do not predict its labels.
    """
    logits, labels = prediction(outputs), labels_of(target)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return False
    if labels.dtype != torch.int64 or logits.shape[:-1] != labels.shape:
        return False
    return math.isclose(float(cross_entropy(outputs, target).detach()), value, rel_tol=1e-4, abs_tol=1e-6)


class Calibration:
    """Compare confidence with accuracy, batch by batch, on at most `CALIBRATION_VALUES` logits in total."""

    def __init__(self) -> None:
        self._values_left = CALIBRATION_VALUES
        self._batches: list[tuple[Tensor, Tensor]] = []
        # Per bin: the number of samples, their summed confidence, the number predicted correctly.
        self._bins = torch.zeros(3, CONFIDENCE_BINS, dtype=torch.float64)

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        """Count a batch of logits `[N, C]` and their classes `[N]`, without rows of which either is none."""
        usable = (labels_N >= 0) & (labels_N < logits_NC.shape[-1]) & logits_NC.isfinite().all(-1)
        rows = min(int(usable.sum()), self._values_left // logits_NC.shape[-1])
        if not rows:
            return
        self._values_left -= rows * logits_NC.shape[-1]
        logits_NC, labels_N = logits_NC[usable][:rows], labels_N[usable][:rows]
        self._batches.append((logits_NC, labels_N))
        confidence, predicted = logits_NC.double().softmax(-1).max(-1)
        bins = (confidence * CONFIDENCE_BINS).long().clamp(max=CONFIDENCE_BINS - 1)
        for row, values in zip(self._bins, (torch.ones(rows), confidence, predicted == labels_N), strict=True):
            row.index_add_(0, bins, values.double())

    @property
    def error(self) -> float | None:
        """Return the expected calibration error, from 0 to 1, or None without samples."""
        samples, confidence, correct = self._bins
        return float((confidence - correct).abs().sum() / samples.sum()) if samples.sum() else None

    @property
    def temperature(self) -> float | None:
        """Return the temperature of lowest loss: fit a parabola to the best of `TEMPERATURES` and its neighbours.

        The loss is convex in the temperature's inverse, so that bisection finds the best.
        """
        if not self._batches:
            return None
        loss = functools.cache(self._loss)
        last = len(TEMPERATURES) - 1
        k = bisect.bisect_left(range(last), True, key=lambda k: loss(k) <= loss(k + 1))
        k = min(max(k, 1), last - 1)
        left, middle, right = (loss(k + offset) for offset in (-1, 0, 1))
        if not math.isfinite(left + middle + right):
            return None
        curvature = left - 2 * middle + right
        offset = min(1.0, max(-1.0, (left - right) / (2 * curvature))) if curvature > 0 else 0.0
        return float(TEMPERATURES[k] * (TEMPERATURES[1] / TEMPERATURES[0]) ** offset)

    def _loss(self, k: int) -> float:
        """Return the summed loss at one of `TEMPERATURES`."""
        return sum(
            float(nn.functional.cross_entropy(logits_NC.double() / TEMPERATURES[k], labels_N, reduction="sum"))
            for logits_NC, labels_N in self._batches
        )


def batches(samples: Samples, order: NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    """Yield the samples of these numbers `[N]` in batches of EVALUATION_BATCH: inputs and labels.

    Raises:
        JobError: the data's own code fails.
    """
    for start in range(0, len(order), EVALUATION_BATCH):
        index = order[start : start + EVALUATION_BATCH]
        with user_code(f"data: one of its samples {index[0]} to {index[-1]} cannot be read (", "); mend the data"):
            batch = samples.batch(index)
        yield batch
