"""Data parallel training of a network with very many outputs on gloo, in two ways (`settings.kind`).

`dense`: a bag of embeddings and a linear layer under DistributedDataParallel: every gradient travels whole. `rows`: the
same layers with sampled labels and row-sparse gradients; every node sends its rows to all others, and all add them up.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.node import Spec, read_spec, say
from idletrain.nn.data.extreme import SparseFiles
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.optim.rowwise import RowAdagrad, rows_of
from idletrain.nn.wide.models import COSINE_SCALE, wide
from idletrain.nn.wide.sparse_autograd import row_sparse


class Dense(nn.Module):
    """The network of `idletrain.nn.wide.models` without anything sparse in it."""

    def __init__(self, features: int, hidden: int, labels: int) -> None:
        super().__init__()
        self.embeddings = nn.EmbeddingBag(features, hidden, mode="sum")
        self.output = nn.Linear(hidden, labels)

    def forward(self, indices: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        hidden = self.embeddings(indices, offsets, per_sample_weights=values)
        out: Tensor = self.output(functional.normalize(hidden, dim=1) * COSINE_SCALE)
        return out


def batches(spec: Spec) -> Any:
    """Yield this node's rows of every step."""
    samples = SparseFiles(tuple(spec.data["train"])).open()
    order = BatchOrder(spec.seed, len(samples), spec.batch_size, spec.nodes)
    for step in range(1 + spec.steps):
        yield samples.batch(order.batch(spec.rank, step))


def train_dense(spec: Spec, report: Any) -> None:
    """Train densely: a step is a backward pass with its all-reduce, and Adagrad."""
    module = DistributedDataParallel(Dense(**spec.model), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adagrad(module.parameters(), lr=spec.settings["lr"])
    for x, y in batches(spec):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(module(x.indices, x.offsets[:-1], x.values), y.indices)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        report()


def train_rows(spec: Spec, report: Any) -> None:
    """Train by rows: a step is a backward pass, an all-gather of every gradient's rows, and row-wise Adagrad."""
    module = wide(**spec.model, sampler=spec.settings["sampler"], start="random")
    module.output.learn_counts(np.ones(spec.model["labels"], np.int64))
    optimizer = RowAdagrad(module.parameters(), lr=spec.settings["lr"])
    for x, y in batches(spec):
        optimizer.zero_grad(set_to_none=True)
        module(x).loss(y).backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad = _sum_of_rows(parameter.grad, spec.nodes)
        optimizer.step()
        report()


def _sum_of_rows(gradient: Tensor, nodes: int) -> Tensor:
    """Average row-sparse gradients over all nodes; pieces of unlike lengths are padded to the longest."""
    index, rows = rows_of(gradient)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(nodes)]
    dist.all_gather(counts, torch.tensor([len(index)]))
    longest = int(max(counts))
    indices = _gathered(index, longest, nodes)
    values = _gathered(rows, longest, nodes)
    pairs = list(zip(counts, indices, values, strict=True))
    unique, places = torch.unique(torch.cat([i[: int(n)] for n, i, _ in pairs]), return_inverse=True)
    total = torch.zeros(len(unique), *rows.shape[1:])
    total.index_add_(0, places, torch.cat([v[: int(n)] for n, _, v in pairs]), alpha=1 / nodes)
    return row_sparse(unique, total, gradient.shape)


def _gathered(own: Tensor, longest: int, nodes: int) -> list[Tensor]:
    padded = torch.zeros(longest, *own.shape[1:], dtype=own.dtype)
    padded[: len(own)] = own
    pieces = [torch.empty_like(padded) for _ in range(nodes)]
    dist.all_gather(pieces, padded)
    return pieces


def main() -> None:
    """Train; the first step is not counted."""
    spec = read_spec()
    dist.init_process_group("gloo", init_method=f"tcp://{spec.root}:{spec.port}", rank=spec.rank, world_size=spec.nodes)
    done = -1

    def report() -> None:
        nonlocal done
        done += 1
        if done == 0:
            dist.barrier()
            say("ready", at=time.time())
        else:
            say("step", steps=done)

    {"dense": train_dense, "rows": train_rows}[spec.settings["kind"]](spec, report)
    say("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
