"""How good are the k highest-scored labels? Precision, propensity-scored precision and nDCG at k.

As the Extreme Classification Repository defines them; pure functions of arrays. Letters: N rows, K ranks, C labels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from idletrain.nn.data.csr import Csr

Float64s = NDArray[np.float64]


def hits(top_NK: NDArray[np.int64], truth: Csr) -> NDArray[np.bool_]:
    """Whether each predicted label is one of its row's, `[N, K]`; -1 predicts nothing."""
    span = int(max(top_NK.max(initial=0), truth.columns.max(initial=0))) + 2
    rows = np.repeat(np.arange(len(truth)), np.diff(truth.starts))
    known = rows * span + truth.columns  # ascending, as labels are within a row
    asked = (np.arange(len(top_NK))[:, None] * span + top_NK).ravel()
    if not len(known):
        return np.zeros(top_NK.shape, np.bool_)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    found: NDArray[np.bool_] = ((known[at] == asked) & (top_NK.ravel() >= 0)).reshape(top_NK.shape)
    return found


def precision(top_NK: NDArray[np.int64], truth: Csr) -> Float64s:
    """P@1, P@2, ..., P@K: the share of the first k predictions that are right, `[K]`."""
    ranks = np.arange(1, top_NK.shape[1] + 1)
    result: Float64s = hits(top_NK, truth).cumsum(1).mean(0) / ranks
    return result


def ndcg(top_NK: NDArray[np.int64], truth: Csr) -> Float64s:
    """nDCG@1, ..., nDCG@K `[K]`: hits discounted by log2(rank + 1), over what the best order would give."""
    K = top_NK.shape[1]
    discounts = 1 / np.log2(np.arange(2, K + 2))
    gained = (hits(top_NK, truth) * discounts).cumsum(1)
    ranks = np.arange(1, K + 1)
    best = discounts.cumsum()[np.minimum(ranks, np.diff(truth.starts).clip(1)[:, None]) - 1]
    result: Float64s = (gained / best).mean(0)
    return result


def propensities(counts_C: NDArray[np.int64], rows: int, a: float = 0.55, b: float = 1.5) -> Float64s:
    """How likely a relevant label is to be in the data, by its training rows (Jain et al., KDD 2016, section 4.1).

    Args:
        counts_C: Training rows of every label.
        rows: Training rows in all.
        a: 0.55; 0.6 for Amazon-670K, 0.5 for WikiLSHTC-325K (the repository's table).
        b: 1.5; 2.6 for Amazon-670K, 0.4 for WikiLSHTC-325K.
    """
    c = (np.log(rows) - 1) * (b + 1) ** a
    result: Float64s = 1 / (1 + c * np.exp(-a * np.log(counts_C + b)))
    return result


def propensity_precision(top_NK: NDArray[np.int64], truth: Csr, propensity_C: Float64s) -> Float64s:
    """PSP@1, ..., PSP@K `[K]`: hits weighted by 1 / propensity, over what the best prediction would give."""
    K = top_NK.shape[1]
    weight_C = 1 / propensity_C
    ours = (hits(top_NK, truth) * weight_C[top_NK.clip(0)]).cumsum(1).sum(0)
    rows = np.repeat(np.arange(len(truth)), np.diff(truth.starts))
    weights = weight_C[truth.columns]
    order = np.lexsort((-weights, rows))
    rank = np.arange(len(order)) - truth.starts[rows]
    first = rank < K
    best = np.bincount(rank[first], weights[order][first], minlength=K).cumsum()
    result: Float64s = ours / np.maximum(best, np.finfo(np.float64).tiny)
    return result
