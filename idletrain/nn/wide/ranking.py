"""Compute precision, propensity-scored precision and nDCG of the k highest-scored labels.

Defined as in the Extreme Classification Repository; pure functions of arrays. Letters: N rows, K ranks, C labels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from idletrain.nn.data.csr import Csr

Float64s = NDArray[np.float64]


def hits(top_NK: NDArray[np.int64], truth: Csr) -> NDArray[np.bool_]:
    """Mark the predicted labels that are true `[N, K]`; -1 is no prediction."""
    span = int(max(top_NK.max(initial=0), truth.columns.max(initial=0))) + 2
    rows = np.repeat(np.arange(len(truth)), np.diff(truth.starts))
    true = rows * span + truth.columns  # ascending, as labels are within a row
    predicted = (np.arange(len(top_NK))[:, None] * span + top_NK).ravel()
    if not len(true):
        return np.zeros(top_NK.shape, np.bool_)
    at = np.minimum(np.searchsorted(true, predicted), len(true) - 1)
    correct: NDArray[np.bool_] = ((true[at] == predicted) & (top_NK.ravel() >= 0)).reshape(top_NK.shape)
    return correct


def precision(top_NK: NDArray[np.int64], truth: Csr) -> Float64s:
    """Return P@1, P@2, ..., P@K `[K]`: the share of the first k predictions that are true."""
    ranks = np.arange(1, top_NK.shape[1] + 1)
    result: Float64s = hits(top_NK, truth).cumsum(1).mean(0) / ranks
    return result


def ndcg(top_NK: NDArray[np.int64], truth: Csr) -> Float64s:
    """Return nDCG@1, ..., nDCG@K `[K]`: hits discounted by log2(rank + 1), divided by those of the best order."""
    K = top_NK.shape[1]
    discounts = 1 / np.log2(np.arange(2, K + 2))
    gain = (hits(top_NK, truth) * discounts).cumsum(1)
    ranks = np.arange(1, K + 1)
    best = discounts.cumsum()[np.minimum(ranks, np.diff(truth.starts).clip(1)[:, None]) - 1]
    result: Float64s = (gain / best).mean(0)
    return result


def propensities(counts_C: NDArray[np.int64], rows: int, a: float = 0.55, b: float = 1.5) -> Float64s:
    """Estimate the probability that a relevant label is in the data `[C]` (Jain et al., KDD 2016, section 4.1).

    Args:
        counts_C: Number of training rows of every label.
        rows: Number of training rows.
        a: 0.55; 0.6 for Amazon-670K, 0.5 for WikiLSHTC-325K (the repository's table).
        b: 1.5; 2.6 for Amazon-670K, 0.4 for WikiLSHTC-325K.
    """
    c = (np.log(rows) - 1) * (b + 1) ** a
    result: Float64s = 1 / (1 + c * np.exp(-a * np.log(counts_C + b)))
    return result


def propensity_precision(top_NK: NDArray[np.int64], truth: Csr, propensity_C: Float64s) -> Float64s:
    """Return PSP@1, ..., PSP@K `[K]`: hits weighted by 1 / propensity, divided by those of the best prediction."""
    K = top_NK.shape[1]
    weight_C = 1 / propensity_C
    gain = (hits(top_NK, truth) * weight_C[top_NK.clip(0)]).cumsum(1).sum(0)
    rows = np.repeat(np.arange(len(truth)), np.diff(truth.starts))
    weights = weight_C[truth.columns]
    order = np.lexsort((-weights, rows))
    rank = np.arange(len(order)) - truth.starts[rows]
    first = rank < K
    best = np.bincount(rank[first], weights[order][first], minlength=K).cumsum()
    result: Float64s = gain / np.maximum(best, np.finfo(np.float64).tiny)
    return result
