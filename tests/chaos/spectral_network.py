"""A network of which torch's spectral_norm computes a weight, with two vectors that every step moves."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations


class SpectralNetwork(nn.Module):
    """An MLP whose third layer has 1 as its largest singular value and stays whole; neurons before it are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.middle = parametrizations.spectral_norm(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.second(functional.relu(self.first(x.flatten(1)))))
        logits: Tensor = self.last(functional.relu(self.middle(x)))
        return logits
