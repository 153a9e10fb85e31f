"""English text from Debian's package dict-gcide (the GNU Collaborative International Dictionary), as next-byte data."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")  # dictzip: a gzip file with an index in its header
HEAD_BYTES = 20_000  # its licence and history
VOCABULARY = 128  # ASCII; the few other bytes become 0

Pair = tuple[NDArray[np.int16], NDArray[np.int16]]


def gcide(windows: int, test_windows: int, context: int) -> tuple[Pair, Pair]:
    """Return windows of text and the bytes that follow, `[N, context]` each, `(train, test)`; the test comes last.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    if not GCIDE.exists():
        raise FileNotFoundError(f"{GCIDE} is not there; install the Debian package dict-gcide")
    size = (windows + test_windows) * context + 1
    with gzip.open(GCIDE) as file:
        text = np.frombuffer(file.read(HEAD_BYTES + size)[HEAD_BYTES:], np.uint8)
    text16 = np.where(text < VOCABULARY, text, 0).astype(np.int16)
    x, y = text16[:-1].reshape(-1, context), text16[1:].reshape(-1, context)
    return (x[:windows], y[:windows]), (x[windows:], y[windows:])
