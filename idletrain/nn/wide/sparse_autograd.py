"""Autograd functions of the wide layers, whose gradients are row-sparse or shared between shards of one output.

Letters: B rows of a batch, H hidden.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from idletrain.nn.data.csr import Rows
from idletrain.nn.optim import kernels


class JointSoftmax(Protocol):
    """Collectives between the shards of one output in lockstep; each shard calls them in the same order and size."""

    def logsumexp(self, own_B: Tensor) -> Tensor:
        """Return the log of the sum of all shards' exponentials `[B]`, the same bits on each."""

    def sum(self, own_BH: Tensor) -> Tensor:
        """Return the sum over all shards `[B, H]`, the same bits on each."""


class EmbeddingSum(torch.autograd.Function):
    """Sum each row's embeddings; the gradient is row-sparse and on the CPU added up by Numba."""

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
        unique, positions = torch.unique(x.indices, return_inverse=True)
        rows = torch.zeros(len(unique), ctx.shape[1], device=grad.device)
        if ctx.compiled:
            kernels.bag_backward(*(t.numpy() for t in (x.offsets, positions, values, grad, rows)))
        else:
            rows.index_add_(0, positions, grad[x.row_numbers()] * values[:, None])
        return row_sparse(unique, rows, ctx.shape), None


class TakeRows(torch.autograd.Function):
    """Take rows of a parameter, given ascending and each at most once, with a row-sparse gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.shape = index, parameter.shape
        return parameter.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return row_sparse(ctx.index, grads[0], ctx.shape), None


class JointLogSumExp(torch.autograd.Function):
    """Turn one shard's logsumexp `[B]` into that of all shards: the log of the softmax's denominator."""

    @staticmethod
    def forward(ctx: Any, own_B: Tensor, shards: JointSoftmax) -> Tensor:
        all_B = shards.logsumexp(own_B)
        ctx.save_for_backward(own_B, all_B)
        return all_B

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        own_B, all_B = ctx.saved_tensors
        return grads[0] * (own_B - all_B).exp(), None


class SharedHidden(torch.autograd.Function):
    """Pass on hidden vectors that all shards share; their gradient is the sum of all shards' gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_BH: Tensor, shards: JointSoftmax) -> Tensor:
        ctx.shards = shards
        return hidden_BH.view_as(hidden_BH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.sum(grads[0].contiguous()), None


def row_sparse(index: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return a sparse gradient that is zero but for these rows, which are ascending and unique."""
    return torch.sparse_coo_tensor(index[None], rows, shape, is_coalesced=True, check_invariants=False)
