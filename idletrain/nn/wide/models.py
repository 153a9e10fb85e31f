"""A network with sparse inputs and very many outputs: an embedding per feature, a hidden layer, a row per label.

Its output can be initialised from the data: a label's row starts as the mean hidden vector of its training rows (PIFA;
Prabhu et al., Parabel, WWW 2018). Letters: B rows of a batch, F features, H hidden, C labels, N rows, K ranks.
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

RANKING_BATCH = 256  # rows per batch outside training
RETRIEVED_LABELS = 200  # labels that sparse inference scores per row
RANKS = 5  # the Extreme Classification Repository reports 1, 3 and 5
COSINE_SCALE = 20.0  # largest logit of unit vectors: with a smaller one, a softmax over 100,000 labels cannot get sharp


class WideNetwork(nn.Module):
    """Score sparse rows: sum their embeddings, normalise to length `scale`, and apply a `SparseLinear`.

    Attributes:
        neuron_groups: The neuron group of every dimension of each parameter; None for one that is not cut.
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
        """Return hidden vectors `[B, H]`."""
        return functional.normalize(self.embeddings(x), dim=1) * self._scale

    def forward(self, x: Rows) -> Scores:
        scores: Scores = self.output(self.hidden(x))
        return scores

    @torch.no_grad()
    def start_from(self, samples: SparseSamples) -> None:
        """Initialise the output if `start` is `data`: centred unit vectors, zero for labels without rows."""
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
    """Make a network for extreme classification; a job names it as `model.factory`.

    Args:
        features: F, as the data's header says.
        hidden: H.
        labels: C, as the data's header says.
        sampler: How negative labels are drawn, see `SparseLinear`.
        start: Initialise the output from the data or at random.
        bias: Whether each label has a bias.
        scale: The length of hidden vectors.
        most_table_bytes: Limit on the memory of one shard's sampler tables.

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
    """Quality of a network's five best labels; element k - 1 is the value at k."""

    precision: NDArray[np.float64]
    ndcg: NDArray[np.float64]
    propensity_precision: NDArray[np.float64]


@torch.no_grad()
def rank_labels(
    module: nn.Module, samples: SparseSamples, train: SparseSamples | None = None, a: float = 0.55, b: float = 1.5
) -> Ranking:
    """Rank the labels of all rows exactly and compare with the true ones.

    Args:
        module: The network, set to evaluation mode.
        samples: The rows to rank.
        train: The training rows, whose label counts give propensities; the samples' own if None.
        a: See `propensities`.
        b: See `propensities`.
    """
    module.eval()
    top_NK = np.concatenate([_top(module, samples, index) for index in _batches(len(samples))])
    counted = train or samples
    counts_C = np.diff(counted.rows_of.starts)
    unseen = max(samples.census.labels, int(top_NK.max()) + 1) - len(counts_C)
    propensity_C = propensities(np.append(counts_C, np.zeros(max(0, unseen), counts_C.dtype)), len(counted), a, b)
    return Ranking(
        precision(top_NK, samples.y), ndcg(top_NK, samples.y), propensity_precision(top_NK, samples.y, propensity_C)
    )


@torch.no_grad()
def recall(module: nn.Module, samples: SparseSamples, keep: int = RETRIEVED_LABELS) -> tuple[float, float]:
    """Compare sparse inference with exact: return the share of the RANKS best that it retrieves, and its P@1.

    Raises:
        JobError: the sampler keeps no tables.
    """
    module.eval()
    recalls, correct = [], []
    for index in _batches(len(samples)):
        x, _ = samples.batch(index)
        scores = module(x)
        exact, sparse = scores.topk(RANKS)[1], scores.retrieved_topk(RANKS, keep)
        recalls.append((exact[:, :, None] == sparse[:, None, :]).any(2).float().mean(1))
        correct.append(hits(sparse[:, :1].numpy(), samples.y.only(index)))
    return float(torch.cat(recalls).mean()), float(np.concatenate(correct).mean())


def _top(module: nn.Module, samples: SparseSamples, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the best labels of some rows `[N, K]`, -1 where the network has fewer than RANKS."""
    top: NDArray[np.int64] = module(samples.batch(index)[0]).topk(RANKS)[1].numpy()
    return np.pad(top, ((0, 0), (0, RANKS - top.shape[1])), constant_values=-1)


def _batches(rows: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, rows, RANKING_BATCH):
        yield np.arange(start, min(start + RANKING_BATCH, rows))
