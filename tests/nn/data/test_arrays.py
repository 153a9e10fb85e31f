"""Where samples come from: mapped files, found data sets, made arrays, Datasets."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from idletrain.errors import JobError
from idletrain.nn.data import arrays
from idletrain.nn.data.arrays import (
    ArraySource,
    FactorySource,
    FileSource,
    MapStyleSource,
    as_samples,
    digits,
    fashion_mnist,
)

X = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
Y = np.array([3, 1, 0, 2], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file."""
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_pair(folder: Path, kind: str) -> FileSource:
    match kind:
        case "npz":
            np.savez(folder / "d.npz", x=X, y=Y)
            return FileSource(str(folder / "d.npz"), str(folder / "d.npz"))
        case "compressed npz":
            np.savez_compressed(folder / "d.npz", x=X, y=Y)
            return FileSource(str(folder / "d.npz"), str(folder / "d.npz"))
        case "npy":
            np.save(folder / "x.npy", X)
            np.save(folder / "y.npy", Y)
            return FileSource(str(folder / "x.npy"), str(folder / "y.npy"))
        case "idx":
            (folder / "x-ubyte").write_bytes(idx(X))
            (folder / "y-ubyte").write_bytes(idx(Y))
            return FileSource(str(folder / "x-ubyte"), str(folder / "y-ubyte"))
    (folder / "x-ubyte.gz").write_bytes(gzip.compress(idx(X)))
    (folder / "y-ubyte.gz").write_bytes(gzip.compress(idx(Y)))
    return FileSource(str(folder / "x-ubyte.gz"), str(folder / "y-ubyte.gz"))


@pytest.mark.parametrize("kind", ["npz", "compressed npz", "npy", "idx", "idx.gz"])
def test_files_are_memory_mapped_whatever_their_format(tmp_path: Path, kind: str) -> None:
    samples = write_pair(tmp_path, kind).open()
    assert isinstance(samples.x, np.memmap)
    assert isinstance(samples.y, np.memmap)
    assert np.array_equal(samples.x, X)
    assert np.array_equal(samples.y, Y)
    inputs, labels = samples.batch(np.array([2, 0]))
    torch.testing.assert_close(inputs, torch.from_numpy(X[[2, 0]]).float() / 255)
    assert labels.tolist() == [0, 3]
    assert labels.dtype == torch.int64


def test_packed_files_are_unpacked_once_and_again_when_they_change(tmp_path: Path, cache: Path) -> None:
    files = write_pair(tmp_path, "idx.gz")
    files.open()
    files.open()
    assert len(list((cache / "unpacked").iterdir())) == 2
    (tmp_path / "x-ubyte.gz").write_bytes(gzip.compress(idx(X + 1)))
    assert np.array_equal(files.open().x, X + 1)
    assert len(list((cache / "unpacked").iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("none.npz", None, "cannot be read .No such file or directory.; name an existing file"),
        ("x.npz", b"not an archive", "is not an .npy, .npz .with arrays x and y. or IDX file"),
        ("x.npy", b"not an array", "is not an .npy"),
        (
            "x",
            b"\0\0\x0d\1\0\0\0\1\0\0\0\0",
            "is not an .npy.* first bytes are not those of an IDX file of unsigned bytes",
        ),
        ("x.gz", b"not gzip", "cannot be read .Not a gzipped file"),
    ],
)
def test_a_bad_file_is_named_with_the_field(tmp_path: Path, name: str, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError, match=f"data.train: .*{name} {fault}") as caught:
        FileSource(str(tmp_path / name), str(tmp_path / name), field="data.train").open()
    assert len(caught.value.faults) == 1


def test_a_cut_idx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(idx(X)[:-1])
    with pytest.raises(JobError, match=r"is not an \.npy"):
        FileSource(str(tmp_path / "x"), str(tmp_path / "x")).open()


def test_an_archive_without_x_is_refused_and_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "d.npz", images=X, y=Y)
    with pytest.raises(JobError, match="with arrays x and y"):
        FileSource(str(tmp_path / "d.npz"), str(tmp_path / "d.npz")).open()
    assert list((cache / "unpacked").iterdir()) == []


def test_inputs_and_labels_must_be_as_many_and_not_none(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=Y[:3])
    with pytest.raises(JobError, match=r"holds 4 samples but .* 3 labels"):
        FileSource(str(tmp_path / "d.npz"), str(tmp_path / "d.npz")).open()
    np.savez(tmp_path / "e.npz", x=X[:0], y=Y[:0])
    with pytest.raises(JobError, match="holds no samples"):
        FileSource(str(tmp_path / "e.npz"), str(tmp_path / "e.npz")).open()


# --- Fashion-MNIST ----------------------------------------------------------------------------------------------------


def fake_fashion_mnist(folder: Path, checkpoint: int, packed: bool = False) -> None:
    """The four files with two samples each, all of value `mark`."""
    folder.mkdir(parents=True)
    for name in arrays.FASHION_MNIST:
        array = np.full((2, 3, 3) if "images" in name else 2, checkpoint, dtype=np.uint8)
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))


def mark_of(path: str | None) -> int:
    train, test = fashion_mnist(path)
    assert train.open().x.max() == test.open().y.max()
    return int(train.open().x.max())


