"""Random numbers keyed by what they are for, never by who draws them or when.

A subnet that is trained again elsewhere, or resumed in the middle, so draws the very same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def key(seed: int, *labels: int | str) -> int:
    """A 64-bit key from the run's seed and what the numbers are for."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *labels: int | str) -> np.random.Generator:
    """A generator of its own for one purpose (Philox: the same stream on every machine)."""
    return np.random.Generator(np.random.Philox(key(seed, *labels)))
