"""Measure what each compiled loop saves beside torch's own functions for the same work.

One thread, the sizes of a batch of 256 on Amazon-670K (76 features a row, 128 hidden, 1,500 active labels); medians.

    python -m benchmarks.kernels [--tiny] [--json FILE]

Target: a kernel stays only where it takes at most 0.7 of torch's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, at_most, report, with_preset
from idletrain.nn.optim import kernels, rowwise
from idletrain.nn.wide import index_kernels
from idletrain.nn.wide.mips_index import BIN, HashTables, InvertedFile


@dataclass(frozen=True)
class Preset:
    """Sizes of the arrays, and repetitions."""

    batch: int = 256
    words: int = 76
    features: int = 135_909
    hidden: int = 128
    labels: int = 670_091
    active: int = 1500
    repeats: int = 100


K, TABLES, BUCKET = 9, 50, 128  # SLIDE's for Delicious-200K
TINY = Preset(batch=16, words=5, features=300, hidden=16, labels=500, active=50, repeats=3)
Work = Callable[[], Any]


def bag_gradients(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to compute the gradient of a bag of embeddings: ours, torch's."""
    random = np.random.default_rng(0)
    count = preset.batch * preset.words
    offsets, indices = np.arange(0, count + 1, preset.words), random.integers(0, preset.features, count)
    values = random.random(count, np.float32)
    grad = torch.randn(preset.batch, preset.hidden)
    tensors = torch.from_numpy(indices), torch.from_numpy(values)
    owner = torch.from_numpy(np.repeat(np.arange(preset.batch), preset.words))

    def backward() -> None:
        unique, places = torch.unique(tensors[0], return_inverse=True)
        out = np.zeros((len(unique), preset.hidden), np.float32)
        kernels.bag_backward(offsets, places.numpy(), values, grad.numpy(), out)

    def torch_backward() -> None:
        unique, places = torch.unique(tensors[0], return_inverse=True)
        torch.zeros(len(unique), preset.hidden).index_add_(0, places, grad[owner] * tensors[1][:, None])

    return backward, torch_backward


