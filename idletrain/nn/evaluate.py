"""Build, calibrate and score the assembled network."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.csr import Rows
from idletrain.nn.ist.randomness import generator, key
from idletrain.nn.program import IGNORED_LABEL, Loss, cross_entropy

# Samples that BatchNorm's statistics are estimated from: their error falls with the root of the number, and 8,192
# of Fashion-MNIST give the same accuracy to 0.1 points as all 60,000 at a seventh of the time.
STATISTICS_SAMPLES = 8192
EVALUATION_BATCH = 512  # samples per batch outside training
CONFIDENCE_BINS = 15  # Guo et al., arXiv 1706.04599, section 4
TEMPERATURES = tuple(2 ** (k / 4) for k in range(-16, 25))  # 1/16 to 64: beyond, no network learns
CALIBRATION_VALUES = 1 << 23  # 800,000 rows of 10 classes; 0.5 s of one core


def assembled(module: nn.Module, network: Sequence[Tensor]) -> nn.Module:
    """Return a copy of `module` whose parameters are the tensors of `network`, in the module's order, not copied."""
    memo = {
        id(p): nn.Parameter(tensor, requires_grad=p.requires_grad)
        for p, tensor in zip(module.parameters(), network, strict=True)
    }
    return copy.deepcopy(module, memo)


def estimate_statistics(module: nn.Module, samples: Samples, seed: int) -> None:
    """Set BatchNorm's running statistics to those of the whole network, which no subnet has seen.

    Dropout draws the same numbers every time; a last batch of one sample, which has no variance, is left out.
    """
    order = generator(seed, "statistics").permutation(len(samples))[:STATISTICS_SAMPLES]
    order = order[: len(order) - (len(order) % EVALUATION_BATCH == 1)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "statistics", "dropout") % 2**63)
        update_bn((inputs for inputs, _ in _batches(samples, order)), module)
    module.eval()


@dataclass(frozen=True)
class Score:
    """A network's quality on data that it was not trained on.

    Attributes:
        accuracy: Fraction of labels predicted correctly, P@1 for label sets; None where labels are not classes.
        loss: Mean loss over all labels that are not ignored.
        calibration_error: Expected calibration error: the mean distance of confidence from accuracy over bins of
            confidence, weighted by their size (Guo et al., arXiv 1706.04599); None without class probabilities.
        temperature: Divisor of the logits that gives the lowest loss; above 1 the network is overconfident.
    """

    accuracy: float | None
    loss: float
    calibration_error: float | None = None
    temperature: float | None = None


@torch.no_grad()
def score(module: nn.Module, samples: Samples, loss: Loss) -> Score:
    """Score a network on all samples."""
    module.eval()
    correct, total, values, weights = 0.0, 0, 0.0, 0
    calibration = Calibration()
    for inputs, labels in _batches(samples, np.arange(len(samples))):
        outputs = module(inputs)
        if hasattr(outputs, "hits"):  # of a very wide output
            weight = outputs.labelled(labels)
            correct += outputs.hits(labels)
            total += len(labels) if isinstance(labels, Rows) else weight
            if weight:
                values, weights = values + float(loss(outputs, labels)) * weight, weights + weight
            continue
        counted = labels != IGNORED_LABEL if loss is cross_entropy else torch.ones_like(labels, dtype=torch.bool)
        weight = int(counted.sum())
        if not weight:  # the mean over no label is NaN
            continue
        values, weights = values + float(loss(outputs, labels)) * weight, weights + weight
        if labels.dtype == torch.int64 and outputs.shape[:-1] == labels.shape:
            hits = (outputs.argmax(-1) == labels)[counted]
            calibration.add(outputs[counted], labels[counted])
        elif loss is nn.functional.binary_cross_entropy_with_logits:
            hits = (outputs > 0) == (labels > 0.5)
            calibration.add(
                torch.stack([-outputs / 2, outputs / 2], -1).flatten(0, -2), (labels > 0.5).long().flatten()
            )
        else:
            continue
        correct, total = correct + float(hits.sum()), total + hits.numel()
    accuracy, mean = correct / total if total else None, values / weights if weights else math.nan
    return Score(accuracy, mean, calibration.error, calibration.temperature)


class Calibration:
    """Compare confidence with accuracy, batch by batch, on at most `CALIBRATION_VALUES` logits in total."""

    def __init__(self) -> None:
        self._values_left = CALIBRATION_VALUES
        self._losses_K = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
        # Per bin: the number of samples, their summed confidence, the number predicted correctly.
        self._bins = torch.zeros(3, CONFIDENCE_BINS, dtype=torch.float64)

    def add(self, logits_NC: Tensor, labels_N: Tensor) -> None:
        """Count a batch of logits `[N, C]` and their classes `[N]`, without rows of which either is none."""
        usable = (labels_N >= 0) & (labels_N < logits_NC.shape[-1]) & logits_NC.isfinite().all(-1)
        logits_NC, labels_N = logits_NC[usable], labels_N[usable]
        rows = min(len(labels_N), self._values_left // logits_NC.shape[-1])
        self._values_left -= rows * logits_NC.shape[-1]
        logits_NC, labels_N = logits_NC[:rows].double(), labels_N[:rows]
        for k, temperature in enumerate(TEMPERATURES):
            self._losses_K[k] += nn.functional.cross_entropy(logits_NC / temperature, labels_N, reduction="sum")
        confidence, predicted = logits_NC.softmax(-1).max(-1)
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
        """Return the temperature of lowest loss: fit a parabola to the best of `TEMPERATURES` and its neighbours."""
        if not self._bins[0].sum() or not self._losses_K.isfinite().all():
            return None
        k = int(self._losses_K.argmin().clamp(1, len(TEMPERATURES) - 2))
        left, middle, right = self._losses_K[k - 1 : k + 2].tolist()
        curvature = left - 2 * middle + right
        offset = min(1.0, max(-1.0, (left - right) / (2 * curvature))) if curvature > 0 else 0.0
        return float(TEMPERATURES[k] * (TEMPERATURES[1] / TEMPERATURES[0]) ** offset)


def _batches(samples: Samples, order: NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(order), EVALUATION_BATCH):
        yield samples.batch(order[start : start + EVALUATION_BATCH])
