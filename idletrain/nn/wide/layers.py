"""The two ends of a network with sparse inputs and very many outputs; between them any module fits.

Letters: B rows of a batch, F features, H hidden, C labels, A labels active in a batch, Z entries of sparse rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

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

LOGITS_BLOCK_BYTES = 1 << 26  # of scores at a time where all labels are looked at
SLIDE_REBUILD = 50  # steps between rebuilds: SLIDE's 6,400 samples at its batch of 128


class JointSoftmax(Protocol):
    """Shards of one output that are trained in lockstep: what each calls in the same order, with as many values."""

    def logsumexp(self, own_B: Tensor) -> Tensor:
        """The log of the sum of all shards' exponentials `[B]`; the same bits for each."""

    def sum(self, own_BH: Tensor) -> Tensor:
        """The sum over all shards `[B, H]`; the same bits for each."""


class SparseEmbeddingBag(nn.Module):
    """A first layer for sparse rows: the sum of a row's embeddings, each times its value; no bias.

    Its gradient is row-sparse: the embeddings that the batch holds, each once.

    Args:
        features: F, embeddings.
        width: H, of each.
    """

    sparse_input = True  # how such a layer is known, without importing this module and Numba

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, width))
        nn.init.normal_(self.weight, std=1 / math.sqrt(width))

    def forward(self, x: Rows) -> Tensor:
        """Sparse rows B to `[B, H]`.

        Raises:
            ValueError: a feature is beyond the layer.
        """
        if self.weight.is_meta:
            return self.weight.new_empty(len(x), self.weight.shape[1])
        _check_within(x.indices, len(self.weight), "feature")
        result: Tensor = _Bag.apply(self.weight, x)  # type: ignore[no-untyped-call]
        return result


class _Bag(torch.autograd.Function):
    """A sum of embeddings with a row-sparse gradient, which is added up in Numba on the CPU."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Rows) -> Tensor:
        values = torch.ones(len(x.indices), device=weight.device) if x.values is None else x.values
        ctx.rows, ctx.values, ctx.shape = x, values, weight.shape
        ctx.compiled = weight.device.type == "cpu" and weight.dtype == torch.float32
        if weight.dtype == torch.float32:
            starts = x.offsets[:-1]
            return functional.embedding_bag(x.indices, weight.detach(), starts, mode="sum", per_sample_weights=values)
        out = torch.zeros(len(x), weight.shape[1], device=weight.device)
        return out.index_add_(0, x.row_numbers(), weight[x.indices].float() * values[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, values, grad = ctx.rows, ctx.values, grads[0].contiguous()
        unique, places = torch.unique(x.indices, return_inverse=True)
        rows = torch.zeros(len(unique), ctx.shape[1], device=grad.device)
        if ctx.compiled:
            kernels.bag_backward(*(t.numpy() for t in (x.offsets, places, values, grad, rows)))
        else:
            rows.index_add_(0, places, grad[x.row_numbers()] * values[:, None])
        return row_sparse(unique, rows, ctx.shape), None


class _Take(torch.autograd.Function):
    """Rows of a parameter, ascending and each at most once, with a row-sparse gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.shape = index, parameter.shape
        return parameter.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return row_sparse(ctx.index, grads[0], ctx.shape), None


class _OneSoftmax(torch.autograd.Function):
    """The denominator's logarithm over all shards, from one shard's own."""

    @staticmethod
    def forward(ctx: Any, own_B: Tensor, together: JointSoftmax) -> Tensor:
        all_B = together.logsumexp(own_B)
        ctx.save_for_backward(own_B, all_B)
        return all_B

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own_B, all_B = ctx.saved_tensors
        return grads[0] * (own_B - all_B).exp(), None


