"""Text of Debian's package dict-gcide (the GNU Collaborative International Dictionary): its bytes, its definitions."""

from __future__ import annotations

import collections
import gzip
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")  # dictzip: a gzip file with an index in its header
HEAD_BYTES = 20_000  # its licence and history
VOCABULARY = 128  # ASCII; the few other bytes become 0

# A headword with its pronunciation, its part of speech, and where it comes from.
ENTRY = re.compile(r"\S[^,]*?, *\s*(?P<part>n|a|v\. *[ti]|adv)\.(\s*\[[^\]]*\])?")
PARTS_OF_SPEECH = {"n": 0, "a": 1, "v. t": 2, "v. i": 2, "adv": 3}

Pair = tuple[NDArray[np.int16], NDArray[np.int16]]


def gcide(windows: int, test_windows: int, context: int) -> tuple[Pair, Pair]:
    """Return windows of text and the bytes that follow, `[N, context]` each, `(train, test)`; the test comes last.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    size = (windows + test_windows) * context + 1
    with gzip.open(_installed()) as file:
        text = np.frombuffer(file.read(HEAD_BYTES + size)[HEAD_BYTES:], np.uint8)
    text16 = np.where(text < VOCABULARY, text, 0).astype(np.int16)
    x, y = text16[:-1].reshape(-1, context), text16[1:].reshape(-1, context)
    return (x[:windows], y[:windows]), (x[windows:], y[windows:])


def definitions(words: int, vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the dictionary's definitions as word numbers `[N, words]`, 0 where one ends, and their part of speech
    `[N]`: 0 a noun, 1 an adjective, 2 a verb, 3 an adverb.

    Words are numbered by how often they occur, from 2 on; the rest are 1. The order is the dictionary's.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    with gzip.open(_installed()) as file:
        entries = file.read().decode("utf8", "replace").split("\n\n")
    found = [(match, entry) for entry in entries if (match := ENTRY.match(entry))]
    texts = [re.findall(r"[a-z]+", entry[match.end() :].lower())[:words] for match, entry in found]
    frequent = collections.Counter(word for text in texts for word in text).most_common(vocabulary - 2)
    number = {word: at for at, (word, _) in enumerate(frequent, start=2)}
    x = np.zeros((len(texts), words), np.int64)
    for row, text in zip(x, texts, strict=True):
        row[: len(text)] = [number.get(word, 1) for word in text]
    y = np.array([PARTS_OF_SPEECH[match["part"]] for match, _ in found], np.int64)
    return x, y


def _installed() -> Path:
    if not GCIDE.exists():
        raise FileNotFoundError(f"{GCIDE} is not there; install the Debian package dict-gcide")
    return GCIDE
