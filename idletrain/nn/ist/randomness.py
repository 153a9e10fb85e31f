"""Random numbers keyed by their purpose, never by the process or the time of the draw.

So a subnet that is trained again elsewhere, or resumed in the middle, draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def key(seed: int, *labels: int | str) -> int:
    """Return a 64-bit key for the run's seed and labels that say what the numbers are for."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *labels: int | str) -> np.random.Generator:
    """Return a separate generator for one purpose (Philox: the same stream on every machine)."""
    return np.random.Generator(np.random.Philox(key(seed, *labels)))
