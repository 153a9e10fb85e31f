"""Data sets as pairs of arrays that a worker memory-maps and does not copy.

A `Source` is small and is sent to workers; `open()` opens the arrays on the machine where it is called. Compressed
files are unpacked once per machine, into the user's cache.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import shutil
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError, user_code
from idletrain.nn.data.remote import Remote

Array = NDArray[Any]
CACHE = Path("~/.cache/idletrain").expanduser()
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
FASHION_MNIST = {  # file -> SHA-256 of its content, uncompressed (compression differs between publishers)
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


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
        """Return inputs `[B, ...]` and labels `[B, ...]` of the samples `index` `[B]`: tensors, or sparse rows."""


@dataclass(frozen=True)
class ArraySource:
    """Inputs `[N, ...]` and labels `[N, ...]`; 8-bit inputs become floats in [0, 1]."""

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return _as_input(self.x[index]), _as_label(self.y[index])


@dataclass(frozen=True)
class MapStyleSource:
    """A map-style torch Dataset of (input, label) pairs."""

    dataset: Any

    def open(self) -> MapStyleSource:
        return self

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        inputs, labels = zip(*(self.dataset[int(i)] for i in index), strict=True)
        return (
            torch.stack([_as_input(np.asarray(i)) for i in inputs]),
            torch.stack([_as_label(np.asarray(label)) for label in labels]),
        )


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
        return file.download(CACHE / "s3", self.field) if isinstance(file, Remote) else Path(file)


@dataclass(frozen=True)
class FactorySource:
    """Data created by code on every machine: a factory returns `(train, test)`, each a pair of arrays.

    Attributes:
        factory: The function.
        part: 0 for training data, 1 for test data.
        args: Its keyword arguments.
    """

    factory: Callable[..., Any]
    part: int
    args: dict[str, Any] = field(default_factory=dict)

    def open(self) -> Samples:
        name = getattr(self.factory, "__name__", repr(self.factory))
        with user_code(f"data.args: {name} does not take {self.args}: "):
            parts = self.factory(**self.args)
        if not isinstance(parts, Sequence) or len(parts) != 2:
            raise JobError(f"data.factory: {name} should return (train, test)")
        return as_samples(parts[self.part])


def as_samples(data: Any) -> Samples:
    """Make samples from a pair of arrays or tensors, or a map-style Dataset.

    Raises:
        JobError: it is neither.
    """
    if isinstance(data, Sequence) and len(data) == 2:
        x, y = (part.numpy() if isinstance(part, Tensor) else np.asarray(part) for part in data)
        if len(x) != len(y) or not len(x):
            raise JobError(f"data: {len(x)} inputs and {len(y)} labels; there should be as many, and at least one")
        return ArraySource(x, y)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if not len(data):
            raise JobError(f"data: the {type(data).__name__} holds no samples")
        return MapStyleSource(data)
    raise JobError(f"data: a {type(data).__name__} is neither a pair of arrays nor a map-style Dataset")


def digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Load scikit-learn's bundled digits: 1,437 training and 360 test images of 8 x 8 pixels.

    They are read from the package's file: importing scikit-learn would take every worker a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise JobError("data.name: digits come with scikit-learn, which is not installed; pip install scikit-learn")
    table = np.loadtxt(Path(package.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    table = table[np.random.Generator(np.random.Philox(0)).permutation(len(table))]
    x, y = (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def fashion_mnist(path: str | None) -> tuple[FileSource, FileSource]:
    """Return Fashion-MNIST (Xiao et al., arXiv 1708.07747) as sources of training and test data.

    It is taken from `path`; without one from the cache, the Debian package dataset-fashion-mnist, or its public
    address, in this order.

    Raises:
        JobError: it is in none of these places and cannot be downloaded.
    """
    folder = _find_fashion_mnist(None if path is None else Path(path).expanduser())
    train_x, train_y, test_x, test_y = (str(_plain_or_packed(folder / name)) for name in FASHION_MNIST)
    return FileSource(train_x, train_y), FileSource(test_x, test_y)


def _plain_or_packed(path: Path) -> Path:
    return path if path.exists() else path.with_name(path.name + ".gz")


def _find_fashion_mnist(path: Path | None) -> Path:
    cache = CACHE / "fashion-mnist"
    for folder in [path] if path else [cache, DEBIAN_FASHION_MNIST]:
        if all(_plain_or_packed(folder / name).exists() for name in FASHION_MNIST):
            return folder
    if path:
        raise JobError(f"data.path: {path} does not hold Fashion-MNIST's four files ({', '.join(FASHION_MNIST)})")
    for name, digest in FASHION_MNIST.items():
        _download(FASHION_MNIST_URL + name + ".gz", cache / name, digest)
    return cache


def _download(url: str, to: Path, sha256: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:  # noqa: S310 (a constant https address)
            content = gzip.decompress(reply.read())
    except (OSError, EOFError, zlib.error) as error:
        raise JobError(
            f"data.name: fashion-mnist is not on this machine and {url} cannot be reached ({error}); "
            "install the Debian package dataset-fashion-mnist or set data.path"
        ) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise JobError(
            f"data.name: {url} does not hold the published data (SHA-256 differs); set data.path to a good copy"
        )
    _write(to, lambda file: file.write(content))


def _map(path: Path, member: str, job_field: str) -> Array:
    """Memory-map the array in a file."""
    try:
        if path.suffix == ".npz":
            plain = _unpacked(path, f".{member}.npy", lambda file: _copy_member(path, member, file))
        elif path.suffix == ".gz":
            plain = _unpacked(path, "", lambda file: _gunzip(path, file))
        else:
            plain = path
        mapped: Array = np.load(plain, mmap_mode="r") if plain.suffix == ".npy" else _map_idx(plain)
        return mapped
    except OSError as error:
        reason = error.strerror or str(error)
        raise JobError(f"{job_field}: {path} cannot be read ({reason}); name an existing file") from None
    except (ValueError, KeyError) as error:
        raise JobError(
            f"{job_field}: {path} is not an .npy, .npz (with arrays x and y) or IDX file ({error})"
        ) from None


def _map_idx(path: Path) -> Array:
    """Memory-map an IDX file of unsigned bytes: magic 0, 0, 8, dimensions, then big-endian lengths."""
    with path.open("rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08":
            raise ValueError("its first bytes are not those of an IDX file of unsigned bytes")
        shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
    return np.memmap(path, np.uint8, "r", offset=4 + 4 * head[3], shape=shape)


def _unpacked(path: Path, suffix: str, unpack: Callable[[Any], Any]) -> Path:
    """Return a file's unpacked copy in the cache, created if missing; its name is made of path, size and time."""
    stat = path.stat()
    identity = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = CACHE / "unpacked" / f"{identity}-{path.stem}{suffix}"
    if not copy.exists():
        _write(copy, unpack)
    return copy


def _write(to: Path, fill: Callable[[Any], Any]) -> None:
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


def _as_input(x: Array) -> Tensor:
    if x.dtype == np.uint8:
        return torch.from_numpy(np.asarray(x, order="C")).float().div_(255)
    return torch.from_numpy(np.asarray(x, dtype=np.float32 if x.dtype.kind == "f" else np.int64, order="C"))


def _as_label(y: Array) -> Tensor:
    # Not np.ascontiguousarray: it makes a single label an array of one.
    return torch.from_numpy(np.asarray(y, dtype=np.float32 if y.dtype.kind == "f" else np.int64, order="C"))
