"""A network of residual blocks, which workers import as a job's model."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Adds what two layers make of its input to it: `[B, width]` to the same shape."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


def build(blocks: int = 5, width: int = 32) -> nn.Module:
    """Images `[B, 64]` to logits `[B, 10]`; the last block is the largest."""
    hidden = [64] * (blocks - 1) + [128]
    return nn.Sequential(nn.Linear(64, width), *(Residual(width, h) for h in hidden), nn.Linear(width, 10))
