"""A CNN and the images that it learns: what job.yaml names."""

from __future__ import annotations

from typing import Any

from sklearn.datasets import load_digits
from torch import Tensor, nn


class CNN(nn.Module):
    """Two convolutions with BatchNorm, a mean over the image, and a linear layer: `[B, 1, 8, 8]` to `[B, 10]`."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


def cnn(channels: int = 64) -> nn.Module:
    """Build the network."""
    return CNN(channels)


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (train, test), each a pair of images and labels."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])
