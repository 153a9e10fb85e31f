"""A network with state of every kind beside its parameters, for runs that are disturbed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferedNetwork(nn.Module):
    """A codebook that training reads and moves, a counter, and running statistics that only evaluation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("shift", torch.zeros(64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1) - self.shift)
        if self.training:
            self.shift.mul_(0.9).add_(0.001)
            self.steps += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            x = x - x.mean(0)
        else:
            x = x - self.mean
        logits: Tensor = self.last(torch.relu(x))
        return logits
