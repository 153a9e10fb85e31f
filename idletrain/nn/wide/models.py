"""A network with sparse inputs and very many outputs: one embedding a feature, one hidden layer, one row a label.

Its first values can come from the data: a label's row starts as the mean of its own rows' hidden vectors (PIFA; Prabhu
et al., Parabel, WWW 2018). Letters: B rows of a batch, F features, H hidden, C labels, N rows, K ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from idletrain.nn.data.csr import Rows
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.wide.layers import Scores, SparseEmbeddingBag, SparseLinear
from idletrain.nn.wide.ranking import hits, ndcg, precision, propensities, propensity_precision
from idletrain.nn.wide.samplers import DEFAULT

RANKING_BATCH = 256  # rows at a time outside training
RETRIEVED_LABELS = 200  # labels a row that sparse inference scores
RANKS = 5  # the Extreme Classification Repository reports 1, 3 and 5
COSINE_SCALE = 20.0  # logits of unit vectors reach so far: with less, a softmax over 100,000 labels cannot get sharp


class WideNetwork(nn.Module):
    """Sparse rows to scores: a bag of embeddings, brought to length `scale`, and a `SparseLinear`.

    Attributes:
        neuron_groups: What can be partitioned: per parameter, the group of every dimension.
    """

    neuron_groups: Mapping[str, tuple[str | None, ...]] = {
        "embeddings.weight": (None, "hidden"),
        "output.weight": ("labels", "hidden"),
        "output.bias": ("labels",),
    }

    def __init__(self, embeddings: SparseEmbeddingBag, output: SparseLinear, scale: float, start: str) -> None:
        super().__init__()
        self.embeddings, self.output = embeddings, output
        self._scale, self._start = scale, start

    def hidden(self, x: Rows) -> Tensor:
        """Hidden vectors `[B, H]`."""
        return functional.normalize(self.embeddings(x), dim=1) * self._scale

    def forward(self, x: Rows) -> Scores:
        scores: Scores = self.output(self.hidden(x))
        return scores

    @torch.no_grad()
    def start_from(self, samples: SparseSamples) -> None:
        """Set the output's rows from the data, if asked to: unit vectors, centred, zero for labels without rows."""
        if self._start == "random":
            return
        weight = self.output.weight
        sums_CH, total_H = torch.zeros(weight.shape), torch.zeros(weight.shape[1])
        for index in _batches(len(samples)):
            x, y = samples.batch(index)
            hidden_BH = functional.normalize(self.embeddings(x), dim=1)
            total_H += hidden_BH.sum(0)
            sums_CH.index_add_(0, y.indices, hidden_BH[y.row_numbers()])
        counts_C = torch.zeros(len(weight), dtype=torch.int64)
        counts_C[: samples.census.labels] = torch.from_numpy(np.diff(samples.rows_of.starts))
        seen = (counts_C > 0).nonzero()[:, 0]
        for rows in torch.split(seen, 1 << 16):
            means = sums_CH[rows] / counts_C[rows, None] - total_H / len(samples)
            weight[rows] = functional.normalize(means, dim=1).to(weight.dtype)
        weight[counts_C == 0] = 0


def wide(
    features: int,
    hidden: int,
    labels: int,
    *,
    sampler: str | Mapping[str, Any] = DEFAULT["name"],
    start: Literal["data", "random"] = "data",
    bias: bool = True,
    scale: float = COSINE_SCALE,
    most_table_bytes: int | None = None,
) -> WideNetwork:
    """A network for extreme classification, for a job's `model.factory`.

    Args:
        features: F, as the data's header says.
        hidden: H.
        labels: C, as the data's header says.
        sampler: How negatives are drawn, see `SparseLinear`.
        start: Where the output's first values come from.
        bias: Whether labels have one.
        scale: The length of hidden vectors.
        most_table_bytes: What the sampler's tables of one shard may take.

    Raises:
        ValueError: a size is below 1, or `start` is unknown.
    """
    if min(features, hidden, labels) < 1:
        raise ValueError(f"features {features}, hidden {hidden} and labels {labels} should be positive")
    if start not in ("data", "random"):
        raise ValueError(f"start {start!r} should be data or random")
    output = SparseLinear(hidden, labels, bias=bias, sampler=sampler, most_table_bytes=most_table_bytes)
    return WideNetwork(SparseEmbeddingBag(features, hidden), output, scale, start)


@dataclass(frozen=True)
class Ranking:
    """How good a network's five best labels are: element k - 1 is the figure at k."""

    precision: NDArray[np.float64]
    ndcg: NDArray[np.float64]
    propensity_precision: NDArray[np.float64]


@torch.no_grad()
def rank_labels(
    module: nn.Module, samples: SparseSamples, train: SparseSamples | None = None, a: float = 0.55, b: float = 1.5
) -> Ranking:
    """Rank the labels of all rows exactly and compare with the true ones.

    Args:
        train: The training rows, whose label counts give propensities; the samples' own if None.
        a: See `propensities`.
        b: See `propensities`.
    """
    module.eval()
    top_NK = np.concatenate([_top(module, samples, index) for index in _batches(len(samples))])
    known = train or samples
    counts_C = np.diff(known.rows_of.starts)
    unseen = max(samples.census.labels, int(top_NK.max()) + 1) - len(counts_C)
    propensity_C = propensities(np.append(counts_C, np.zeros(max(0, unseen), counts_C.dtype)), len(known), a, b)
    return Ranking(
        precision(top_NK, samples.y), ndcg(top_NK, samples.y), propensity_precision(top_NK, samples.y, propensity_C)
    )


@torch.no_grad()
def recall(
    module: nn.Module, samples: SparseSamples, keep: int = RETRIEVED_LABELS, k: int = RANKS
) -> tuple[float, float]:
    """Sparse inference through the tables against exact: which share of the exact k best it finds, and its P@1.

    Raises:
        JobError: the sampler keeps no tables.
    """
    module.eval()
    found, right = [], []
    for index in _batches(len(samples)):
        x, _ = samples.batch(index)
        scores = module(x)
        exact, sparse = scores.topk(k)[1], scores.retrieved_topk(k, keep)
        found.append((exact[:, :, None] == sparse[:, None, :]).any(2).float().mean(1))
        right.append(hits(sparse[:, :1].numpy(), samples.y.only(index)))
    return float(torch.cat(found).mean()), float(np.concatenate(right).mean())


def _top(module: nn.Module, samples: SparseSamples, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The best labels of some rows, -1 where the network has fewer than RANKS."""
    top: NDArray[np.int64] = module(samples.batch(index)[0]).topk(RANKS)[1].numpy()
    return np.pad(top, ((0, 0), (0, RANKS - top.shape[1])), constant_values=-1)


def _batches(rows: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, rows, RANKING_BATCH):
        yield np.arange(start, min(start + RANKING_BATCH, rows))
