"""Staged updates on disk: one file a round, each subnet's payload at an offset that the write-ahead log names."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from idletrain.errors import DamageError
from idletrain.exchange.messages import checksum
from idletrain.storage import sync_directory


@dataclass(frozen=True)
class StagedUpdate:
    """One durable update: the place of its payload in the round's file, and the local steps that it holds."""

    subnet: int
    steps: int
    offset: int
    size_bytes: int
    checksum: int


def path_of(run_dir: Path, round_: int) -> Path:
    """Return the path of a round's update file."""
    return run_dir / "updates" / f"{round_:08d}"


def write(path: Path, offset: int, frames: Sequence[memoryview | bytes]) -> None:
    """Write a payload at its offset; it survives a killed process at once, a power cut after `sync`.

    Raises:
        OSError: There is no room.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for frame in frames:
            view = memoryview(frame)
            while view.nbytes:
                written = os.pwrite(descriptor, view, offset)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Make a round's payloads, and their file's name, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def read(path: Path, staged: StagedUpdate) -> Tensor:
    """Return the flat float32 buffer `[P]` of a staged update, memory-mapped copy-on-write.

    Raises:
        DamageError: The file does not hold what was written.
    """
    try:
        content = np.memmap(path, np.uint8, "c", staged.offset, (staged.size_bytes,))
    except (OSError, ValueError):
        raise DamageError(f"{path}: the update of subnet {staged.subnet} is missing") from None
    if checksum([content.data]) != staged.checksum:
        raise DamageError(f"{path}: the update of subnet {staged.subnet} at byte {staged.offset} is damaged")
    return torch.from_numpy(content.view(np.float32))


def prune(run_dir: Path, before: int) -> None:
    """Remove the update files of rounds before `before`: a snapshot that is kept holds them."""
    for path in (run_dir / "updates").iterdir():
        if int(path.name) < before:
            path.unlink()
