"""Make weights that were just drawn at random as small as the subnets need them at first.

In a subnet, the weights of a sum over a share of the neurons are 1/share times the network's (see `nn.ist.subnets`).
That is right for what training has put into them, as the network then computes the mean of its subnets. Random weights
become too large by it: their sum is not 1/share but sqrt(1/share) times that of fewer neurons, so a subnet would begin
with outputs sqrt(1/share) times as large as a network of its width has, and further off with every layer. Multiplied by
sqrt(share) in the network, they are in each subnet as large as the same initialization draws them for its width.

Weights count as drawn only if they are uniform within a bound that one of torch's initializations has for their shape:
trained ones cross it, and begin as they are, as do those of every other initialization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from idletrain.nn.ist.subnets import Subnet

FEWEST = 64  # values of a tensor that say enough about how they were drawn
# Drawn values miss each of the two limits below once in 10^8 tensors or more rarely.
NEAR_BOUND = 20.0  # over the number of values: how far below its bound the largest may be, as a part of the bound
DEVIATIONS = 6.0  # by how many standard errors the mean square may miss that of a uniform distribution


def shrink_drawn(values: Sequence[Tensor], subnets: Sequence[Subnet]) -> None:
    """Multiply a network's freshly drawn weights of scaled sums by sqrt(share), in place.

    Args:
        values: The network's tensors, in the module's order.
        subnets: Those of its first round, equally wide, whose factors are 1/share.
    """
    for number, (tensor, value) in enumerate(zip(subnets[0].layout.tensors, values, strict=True)):
        factors = (subnet.factors[number] for subnet in subnets if math.prod(subnet.shapes[number]))
        factor = next(factors, None)  # a subnet may lack a tensor's block: it says nothing of the share
        if factor is not None and not tensor.buffer and is_drawn(value):
            value.mul_(float(factor.mean()) ** -0.5)


def is_drawn(weight: Tensor) -> bool:
    """Return whether a weight `[outputs, inputs, ...]` is as torch's layers, or Kaiming's or Xavier's uniform
    initialization (`torch.nn.init`), draw it.
    """
    if weight.ndim < 2 or weight.numel() < FEWEST:
        return False
    fan_in, fan_out = (weight[0].numel(), weight[:, 0].numel())
    smallest, largest = (float(end) for end in torch.aminmax(weight))
    norms = torch.linalg.vector_norm(weight.flatten(1), dim=1)  # of rows: nothing is as large as the weight
    mean_square = float(norms.double().square().sum()) / weight.numel()
    bounds = math.sqrt(1 / fan_in), math.sqrt(6 / fan_in), math.sqrt(6 / (fan_in + fan_out))
    return any(_is_uniform(max(largest, -smallest), mean_square, weight.numel(), bound) for bound in bounds)


def _is_uniform(largest: float, mean_square: float, count: int, bound: float) -> bool:
    """Return whether values with this largest magnitude and mean square are uniform within a bound."""
    expected, error = bound**2 / 3, bound**2 * math.sqrt(4 / 45 / count)
    rounding = 1e-6 * bound
    return (
        bound * (1 - NEAR_BOUND / count) <= largest <= bound + rounding
        and abs(mean_square - expected) <= DEVIATIONS * error
    )
