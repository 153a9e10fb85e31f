"""Random numbers of Python, NumPy and torch."""

from __future__ import annotations

import random

import numpy as np
import torch

from idletrain.nn.data.seeding import seed_everything, seeded


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_seed_of_64_bits_sets_all_three() -> None:
    seed_everything(2**63 + 7)
    first = drawn()
    seed_everything(2**63 + 7)
    assert drawn() == first
    seed_everything(2**63 + 8)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))
    seed_everything(7)
    assert drawn()[:2] != first[:2]  # torch's generator has 32 bits on the CPU


def test_what_is_seeded_within_leaves_the_numbers_outside_alone() -> None:
    seed_everything(1)
    undisturbed = [drawn(), drawn()]
    seed_everything(1)
    first = drawn()
    with seeded(5):
        within = drawn()
    assert [first, drawn()] == undisturbed
    with seeded(5):
        assert drawn() == within
