"""The first and the last layer of a network with sparse inputs and very many outputs; any module fits between them.

Letters: B rows of a batch, F features, H hidden, C labels, A labels active in a batch, Z entries of sparse rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from idletrain.errors import JobError
from idletrain.nn.data.csr import Rows
from idletrain.nn.optim import kernels
from idletrain.nn.program import IGNORED_LABEL
from idletrain.nn.wide.samplers import DEFAULT, Sampler, retrieves, sampler_of
from idletrain.nn.wide.sparse_autograd import EmbeddingSum, JointLogSumExp, JointSoftmax, SharedHidden, TakeRows

LOGITS_BLOCK_BYTES = 1 << 26  # scores computed at a time when every label is scored
SLIDE_REBUILD = 50  # steps between rebuilds: SLIDE's 6,400 samples at its batch of 128


class SparseEmbeddingBag(nn.Module):
    """Sum the embeddings of a sparse row's features, each times its value; no bias.

    Its gradient is row-sparse: one row for each feature that occurs in the batch.

    Args:
        features: F, the number of embeddings.
        width: H, the size of each.
    """

    sparse_input = True  # others test for this attribute, so that they need not import Numba

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, width))
        nn.init.normal_(self.weight, std=1 / math.sqrt(width))

    def forward(self, x: Rows) -> Tensor:
        """Embed B sparse rows; return `[B, H]`.

        Raises:
            ValueError: a feature number is out of range.
        """
        if self.weight.is_meta:
            return self.weight.new_empty(len(x), self.weight.shape[1])
        _check_within(x.indices, len(self.weight), "feature")
        result: Tensor = EmbeddingSum.apply(self.weight, x)  # type: ignore[no-untyped-call]
        return result


class SparseLinear(nn.Module):
    """A linear layer with very many outputs (labels), of which a training batch computes only a few.

    It returns `Scores`, which computes the loss over a batch's active labels, or the exact best labels. All rows of a
    batch share one active set, so that the work is one gather and one dense product.

    Args:
        hidden: H, its inputs.
        labels: C, its outputs.
        bias: Whether each label has a bias.
        sampler: How negative labels are drawn, a name or mapping; see
            `idletrain.nn.wide.samplers.SAMPLERS`.
        rebuild_every: Training batches between two rebuilds of the sampler's tables; 0 if only `rebuild` does it. In
            a job they are rebuilt at the start of every round instead.
        rebuild_growth: Factor by which that interval grows with each rebuild (SLIDE's exponential decay).
        dtype: float32 or bfloat16, in which the weight is stored.
        most_table_bytes: Limit on the tables' memory, in a job on that of one shard; None for no limit.

    Attributes:
        labels_here: The network's labels that this layer's rows stand for, ascending `[C]`; None for all of them.
        together: Collectives with the other shards if all train as one softmax (Distributed SLIDE, arXiv 2201.12667).
        drawn_batches, fallbacks: Batches that the sampler drew labels for, and those of them without a retrieved label.

    Raises:
        JobError: the sampler is unknown; or, at the first batch, its tables would exceed `most_table_bytes`.
    """

    very_wide = True  # others test for this attribute, so that they need not import Numba

    def __init__(
        self,
        hidden: int,
        labels: int,
        *,
        bias: bool = True,
        sampler: str | Mapping[str, Any] = DEFAULT["name"],
        rebuild_every: int = SLIDE_REBUILD,
        rebuild_growth: float = 1.0,
        dtype: torch.dtype = torch.float32,
        most_table_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.sampler: Sampler = sampler_of(sampler)
        self._most_table_bytes = most_table_bytes
        self.weight = nn.Parameter(torch.empty(labels, hidden))
        nn.init.normal_(self.weight, std=1 / math.sqrt(hidden))
        self.weight.data = self.weight.data.to(dtype)
        self.bias = nn.Parameter(torch.zeros(labels)) if bias else None
        self.labels_here: NDArray[np.int64] | None = None
        self.together: JointSoftmax | None = None
        self.drawn_batches = self.fallbacks = 0
        self._rebuild_every, self._rebuild_growth = rebuild_every, rebuild_growth
        self._until_rebuild, self._interval, self._builds = 0, float(rebuild_every), 0
        self._order_C: NDArray[np.int64] | None = None
        self._distinct: kernels.Distinct | None = None

    def forward(self, hidden: Tensor) -> Scores:
        """Return the scores of hidden vectors `[..., H]` for every label; none is computed yet."""
        if self.training and self.together:
            hidden = SharedHidden.apply(hidden, self.together)  # type: ignore[no-untyped-call]
        return Scores(hidden, self)

    @property
    def retrieves(self) -> bool:
        """Return whether the sampler keeps tables of the rows."""
        return retrieves(self.sampler)

    def learn_counts(self, counts_C: NDArray[np.int64]) -> None:
        """Rank the labels by their numbers of training rows `[C]`, which log-uniform draws follow."""
        self._order_C = np.argsort(-counts_C, kind="stable")
        if not self.retrieves:
            self.sampler.build(self.weight.detach()[:0], self._order_C, 0)

    def check_tables(self, labels: int) -> None:
        """Check that the sampler's tables over so many labels keep to `most_table_bytes`.

        Raises:
            JobError: they would take more.
        """
        needed, allowed = self.sampler.nbytes(labels, self.weight.shape[1]), self._most_table_bytes
        if allowed is not None and needed > allowed:
            raise JobError(
                f"sampler: its tables over {labels} labels take {needed / 2**20:.1f} MiB and {allowed / 2**20:.1f} MiB "
                "are allowed; use fewer tables, another sampler or a larger most_table_bytes"
            )

    def rebuild(self, seed: int, rows_CH: Tensor | None = None) -> None:
        """Build the sampler's tables over the weight as it is, or over other rows `[C, H]`.

        Raises:
            ValueError: a row is not finite.
        """
        self.sampler.build(self.weight.detach() if rows_CH is None else rows_CH, self._order_C, seed)

    def hold(self, labels: NDArray[np.int64] | None) -> None:
        """Set the network's labels that the rows stand for (None: all), and leave rebuilds to the caller."""
        self.labels_here = labels
        self._rebuild_every = 0

    def rows_for(self, labels: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Look up a batch's labels in this layer.

        Returns:
            Row numbers in this layer; the batch row that each belongs to; and its share of that row's target, which is
            split equally over the row's labels in this layer, or over all of them if shards train together; each `[Z]`.

        Raises:
            ValueError: a label number is out of range.
        """
        owner, ids = labels.row_numbers(), labels.indices
        if self.labels_here is not None:
            here = torch.from_numpy(self.labels_here)
            rows = torch.searchsorted(here, ids).clamp_(max=len(here) - 1)
            held = here[rows] == ids
            owner, ids = owner[held], rows[held]
        else:
            _check_within(ids, len(self.weight), "label")
        counts = labels.offsets.diff() if self.together else torch.bincount(owner, minlength=len(labels))
        share = 1 / counts.clamp(min=1)
        return ids, owner, share[owner]

    def active_set(self, hidden_BH: Tensor, ids: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Choose the labels that one training batch computes.

        Args:
            hidden_BH: The batch's hidden vectors.
            ids: Its own labels `[Z]`.

        Returns:
            The active labels `[A]`, ascending and unique, or None for all of them; the index of each of `ids` among
            them `[Z]`; and the sampling correction to add to their logits `[A]`.
        """
        if self._rebuild_every:
            self._count_down()
        draw = self.sampler.draw(hidden_BH, self.weight.detach())
        self.drawn_batches += 1
        self.fallbacks += draw.fell_back
        if draw.everything:
            return None, ids, torch.zeros(())
        if self._distinct is None:
            self._distinct = kernels.Distinct(len(self.weight))
        unique, positions = self._distinct(np.concatenate([ids.numpy(), draw.certain, draw.drawn]))
        known = len(ids) + len(draw.certain)
        certain = int(positions[:known].max(initial=-1)) + 1  # labels are in order of appearance, so these come first
        correction = np.zeros(len(unique), np.float32)
        correction[certain:] = -np.log(draw.probability(unique[certain:]))
        order = np.argsort(unique)  # a row-sparse gradient needs its rows ascending
        sorted_at = np.empty_like(order)
        sorted_at[order] = np.arange(len(order))
        own = sorted_at[positions[: len(ids)]]
        return torch.from_numpy(unique[order]), torch.from_numpy(own), torch.from_numpy(correction[order])

    def _count_down(self) -> None:
        if self._until_rebuild == 0:
            self.check_tables(len(self.weight))
            self.rebuild(self._builds)
            self._builds += 1
            self._until_rebuild = round(self._interval)
            self._interval *= self._rebuild_growth
        self._until_rebuild -= 1


class Scores:
    """A batch's scores for every label; each method computes only the scores that it needs."""

    def __init__(self, hidden: Tensor, layer: SparseLinear) -> None:
        self.hidden_BH, self._layer = hidden.flatten(0, -2), layer

    @property
    def shape(self) -> torch.Size:
        """Rows of the batch and labels."""
        return torch.Size([len(self.hidden_BH), len(self._layer.weight)])

    def loss(self, labels: Rows | Tensor) -> Tensor:
        """Compute the softmax cross entropy `[]` against label sets; a row's labels share its target equally.

        The softmax is over the active labels in training, and over all in evaluation. Rows without a label in this
        layer do not count. For shards that train together the gradients are those of one softmax; the value is not.

        Args:
            labels: Label sets, or one class per row `[...]`.
        """
        layer = self._layer
        sets = _label_sets(labels)
        ids, owner, share = layer.rows_for(sets)
        if layer.training and layer.together:
            return self._joint_loss(sets, ids, owner, share, layer.together)
        if not len(ids):
            return self.hidden_BH.sum() * 0
        rows = len(torch.unique_consecutive(owner))
        if not layer.training:
            return self._exact_loss(ids, owner, share) / rows
        hidden = self.hidden_BH
        active, targets, correction = layer.active_set(hidden.detach(), ids)
        logits_BA = self._logits(active).add_(correction) if active is not None else self._logits(None)
        if rows == len(ids) == len(hidden):  # one label a row: torch's own loss, the same bits
            return functional.cross_entropy(logits_BA, targets)
        chosen = functional.log_softmax(logits_BA, 1)[owner, targets]
        return -(chosen * share).sum() / rows

    def _joint_loss(self, sets: Rows, ids: Tensor, owner: Tensor, share: Tensor, shards: JointSoftmax) -> Tensor:
        active, targets, correction = self._layer.active_set(self.hidden_BH.detach(), ids)
        logits_BA = self._logits(active).add_(correction)
        all_B: Tensor = JointLogSumExp.apply(logits_BA.logsumexp(1), shards)  # type: ignore[no-untyped-call]
        labelled = sets.offsets.diff() > 0
        own = (logits_BA[owner, targets] * share).sum()
        return (all_B[labelled].sum() - own) / labelled.sum().clamp(min=1)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the scores and labels `[B, k]` of every row's k best labels, exact, computed in blocks of labels."""
        best = [self._logits(block).topk(min(k, block.stop - block.start)) for block in self._blocks()]
        scores = torch.cat([part.values for part in best], 1)
        ids = torch.cat([block.start + p.indices for block, p in zip(self._blocks(), best, strict=True)], 1)
        top = scores.topk(min(k, scores.shape[1]))
        return top.values, ids.gather(1, top.indices)

    def retrieved_topk(self, k: int, keep: int) -> Tensor:
        """Return the k best of the `keep` labels retrieved for each row `[B, k]`, -1 where fewer are retrieved.

        Raises:
            JobError: the sampler keeps no tables.
        """
        parts = getattr(self._layer.sampler, "parts", [self._layer.sampler])
        tables = next((part.tables for part in parts if hasattr(part, "tables")), None)
        if tables is None:
            raise JobError("sampler: sparse inference needs tables; use simhash, dwta or inverted-file")
        weight, result = self._layer.weight.detach(), torch.full((len(self.hidden_BH), k), -1)
        for b, hidden_H in enumerate(self.hidden_BH.detach()):
            candidates = torch.from_numpy(np.unique(tables.retrieve(hidden_H[None], weight, keep)))
            if len(candidates):
                best = Scores(hidden_H[None], self._layer)._logits(candidates)[0].topk(min(k, len(candidates))).indices
                result[b, : len(best)] = candidates[best]
        return result

    def labelled(self, labels: Rows | Tensor) -> int:
        """Count the rows that have a label."""
        return int((_label_sets(labels).offsets.diff() > 0).sum())

    def hits(self, labels: Rows | Tensor) -> int:
        """Count the rows whose best-scored label is one of their own."""
        sets = _label_sets(labels)
        best = self.topk(1)[1][:, 0]
        return int((best[sets.row_numbers()] == sets.indices).sum())

    def dense(self) -> Tensor:
        """Return all scores `[B, C]`."""
        return self._logits(None)

    def _logits(self, active: Tensor | slice | None) -> Tensor:
        """Score gathered rows, a slice of rows (without copying them), or all if None; `[B, A]`."""
        layer = self._layer
        weight: Tensor = layer.weight
        bias: Tensor | None = layer.bias
        if isinstance(active, slice):
            weight, bias = weight[active], None if bias is None else bias[active]
        elif active is not None:
            weight = TakeRows.apply(weight, active)  # type: ignore[no-untyped-call]
            bias = None if bias is None else TakeRows.apply(bias, active)  # type: ignore[no-untyped-call]
        bias = None if bias is None else bias.to(weight.dtype)
        return functional.linear(self.hidden_BH.to(weight.dtype), weight, bias).float()

    def _blocks(self) -> list[slice]:
        """Cut the labels into blocks whose scores take LOGITS_BLOCK_BYTES."""
        labels, size = len(self._layer.weight), max(1, LOGITS_BLOCK_BYTES // (4 * max(1, len(self.hidden_BH))))
        return [slice(start, min(start + size, labels)) for start in range(0, labels, size)]

    def _exact_loss(self, ids: Tensor, owner: Tensor, share: Tensor) -> Tensor:
        total = torch.stack([self._logits(block).logsumexp(1) for block in self._blocks()]).logsumexp(0)
        bias = 0.0 if self._layer.bias is None else self._layer.bias[ids]
        own = (self.hidden_BH[owner] * self._layer.weight[ids].float()).sum(1) + bias
        return ((total[owner] - own) * share).sum()


def _check_within(ids: Tensor, size: int, what: str) -> None:
    for extreme in (ids.min(), ids.max()) if len(ids) else ():
        if not 0 <= int(extreme) < size:
            raise ValueError(f"{what} {int(extreme)} is beyond the layer's {size}, counted from 0")


def _label_sets(labels: Rows | Tensor) -> Rows:
    """Return label sets as they are, or made from one class per row `[...]`."""
    if isinstance(labels, Tensor):
        flat = labels.flatten()
        counted = flat != IGNORED_LABEL
        return Rows(torch.cat([torch.zeros(1, dtype=torch.int64), counted.cumsum(0)]), flat[counted])
    return labels
