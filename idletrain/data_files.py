"""Notice that a file of a run's data has changed between the run's start and its resumption."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

DIGEST_LETTERS = 16
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # a megabyte of each file, however large it is


def file_digests(paths: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file's size and of samples of its content, by path.

    Folders are left out, and what is in S3 or cannot be read.
    """
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = _digest(Path(path))
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the paths, of those in both, whose digests differ."""
    return sorted(path for path in before.keys() & now.keys() if before[path] != now[path])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = path.stat().st_size
        digest.update(str(size).encode())
        for sample in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGEST_LETTERS]
