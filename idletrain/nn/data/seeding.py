"""Seed every source of random numbers that data, models and losses draw from without a generator of their own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed `random`, NumPy and torch on the CPU with a 64-bit number; `torch.manual_seed` would seed every backend."""
    random.seed(seed)
    np.random.seed((seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the same random numbers every time within; afterwards they go on as before."""
    of_random, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seed_everything(seed)
    try:
        yield
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)
