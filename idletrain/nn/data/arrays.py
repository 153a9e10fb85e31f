"""Data sets as pairs of arrays that a worker memory-maps and does not copy.

A `Source` is small and is sent to workers; `open()` opens the arrays on the machine where it is called. Compressed
files are unpacked once per machine, into the user's cache.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from idletrain import storage
from idletrain.errors import JobError
from idletrain.nn.data.batches import map_leaves, named_parts
from idletrain.nn.data.remote import Remote
from idletrain.nn.data.values import Array, array_fault, as_input, as_label, part_of


class Source(Protocol):
    """The origin of samples: small, picklable, and the same on every machine."""

    def open(self) -> Samples:
        """Open the samples on this machine.

        Raises:
            JobError: they are missing on this machine, or are not numbers in a known format.
        """


class Samples(Protocol):
    """Numbered samples."""

    def __len__(self) -> int: ...

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return inputs and target of the samples `index` `[B]`.

        Inputs are a tensor `[B, ...]`, sparse rows, or a tuple, mapping or dataclass of these. The target is the labels
        `[B, ...]`; if inputs are a mapping or dataclass that holds the labels, it is the inputs themselves.
        """


@dataclass(frozen=True)
class ArraySource:
    """Inputs `[N, ...]` and labels `[N, ...]`.

    Attributes:
        x: The inputs.
        y: The labels.
        integers: Whether 8-bit inputs stay integers; else they become floats in [0, 1].
    """

    x: Array
    y: Array
    integers: bool = False

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x, y = np.asarray(self.x), np.asarray(self.y)  # indexing a np.memmap itself takes 15 us longer
        return as_input(x[index], integers=self.integers), as_label(y[index])

    @property
    def parts(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {"x": self.x, "y": self.y}

    def stored(self, paths: Mapping[str, str], field: str) -> FileSource:
        """Return the source of the same samples from files."""
        return FileSource(paths["x"], paths["y"], field)


@dataclass(frozen=True)
class ArrayTree:
    """Arrays `[N, ...]` in any containers, and labels `[N, ...]`.

    Attributes:
        x: The inputs: an array, or a tuple, mapping or dataclass of arrays or of such containers.
        y: The labels; None where they are among the inputs by name, or where the inputs are their own target.
        integers: Whether 8-bit inputs stay integers.
    """

    x: Any
    y: Array | None
    integers: bool = False

    def __len__(self) -> int:
        return len(self.arrays[0][1])

    @property
    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array with its name, the labels last."""
        return [*named_parts(self.x), *([("labels", self.y)] if self.y is not None else [])]

    def batch(self, index: NDArray[np.int64]) -> tuple[Any, Any]:
        x = map_leaves(lambda name, array: part_of(name, array[index], integers=self.integers), self.x)
        return x, x if self.y is None else as_label(self.y[index])

    @property
    def parts(self) -> dict[str, Array]:
        """Return the arrays by numbers, in order, since names given by users may be no names of files."""
        return {str(number): array for number, (_, array) in enumerate(self.arrays)}

    def stored(self, paths: Mapping[str, str], field: str) -> FileTree:
        """Return the source of the same samples from files."""
        files = iter(paths.values())
        x = map_leaves(lambda _name, _array: next(files), self.x)
        return FileTree(x, None if self.y is None else next(files), field)


@dataclass(frozen=True)
class FileSource:
    """A pair of arrays in files, here or in S3: `.npy`, IDX (also `.gz`), or both in one `.npz` (`x` and `y`)."""

    x: str | Remote
    y: str | Remote
    field: str = "data"

    def open(self) -> ArraySource:
        x, y = (self._local_path(file) for file in (self.x, self.y))
        arrays = ArraySource(_map(x, "x", self.field), _map(y, "y", self.field))
        if len(arrays.x) != len(arrays.y):
            raise JobError(f"{self.field}: {self.x} holds {len(arrays.x)} samples but {self.y} {len(arrays.y)} labels")
        if not len(arrays.x):
            raise JobError(f"{self.field}: {self.x} holds no samples")
        return arrays

    def _local_path(self, file: str | Remote) -> Path:
        return file.download(storage.cache_folder() / "s3", self.field) if isinstance(file, Remote) else Path(file)


@dataclass(frozen=True)
class FileTree:
    """An `ArrayTree` in `.npy` files: the same containers, with paths in the place of arrays."""

    x: Any
    y: str | None
    field: str

    def open(self) -> ArrayTree:
        x = map_leaves(lambda _name, path: map_array(path, self.field), self.x)
        return ArrayTree(x, None if self.y is None else map_array(self.y, self.field))


def map_array(path: str, field: str) -> Array:
    """Memory-map the array of an `.npy` file."""
    return _map(Path(path), Path(path).stem, field)


def _map(path: Path, member: str, job_field: str) -> Array:
    """Memory-map the array in a file."""
    try:
        if path.suffix == ".npz":
            plain = _unpacked(path, f".{member}.npy", lambda file: _copy_member(path, member, file), job_field)
        elif path.suffix == ".gz":
            plain = _unpacked(path, "", lambda file: _gunzip(path, file), job_field)
        else:
            plain = path
        mapped: Array = np.load(plain, mmap_mode="r") if plain.suffix == ".npy" else _map_idx(plain)
        if not isinstance(mapped, np.ndarray):
            raise ValueError("it is an archive of arrays")
    except JobError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise JobError(f"{job_field}: {path} cannot be read ({reason}); name an existing file") from None
    except Exception as error:  # noqa: BLE001 (damaged bytes end in errors of NumPy, zipfile, gzip and tokenize)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise JobError(
            f"{job_field}: {path} is not an .npy, .npz (with arrays x and y) or IDX file ({reason})"
        ) from None
    if fault := array_fault(mapped):
        raise JobError(f"{job_field}: the array {member} of {path} {fault}")
    return mapped


def _map_idx(path: Path) -> Array:
    """Memory-map an IDX file of unsigned bytes: magic 0, 0, 8, dimensions, then big-endian lengths."""
    with path.open("rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08":
            raise ValueError("its first bytes are not those of an IDX file of unsigned bytes")
        lengths = file.read(4 * head[3])
        shape = struct.unpack(f">{head[3]}I", lengths) if len(lengths) == 4 * head[3] else ()
    if path.stat().st_size < 4 + 4 * head[3] + math.prod(shape) or not shape:
        raise ValueError("it is shorter than its first bytes say")
    return np.memmap(path, np.uint8, "r", offset=4 + 4 * head[3], shape=shape)


def _unpacked(path: Path, suffix: str, unpack: Callable[[Any], Any], job_field: str) -> Path:
    """Return a file's unpacked copy in the cache, created if missing; its name is made of path, size and time.

    Raises:
        OSError: the file cannot be read.
        JobError: the copy cannot be written.
    """
    stat = path.stat()
    identity = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = storage.cache_folder() / "unpacked" / f"{identity}-{path.stem}{suffix}"
    try:
        if not copy.exists():
            write_atomically(copy, unpack)
    except OSError as error:
        if error.errno is None or error.filename == str(path):  # gzip's own, or the file's
            raise
        where = f"{path} is unpacked to {copy.parent}, which cannot be written ({error.strerror})"
        raise JobError(f"{job_field}: {where}; make that possible, or unpack it yourself") from None
    return copy


def write_atomically(to: Path, fill: Callable[[Any], Any]) -> None:
    """Write a file atomically, also when several workers write it at once."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=to.parent, delete=False) as file:
        try:
            fill(file)
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(to)


def _copy_member(path: Path, member: str, file: Any) -> None:
    with np.load(path) as archive:
        np.save(file, archive[member])


def _gunzip(path: Path, file: Any) -> None:
    with gzip.open(path) as packed:
        shutil.copyfileobj(packed, file)
