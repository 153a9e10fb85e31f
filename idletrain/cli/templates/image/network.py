"""The network and the images that it learns: job.yaml names both. Change what is here to your own."""

from __future__ import annotations

from typing import Any

from sklearn.datasets import load_digits
from torch import nn


def net(channels: int = 64, classes: int = 10) -> nn.Module:
    """Build the network: `[B, 1, 8, 8]` to `[B, classes]`. Any torch.nn.Module does."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, classes),
    )


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (train, test), each a pair of images, float32 `[N, C, H, W]`, and of labels from 0.

    These are scikit-learn's digits. A torch Dataset for each does as well, and `data: {path: FOLDER}` in job.yaml reads
    a folder of images with one folder for each class.
    """
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])
