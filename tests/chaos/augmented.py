"""Data and a module that draw random numbers of every kind as they are read and run, for runs that are disturbed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from idletrain.nn.data.known import digits

from .steered import worker_name

FORWARD_SECONDS = 0.1  # in a worker: long enough that its other threads work meanwhile


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


class Placed(Stream):
    """A stream that keeps its place, and writes down which processes go on from one."""

    def __init__(self, *, augmented: bool) -> None:
        self.augmented, self.place = augmented, 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        if control := os.environ.get("CHAOS_CONTROL"):  # else it is read alone, in the test's own process
            with (Path(control) / "gone_on").open("a") as file:
                file.write(f"{os.getpid()}\n")

    def __iter__(self) -> Iterator[Any]:
        x, y = digits()[0]
        while self.place < 700:
            image, label = x[self.place], int(y[self.place])
            self.place += 1
            yield noisy(image) if self.augmented else torch.tensor(image) + 0.1 * torch.rand(len(image)), label
        self.place = 0


def load(kind: str) -> Any:
    """Training data of a kind, alone."""
    if kind == "stream":
        return Stream()
    if kind.endswith("with state"):  # what draws from `random` is read by a process of its own
        return Placed(augmented=kind.startswith("augmented"))
    return DataLoader(Numbered(), batch_size=32, shuffle=True, num_workers=1 if kind == "read ahead" else 0)


class NoisyNetwork(nn.Module):
    """An MLP that draws numbers of every kind before and after its slow first layer, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._noisy(torch.relu(self.first(x)))
        if self.training and worker_name():
            time.sleep(FORWARD_SECONDS)
        y: Tensor = self.last(self._noisy(hidden))
        return y

    def _noisy(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (1 + 0.1 * (random.random() + float(np.random.rand()))) + 0.1 * torch.rand(())
