"""The assembled network: statistics, score, and the module that the user takes home."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from idletrain.nn.data import Samples
from idletrain.nn.program import IGNORED_LABEL, Loss, cross_entropy
from idletrain.nn.randomness import generator, key
from idletrain.nn.sparse_rows import Rows

# Samples that BatchNorm's statistics are estimated from: their error falls with the root of the number, and 8,192
# of Fashion-MNIST give the same accuracy to 0.1 points as all 60,000 at a seventh of the time.
STATISTICS_SAMPLES = 8192
BATCH = 512  # samples at a time outside training


def assembled(module: nn.Module, network: Sequence[Tensor]) -> nn.Module:
    """A copy of `module` (any values) that shares its parameters' memory with `network`, in the module's order."""
    memo = {
        id(p): nn.Parameter(tensor, requires_grad=p.requires_grad)
        for p, tensor in zip(module.parameters(), network, strict=True)
    }
    return copy.deepcopy(module, memo)


def estimate_statistics(module: nn.Module, samples: Samples, seed: int) -> None:
    """Set BatchNorm's running statistics to those of the whole network, which no subnet has seen.

    Dropout draws the same numbers every time; a last batch of one sample, which has no variance, is left out.
    """
    order = generator(seed, "statistics").permutation(len(samples))[:STATISTICS_SAMPLES]
    order = order[: len(order) - (len(order) % BATCH == 1)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "statistics", "dropout") % 2**63)
        update_bn((inputs for inputs, _ in _batches(samples, order)), module)
    module.eval()


@torch.no_grad()
def score(module: nn.Module, samples: Samples, loss: Loss) -> tuple[float | None, float]:
    """Accuracy and mean loss over all labels, without the ignored ones.

    Accuracy is P@1 for label sets and None where the labels are not classes.
    """
    module.eval()
    correct, total, values, weights = 0.0, 0, 0.0, 0
    for inputs, labels in _batches(samples, np.arange(len(samples))):
        outputs = module(inputs)
        if hasattr(outputs, "hits"):  # of a very wide output
            weight = outputs.labelled(labels)
            correct += outputs.hits(labels)
            total += len(labels) if isinstance(labels, Rows) else weight
            if weight:
                values, weights = values + float(loss(outputs, labels)) * weight, weights + weight
            continue
        counted = labels != IGNORED_LABEL if loss is cross_entropy else torch.ones_like(labels, dtype=torch.bool)
        weight = int(counted.sum())
        if not weight:  # the mean over no label is NaN
            continue
        values, weights = values + float(loss(outputs, labels)) * weight, weights + weight
        if labels.dtype == torch.int64 and outputs.shape[:-1] == labels.shape:
            hits = (outputs.argmax(-1) == labels)[counted]
        elif loss is nn.functional.binary_cross_entropy_with_logits:
            hits = (outputs > 0) == (labels > 0.5)
        else:
            continue
        correct, total = correct + float(hits.sum()), total + hits.numel()
    return (correct / total if total else None), values / weights if weights else math.nan


def _batches(samples: Samples, order: NDArray[np.int64]) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(order), BATCH):
        yield samples.batch(order[start : start + BATCH])
