"""Find the loss of the best prediction that is the same for every sample: a network with no lower one is of no use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from idletrain.nn.data.batches import labels_of, prediction
from idletrain.nn.program import IGNORED_LABEL, Loss, bce_with_logits, cross_entropy, mse
from idletrain.nn.user_metrics import JobMetric

BINARY = (bce_with_logits, nn.functional.binary_cross_entropy_with_logits)
SQUARED = (mse, nn.functional.mse_loss)
MAE = JobMetric("MAE", lambda outputs, labels: (outputs - labels).abs().mean(), "lower")


class ConstantPrediction:
    """The best constant prediction, from the labels batch by batch.

    Args:
        loss: The loss. Of others than cross entropy, squared error and binary cross entropy nothing is known.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._counts_K = torch.zeros(0, dtype=torch.float64)
        self._samples = 0
        self._sums_D, self._squares_D = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)

    def add(self, outputs: object, target: object) -> None:
        """Count a batch's labels."""
        labels, values = labels_of(target), prediction(outputs)
        if not isinstance(labels, Tensor) or not isinstance(values, Tensor):
            return
        if self._loss is cross_entropy and labels.dtype == torch.int64:
            counted = labels[labels != IGNORED_LABEL].flatten()
            counts_K = torch.bincount(counted[counted >= 0]).double()
            size = max(len(counts_K), len(self._counts_K))
            self._counts_K = _padded(self._counts_K, size) + _padded(counts_K, size)
        elif self._loss in (*SQUARED, *BINARY) and labels.shape == values.shape:
            labels_ND = labels.double().reshape(len(labels), -1)
            if not self._samples:
                self._sums_D = self._squares_D = torch.zeros(labels_ND.shape[1], dtype=torch.float64)
            if labels_ND.shape[1] == len(self._sums_D):
                self._samples += len(labels_ND)
                self._sums_D = self._sums_D + labels_ND.sum(0)
                self._squares_D = self._squares_D + labels_ND.square().sum(0)

    @property
    def loss(self) -> float | None:
        """Return its mean loss; None if it is not known."""
        if self._counts_K.sum() > 0:
            return _entropy(self._counts_K / self._counts_K.sum())
        if not self._samples:
            return None
        mean_D = self._sums_D / self._samples
        if self._loss in BINARY:
            return float(torch.stack([-torch.xlogy(p, p) for p in (mean_D, 1 - mean_D)]).sum(0).mean())
        return float((self._squares_D / self._samples - mean_D.square()).clamp(min=0.0).mean())


def _padded(counts_K: Tensor, size: int) -> Tensor:
    return nn.functional.pad(counts_K, (0, size - len(counts_K)))


def _entropy(shares_K: Tensor) -> float:
    return float(-torch.xlogy(shares_K, shares_K).sum())