class _SharedHidden(torch.autograd.Function):
    """Hidden vectors that all shards have, whose gradient is the sum of what each shard's labels give."""

    @staticmethod
    def forward(ctx: Any, hidden_BH: Tensor, together: JointSoftmax) -> Tensor:
        ctx.together = together
        return hidden_BH.view_as(hidden_BH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.together.sum(grads[0].contiguous()), None


def row_sparse(index: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """A gradient that is zero but for these rows, ascending and each named once."""
    return torch.sparse_coo_tensor(index[None], rows, shape, is_coalesced=True, check_invariants=False)


class SparseLinear(nn.Module):
    """A linear layer with very many outputs (labels), of which training looks at few for each batch.

    It returns `Scores`, which gives the loss over a batch's active labels, or the exact best labels. One active set
    serves a batch, so that its work is one gather and one dense product.

    Args:
        hidden: H, its inputs.
        labels: C, its outputs.
        bias: Whether labels have one.
        sampler: How labels beside the batch's own are drawn: a name or mapping, see
            `idletrain.nn.wide.samplers.SAMPLERS`.
        rebuild_every: Training batches between two rebuilds of the sampler's tables; 0: only when told to. In a job
            they are rebuilt at the start of every round instead.
        rebuild_growth: By how much that interval grows from one rebuild to the next (SLIDE's exponential decay).
        dtype: float32 or bfloat16, how the rows are stored.
        most_table_bytes: What the tables may take, of a job those of one shard; None for no limit.

    Attributes:
        labels_here: Which labels of the network the rows are, ascending `[C]`; None for all of them.
        together: The other shards, where all are trained as one softmax (Distributed SLIDE, arXiv 2201.12667).
        drawn_batches, fallbacks: Batches that a sampler drew for, and those for which it retrieved nothing.

    Raises:
        JobError: the sampler is unknown; or, with the first batch, its tables would take more than is allowed.
    """

    very_wide = True  # how a network is known to end in one, without importing this module and Numba

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
        """Hidden vectors `[..., H]` to their scores for every label, none of which is computed yet."""
        if self.training and self.together:
            hidden = _SharedHidden.apply(hidden, self.together)  # type: ignore[no-untyped-call]
        return Scores(hidden, self)

    @property
    def retrieves(self) -> bool:
        """Whether its sampler keeps tables."""
        return retrieves(self.sampler)

    def learn_counts(self, counts_C: NDArray[np.int64]) -> None:
        """Say how many training rows each label here has: log-uniform draws by their order."""
        self._order_C = np.argsort(-counts_C, kind="stable")
        if not self.retrieves:
            self.sampler.build(self.weight.detach()[:0], self._order_C, 0)

    def check_tables(self, labels: int) -> None:
        """The sampler's tables over so many labels must be allowed.

        Raises:
            JobError: they would take more than that.
        """
        takes, most = self.sampler.nbytes(labels, self.weight.shape[1]), self._most_table_bytes
        if most is not None and takes > most:
            raise JobError(
                f"sampler: its tables over {labels} labels take {takes / 2**20:.1f} MiB and {most / 2**20:.1f} MiB are "
                "allowed; use fewer tables, another sampler or a larger most_table_bytes"
            )

    def rebuild(self, seed: int, rows_CH: Tensor | None = None) -> None:
        """Build the sampler's tables over the rows as they are, or over others.

        Raises:
            ValueError: a row is not finite.
        """
        self.sampler.build(self.weight.detach() if rows_CH is None else rows_CH, self._order_C, seed)

    def hold(self, labels: NDArray[np.int64] | None) -> None:
        """Say which labels of the network the rows are, and leave rebuilds to the caller."""
        self.labels_here = labels
        self._rebuild_every = 0

    def rows_for(self, labels: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers here of a batch's labels, the batch's row of each, and its share of that row's labels, `[Z]`: of
        those that are here, or of all if the shards are trained together.

        Raises:
            ValueError: a label is beyond the layer.
        """
        owner, ids = labels.row_numbers(), labels.indices
        if self.labels_here is not None:
            here = torch.from_numpy(self.labels_here)
            places = torch.searchsorted(here, ids).clamp_(max=len(here) - 1)
            mine = here[places] == ids
            owner, ids = owner[mine], places[mine]
        else:
            _check_within(ids, len(self.weight), "label")
        counts = labels.offsets.diff() if self.together else torch.bincount(owner, minlength=len(labels))
        share = 1 / counts.clamp(min=1)
        return ids, owner, share[owner]

    def active_set(self, hidden_BH: Tensor, ids: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Labels for one batch.

        Args:
            hidden_BH: The batch.
            ids: Its own labels `[Z]`.

        Returns:
            The active labels `[A]`, ascending and each once, or None for all of them; the place of each of `ids` among
            them `[Z]`; and what is added to their logits `[A]`.
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
        unique, places = self._distinct(np.concatenate([ids.numpy(), draw.certain, draw.drawn]))
        known = len(ids) + len(draw.certain)
        certain = int(places[:known].max(initial=-1)) + 1  # in the order of appearance, these come first
        correction = np.zeros(len(unique), np.float32)
        correction[certain:] = -np.log(draw.probability(unique[certain:]))
        order = np.argsort(unique)  # as a row-sparse gradient has its rows
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        own = place[places[: len(ids)]]
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
    """A batch's scores for every label, computed as far as they are asked for."""

    def __init__(self, hidden: Tensor, layer: SparseLinear) -> None:
        self.hidden_BH, self._layer = hidden.flatten(0, -2), layer

    @property
    def shape(self) -> torch.Size:
        """Rows and labels."""
        return torch.Size([len(self.hidden_BH), len(self._layer.weight)])

    def loss(self, labels: Rows | Tensor) -> Tensor:
        """Softmax cross entropy against a batch's label sets, each of a row's labels to an equal share.

        In training over the active labels, in evaluation over all. A row without labels here counts for nothing. Of
        shards that are trained together its gradients are those of one softmax, its value is not.

        Args:
            labels: Label sets, or one class a row `[...]`.
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
        active, places, correction = layer.active_set(hidden.detach(), ids)
        logits_BA = self._logits(active).add_(correction) if active is not None else self._logits(None)
        if rows == len(ids) == len(hidden):  # one label each: torch's own, to the bit
            return functional.cross_entropy(logits_BA, places)
        chosen = functional.log_softmax(logits_BA, 1)[owner, places]
        return -(chosen * share).sum() / rows

    def _joint_loss(self, sets: Rows, ids: Tensor, owner: Tensor, share: Tensor, together: JointSoftmax) -> Tensor:
        active, places, correction = self._layer.active_set(self.hidden_BH.detach(), ids)
        logits_BA = self._logits(active).add_(correction)
        all_B: Tensor = _OneSoftmax.apply(logits_BA.logsumexp(1), together)  # type: ignore[no-untyped-call]
        labelled = sets.offsets.diff() > 0
        own = (logits_BA[owner, places] * share).sum()
        return (all_B[labelled].sum() - own) / labelled.sum().clamp(min=1)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best labels of every row, exactly: scores and labels `[B, k]`, in blocks of labels."""
        best = [self._logits(block).topk(min(k, block.stop - block.start)) for block in self._blocks()]
        scores = torch.cat([part.values for part in best], 1)
        ids = torch.cat([block.start + p.indices for block, p in zip(self._blocks(), best, strict=True)], 1)
        top = scores.topk(min(k, scores.shape[1]))
        return top.values, ids.gather(1, top.indices)

    def retrieved_topk(self, k: int, keep: int) -> Tensor:
        """The k best labels among `keep` that the tables retrieve for each row `[B, k]`, -1 where there are fewer.

        Raises:
            JobError: the sampler keeps no tables.
        """
        parts = getattr(self._layer.sampler, "parts", [self._layer.sampler])
        tables = next((part.tables for part in parts if hasattr(part, "tables")), None)
        if tables is None:
            raise JobError("sampler: sparse inference needs tables; use simhash, dwta or inverted-file")
        weight, result = self._layer.weight.detach(), torch.full((len(self.hidden_BH), k), -1)
        for b, hidden_H in enumerate(self.hidden_BH.detach()):
            found = torch.from_numpy(np.unique(tables.retrieve(hidden_H[None], weight, keep)))
            if len(found):
                best = Scores(hidden_H[None], self._layer)._logits(found)[0].topk(min(k, len(found))).indices
                result[b, : len(best)] = found[best]
        return result

    def labelled(self, labels: Rows | Tensor) -> int:
        """How many rows have a label."""
        return int((_label_sets(labels).offsets.diff() > 0).sum())

    def hits(self, labels: Rows | Tensor) -> int:
        """In how many rows the best label is one of the row's."""
        sets = _label_sets(labels)
        best = self.topk(1)[1][:, 0]
        return int((best[sets.row_numbers()] == sets.indices).sum())

    def dense(self) -> Tensor:
        """All scores `[B, C]`."""
        return self._logits(None)

    def _logits(self, active: Tensor | slice | None) -> Tensor:
        """Of gathered rows, of some that lie together, which are not copied, or of all."""
        layer = self._layer
        weight: Tensor = layer.weight
        bias: Tensor | None = layer.bias
        if isinstance(active, slice):
            weight, bias = weight[active], None if bias is None else bias[active]
        elif active is not None:
            weight = _Take.apply(weight, active)  # type: ignore[no-untyped-call]
            bias = None if bias is None else _Take.apply(bias, active)  # type: ignore[no-untyped-call]
        bias = None if bias is None else bias.to(weight.dtype)
        return functional.linear(self.hidden_BH.to(weight.dtype), weight, bias).float()

    def _blocks(self) -> list[slice]:
        """Labels whose scores take BLOCK_BYTES."""
        labels, size = len(self._layer.weight), max(1, LOGITS_BLOCK_BYTES // (4 * max(1, len(self.hidden_BH))))
        return [slice(start, min(start + size, labels)) for start in range(0, labels, size)]

    def _exact_loss(self, ids: Tensor, owner: Tensor, share: Tensor) -> Tensor:
        total = torch.stack([self._logits(block).logsumexp(1) for block in self._blocks()]).logsumexp(0)
        bias = 0.0 if self._layer.bias is None else self._layer.bias[ids]
        own = (self.hidden_BH[owner] * self._layer.weight[ids].float()).sum(1) + bias
        return ((total[owner] - own) * share).sum()


def _check_within(ids: Tensor, size: int, what: str) -> None:
    for odd in (ids.min(), ids.max()) if len(ids) else ():
        if not 0 <= int(odd) < size:
            raise ValueError(f"{what} {int(odd)} is beyond the layer's {size}, counted from 0")


def _label_sets(labels: Rows | Tensor) -> Rows:
    """Label sets, also of one class a row `[...]`."""
    if isinstance(labels, Tensor):
        flat = labels.flatten()
        counted = flat != IGNORED_LABEL
        return Rows(torch.cat([torch.zeros(1, dtype=torch.int64), counted.cumsum(0)]), flat[counted])
    return labels
