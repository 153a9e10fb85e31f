"""Staged updates on disk: one file a round, each subnet's payload at an offset that the write-ahead log names."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import DamageError, RunError, shortened
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
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


def read(path: Path, staged: StagedUpdate) -> NDArray[np.float32]:
    """Return the flat float32 buffer `[P]` of a staged update, memory-mapped copy-on-write.

    Raises:
        DamageError: The file does not hold what was written.
        RunError: The file is there and cannot be read.
    """
    try:
        content = np.memmap(path, np.uint8, "c", staged.offset, (staged.size_bytes,))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DamageError(f"{path}: the update of subnet {staged.subnet} is missing") from None
    except ValueError:
        raise DamageError(f"{path}: ends before the update of subnet {staged.subnet}") from None
    except (TypeError, OverflowError):
        place = shortened(f"{staged.size_bytes!r} bytes from {staged.offset!r}")
        raise DamageError(f"{path}: the update of subnet {staged.subnet} cannot be at {place}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); fix that and try again") from None
    if checksum([content.data]) != staged.checksum:
        raise DamageError(f"{path}: the update of subnet {staged.subnet} at byte {staged.offset} is damaged")
    if len(content) % np.dtype(np.float32).itemsize:
        raise DamageError(f"{path}: the update of subnet {staged.subnet} is no whole number of values")
    return content.view(np.float32)


def rounds(run_dir: Path) -> list[int]:
    """Return the rounds that have an update file, oldest first."""
    return sorted(round_ for round_, _ in _files(run_dir))


def prune(run_dir: Path, before: int) -> None:
    """Remove the update files of rounds before `before`: a snapshot that is kept holds them."""
    for round_, path in _files(run_dir):
        if round_ < before:
            path.unlink()


def drop(run_dir: Path, first: int) -> None:
    """Remove the update files of round `first` and later ones, which are to be trained again."""
    for round_, path in _files(run_dir):
        if round_ >= first:
            path.unlink()


def _files(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the update files and their rounds."""
    return [(int(path.name), path) for path in (run_dir / "updates").glob("*") if path.name.isdecimal()]