def updates(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to do a step of row-wise Adagrad on the active rows: ours, torch's."""
    weight, sums = torch.randn(preset.labels, preset.hidden), torch.zeros(preset.labels)
    index = torch.randperm(preset.labels)[: preset.active].sort().values
    grad = torch.randn(preset.active, preset.hidden)
    gradient = torch.sparse_coo_tensor(index[None], grad, weight.shape, check_invariants=True).coalesce()

    def ours() -> None:
        rowwise.row_adagrad(weight, gradient, sums, lr=0.05, start=1e-6)

    def torchs() -> None:
        sums[index] += grad.square().mean(1)
        weight.index_add_(0, index, grad * ((sums[index] + 1e-6).rsqrt() * -0.05)[:, None])

    return ours, torchs


def sets(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to find the distinct labels of a batch: ours, torch's."""
    ids = np.random.default_rng(0).integers(0, preset.labels, preset.active * 2)
    find, tensor = kernels.Distinct(preset.labels), torch.from_numpy(ids)
    return lambda: find(ids), lambda: torch.unique(tensor, return_inverse=True)


def retrievals(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to find the labels that most tables give: ours, torch's."""
    rows, query = torch.randn(preset.labels, preset.hidden), torch.randn(preset.batch, preset.hidden)
    tables = HashTables("simhash", K, TABLES, BUCKET)
    tables.build(rows, 0)

    def counted() -> None:
        """Count hits by sorting every query's candidates."""
        for codes in tables._hash(query, 0, TABLES).T:
            candidates = [tables._ids[t, tables._starts[t, c] : tables._starts[t, c + 1]] for t, c in enumerate(codes)]
            hits = np.unique(np.concatenate(candidates), return_counts=True)
            np.argpartition(-hits[1], min(2, len(hits[1]) - 1))

    return lambda: tables.retrieve(query, rows, 2), counted


def lists(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to find the best two of an inverted file's list for every query: ours, torch's."""
    rows, query = torch.randn(preset.labels, preset.hidden), torch.randn(preset.batch, preset.hidden)
    tables = InvertedFile(None, 1)
    tables.build(rows, 0)

    def listed() -> None:
        """Score list by list, each for all queries that look through it."""
        nearest = (query @ tables._centres_LH.T).argmax(1)
        for number in set(nearest.tolist()):
            members = torch.from_numpy(tables._members[tables._starts[number] : tables._starts[number + 1]])
            (query[nearest == number] @ rows[members].T).topk(min(2, len(members)))

    return lambda: tables.retrieve(query, rows, 2), listed


def signs(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to compute SimHash's bucket numbers for a block of rows: ours, torch's."""
    products = torch.randn(K * TABLES, preset.active)
    out, powers = np.empty((TABLES, preset.active), np.uint16), 2 ** torch.arange(K, dtype=torch.int32)
    return (
        lambda: index_kernels.sign_codes(products.numpy(), out),
        lambda: ((products > 0).view(TABLES, K, -1) * powers[:, None]).sum(1, dtype=torch.int32),
    )


def winners(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to compute DWTA's bucket numbers for a block of rows: ours, torch's."""
    x, k = torch.randn(preset.active, preset.hidden), 4
    compared = np.stack([np.random.default_rng(0).permutation(preset.hidden)[:BIN] for _ in range(k * TABLES)])
    out, powers = np.empty((TABLES, preset.active), np.uint16), BIN ** torch.arange(k, dtype=torch.int32)
    places = torch.from_numpy(compared.ravel())
    return (
        lambda: index_kernels.winner_codes(x.numpy(), compared, out),
        lambda: (x[:, places].view(-1, TABLES, k, BIN).argmax(-1).int() * powers).sum(-1, dtype=torch.int32),
    )


def fills(preset: Preset) -> tuple[Work, Work]:
    """Return two ways to build one table of all labels from their bucket numbers: ours, and by numpy's sort."""
    random = np.random.default_rng(0)
    codes, order = random.integers(0, 1 << K, preset.labels).astype(np.uint16), random.permutation(preset.labels)
    order32, ids = order.astype(np.int32), np.empty(BUCKET << K, np.int32)

    def count_and_fill() -> None:
        starts = np.zeros((1 << K) + 1, np.int32)
        index_kernels.count_in_buckets(codes, BUCKET, starts)
        index_kernels.fill_buckets(codes, order32, starts, ids)

    def sort() -> None:
        order[np.argsort(codes, kind="stable")]
        np.bincount(codes, minlength=1 << K).cumsum()

    return count_and_fill, sort


def milliseconds(works: Sequence[Work], repeats: int) -> list[list[float]]:
    """Time each in turns, leaving the first repetition out."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, samples in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            samples.append((time.perf_counter() - started) * 1000)
    return [samples[1:] for samples in times]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pairs = [("bag's gradient", *bag_gradients(preset))]
    pairs += [("Adagrad rows", *updates(preset)), ("distinct", *sets(preset)), ("hash hits", *retrievals(preset))]
    pairs += [
        ("lists", *lists(preset)),
        ("signs", *signs(preset)),
        ("winners", *winners(preset)),
        ("buckets", *fills(preset)),
    ]
    figures: list[Figure] = []
    for name, ours, torchs in pairs:
        compiled, theirs = milliseconds((ours, torchs), preset.repeats)
        figures += [
            Figure(f"{name}: compiled", statistics.median(compiled), "ms", samples=compiled),
            Figure(f"{name}: torch", statistics.median(theirs), "ms", samples=theirs),
            at_most(f"{name}: compiled / torch", statistics.median(compiled) / statistics.median(theirs), "", 0.7),
        ]
    torch.set_num_threads(threads)
    return report("kernels", options, figures)


if __name__ == "__main__":
    main()
