"""Find what a subnet's learning rates are multiplied by, so that one rate is right for any number of subnets.

A subnet's weights of a scaled sum are 1/share times the network's, and each of its cut neurons stands for 1/share of
them (see `nn.ist.subnets`). At one rate, a step would move some layers further than a step of the whole network does,
and others less:

- A step of SGD is as large as the gradient. That of weights into cut neurons is 1/share times as large, as each neuron
  stands for more: their rate is multiplied by the share. Weights out of cut neurons sum over a share of them: their
  rate is multiplied by 1/share (by the share where the sum's inputs are scaled and not its weights). Weights between
  two cut layers have both, which is 1.
- A step of Adam and its like is as large as the rate. The network has a share of the step of scaled weights: their rate
  is multiplied by 1/share.

These are the rates of muP (Yang et al., arXiv 2203.03466, table 8) for networks as wide as the subnet. They leave out
neurons with a normalization behind, which makes the size of their weights, and so SGD's rate, a matter of its own.
Weight decay is divided by the same, so that weights decay as in the whole network.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from idletrain.nn.ist.groups import Layout, Neurons
from idletrain.nn.ist.subnets import Subnet

BY_WEIGHTS = ("weights", "unknown")  # scalings of sums that make a subnet's weights larger
LARGER = (*BY_WEIGHTS, "inputs")  # those with which a neuron stands for 1/share of them


def rate_factors(layout: Layout, subnet: Subnet, norms: Collection[str], *, by_gradient: bool) -> list[float]:
    """Return the factor of each tensor's learning rate.

    Args:
        layout: The network's layout.
        subnet: The subnet.
        norms: Names of the parameters of normalization layers.
        by_gradient: Whether the optimizer's steps are as large as gradients, not as the rate.
    """
    scaled = [1.0 if factor is None else float(factor.mean()) for factor in subnet.factors]
    factors = _by_gradient(layout, subnet, norms) if by_gradient else scaled
    return [factor if math.isfinite(factor) and factor > 0 else 1.0 for factor in factors]


def _by_gradient(layout: Layout, subnet: Subnet, norms: Collection[str]) -> list[float]:
    """Return the factors for steps that are as large as gradients."""
    sums = {(sum_.tensor, sum_.dimension): sum_.scaling for sum_ in layout.contractions}
    normalized = {group for t in layout.tensors if t.name in norms for n in t.neurons for group in _groups(layout, n)}
    larger = {
        group
        for tensor in layout.tensors
        for dimension, neurons in enumerate(tensor.neurons)
        if sums.get((tensor.name, dimension)) in LARGER
        for group in _groups(layout, neurons)
    } - normalized
    factors = []
    for tensor, shape in zip(layout.tensors, subnet.shapes, strict=True):
        factor = 1.0
        for dimension, (neurons, length) in enumerate(zip(tensor.neurons, shape, strict=True)):
            groups = _groups(layout, neurons)
            if groups & normalized:
                factor = 1.0
                break
            if groups & larger:
                out_of = sums.get((tensor.name, dimension)) in BY_WEIGHTS
                factor *= (length / tensor.shape[dimension]) ** (-1 if out_of else 1)
        factors.append(factor)
    return factors


def _groups(layout: Layout, neurons: Neurons | None) -> set[int]:
    """Return the groups whose neurons one dimension has."""
    if neurons is None:
        return set()
    ends = np.cumsum(layout.sizes)
    return set(np.searchsorted(ends, neurons[neurons >= 0], side="right").tolist())
