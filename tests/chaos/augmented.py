"""Data that draw random numbers of every kind as they are read, for runs that are disturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from idletrain.nn.data.known import digits


def noisy(image: Any) -> torch.Tensor:
    """The image with noise of `random`, NumPy and torch."""
    noise = 0.1 * (random.random() + torch.rand(len(image)) + torch.tensor(np.random.rand(len(image))))
    return torch.tensor(image) + noise.float()


class Numbered(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.x, self.y = digits()[0]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return noisy(self.x[i]), int(self.y[i])


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        x, y = digits()[0]
        return ((noisy(image), int(label)) for image, label in zip(x[:700], y[:700], strict=True))


def load(kind: str) -> Any:
    """Training data of a kind, alone."""
    if kind == "stream":
        return Stream()
    return DataLoader(Numbered(), batch_size=32, shuffle=True, num_workers=1 if kind == "read ahead" else 0)