def test_fashion_mnist_is_looked_for_in_path_then_cache_then_debian_s_package(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
    fake_fashion_mnist(tmp_path / "debian", 1, packed=True)
    assert mark_of(None) == 1
    fake_fashion_mnist(cache / "fashion-mnist", 2)
    assert mark_of(None) == 2
    fake_fashion_mnist(tmp_path / "mine", 3)
    assert mark_of(str(tmp_path / "mine")) == 3


def test_a_path_without_fashion_mnist_is_refused_even_if_it_is_elsewhere(tmp_path: Path, cache: Path) -> None:
    fake_fashion_mnist(cache / "fashion-mnist", 2)
    with pytest.raises(JobError, match=r"data.path: .* does not hold Fashion-MNIST's four files \(train-images"):
        fashion_mnist(str(tmp_path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served on loopback in the place of Fashion-MNIST's public home."""
    folder = tmp_path / "served"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(arrays, "FASHION_MNIST_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(arrays, "DEBIAN_FASHION_MNIST", tmp_path / "no-debian")
        yield folder
        server.shutdown()
        thread.join()


def test_fashion_mnist_is_downloaded_and_checked(home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fashion_mnist(home, 7, packed=True)
    sums = {
        n: hashlib.sha256(gzip.decompress((home / f"{n}.gz").read_bytes())).hexdigest() for n in arrays.FASHION_MNIST
    }
    monkeypatch.setattr(arrays, "FASHION_MNIST", sums)
    assert mark_of(None) == 7
    assert sorted(p.name for p in (cache / "fashion-mnist").iterdir()) == sorted(sums)
    (home / "train-images-idx3-ubyte.gz").unlink()
    assert mark_of(None) == 7


def test_a_download_with_another_sha256_is_refused_and_not_kept(home: Path, cache: Path) -> None:
    fake_fashion_mnist(home, 7, packed=True)
    with pytest.raises(JobError, match=r"does not hold the published data \(SHA-256 differs\); set data.path"):
        fashion_mnist(None)
    assert not (cache / "fashion-mnist").exists()


@pytest.mark.parametrize("served", [b"", b"not gzip", None])
def test_a_download_that_fails_tells_the_other_ways(home: Path, served: bytes | None) -> None:
    home.mkdir()
    if served is not None:
        (home / "train-images-idx3-ubyte.gz").write_bytes(served)
    with pytest.raises(JobError, match=r"dataset-fashion-mnist or set data.path|SHA-256 differs"):
        fashion_mnist(None)


# --- made data and Datasets -------------------------------------------------------------------------------------------


def test_digits_are_1437_and_360_images_and_always_the_same() -> None:
    (x, y), (test_x, test_y) = digits()
    assert (x.shape, test_x.shape) == ((1437, 64), (360, 64))
    assert (x.min(), x.max()) == (0, 1)
    assert set(y.tolist()) == set(test_y.tolist()) == set(range(10))
    assert np.array_equal(digits()[0][1], y)


def make(train: int) -> Any:
    return (np.zeros((train, 2)), np.zeros(train)), (np.ones((3, 2)), np.ones(3))


def test_made_data_come_from_the_factory_s_train_or_test_part() -> None:
    assert len(FactorySource(make, 0, {"train": 5}).open()) == 5
    assert len(FactorySource(make, 1, {"train": 5}).open()) == 3


def test_a_factory_that_returns_something_else_is_refused() -> None:
    with pytest.raises(JobError, match=r"data.factory: .* should return \(train, test\)"):
        FactorySource(lambda: 7, 0).open()


def test_a_factory_that_does_not_take_its_arguments_is_refused() -> None:
    with pytest.raises(JobError, match=r"data\.args: "):
        FactorySource(make, 0, {"trian": 5}).open()


def test_a_map_style_dataset_gives_batches_like_arrays() -> None:
    x, y = torch.randn(6, 3), torch.arange(6)
    ours, theirs = as_samples(TensorDataset(x, y)), as_samples((x, y))
    assert isinstance(ours, MapStyleSource)
    assert isinstance(theirs, ArraySource)
    assert len(ours) == 6
    for a, b in zip(ours.batch(np.array([5, 1])), theirs.batch(np.array([5, 1])), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize(
    ("given_", "fault"),
    [
        ((np.zeros((3, 2)), np.zeros(2)), "3 inputs and 2 labels"),
        ((np.zeros((0, 2)), np.zeros(0)), "0 inputs and 0 labels"),
        (iter([1]), "is neither a pair of arrays nor a map-style Dataset"),
        (TensorDataset(torch.zeros(0, 3), torch.zeros(0)), "holds no samples"),
    ],
)
def test_other_data_are_refused(given_: Any, fault: str) -> None:
    with pytest.raises(JobError, match=f"data: .*{fault}"):
        as_samples(given_)


@pytest.mark.parametrize(
    ("dtype", "as_input", "as_label"),
    [
        (np.uint8, torch.float32, torch.int64),
        (np.float64, torch.float32, torch.float32),
        (np.int32, torch.int64, torch.int64),
        (np.bool_, torch.int64, torch.int64),
    ],
)
def test_numbers_become_what_layers_and_losses_take(dtype: Any, as_input: torch.dtype, as_label: torch.dtype) -> None:
    inputs, labels = ArraySource(np.ones((2, 2), dtype), np.ones(2, dtype)).batch(np.array([0, 1]))
    assert (inputs.dtype, labels.dtype) == (as_input, as_label)
