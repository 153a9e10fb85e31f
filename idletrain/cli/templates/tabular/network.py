"""The network and the table that it learns: job.yaml names both. Change what is here to your own."""

from __future__ import annotations

from typing import Any

from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn


def net(columns: int = 30, classes: int = 2, width: int = 256) -> nn.Module:
    """Build the network: `[B, columns]` to `[B, classes]`. Any torch.nn.Module does."""
    return nn.Sequential(
        nn.Linear(columns, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (train, test), each a pair of rows, float32 `[N, columns]`, and of labels from 0.

    For numbers instead of classes return targets `[N, 1]` in float32, and write `loss: mse` in job.yaml.
    """
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    mean, deviation = x_train.mean(0), x_train.std(0)  # of training rows alone
    x_train, x_test = (((part - mean) / deviation).astype("float32") for part in (x_train, x_test))
    return (x_train, y_train), (x_test, y_test)
