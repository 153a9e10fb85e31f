"""Data sets that are known by name: found, downloaded, checked."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idletrain.errors import JobError
from idletrain.nn.data import known
from idletrain.nn.data.known import digits, fashion_mnist

from .test_arrays import idx


def test_digits_are_1437_and_360_images_and_always_the_same() -> None:
    (x, y), (test_x, test_y) = digits()
    assert (x.shape, test_x.shape) == ((1437, 64), (360, 64))
    assert (x.min(), x.max()) == (0, 1)
    assert set(y.tolist()) == set(test_y.tolist()) == set(range(10))
    assert np.array_equal(digits()[0][1], y)


def fake_fashion_mnist(folder: Path, checkpoint: int, packed: bool = False) -> None:
    """The four files with two samples each, all of value `mark`."""
    folder.mkdir(parents=True)
    for name in known.FASHION_MNIST:
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
    monkeypatch.setattr(known, "DEBIAN_FASHION_MNIST", tmp_path / "debian")
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
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served on loopback in the place of Fashion-MNIST's public server."""
    folder = tmp_path / "served"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(known, "FASHION_MNIST_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(known, "DEBIAN_FASHION_MNIST", tmp_path / "no-debian")
        yield folder
        server.shutdown()
        thread.join()


def test_fashion_mnist_is_downloaded_and_checked(
    cache_home: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_fashion_mnist(cache_home, 7, packed=True)
    sums = {
        n: hashlib.sha256(gzip.decompress((cache_home / f"{n}.gz").read_bytes())).hexdigest()
        for n in known.FASHION_MNIST
    }
    monkeypatch.setattr(known, "FASHION_MNIST", sums)
    assert mark_of(None) == 7
    assert sorted(p.name for p in (cache / "fashion-mnist").iterdir()) == sorted(sums)
    (cache_home / "train-images-idx3-ubyte.gz").unlink()
    assert mark_of(None) == 7


def test_a_download_with_another_sha256_is_refused_and_not_kept(cache_home: Path, cache: Path) -> None:
    fake_fashion_mnist(cache_home, 7, packed=True)
    with pytest.raises(JobError, match=r"does not hold the published data \(SHA-256 differs\); set data.path"):
        fashion_mnist(None)
    assert not (cache / "fashion-mnist").exists()


@pytest.mark.parametrize("served", [b"", b"not gzip", None])
def test_a_download_that_fails_tells_the_other_ways(cache_home: Path, served: bytes | None) -> None:
    cache_home.mkdir()
    if served is not None:
        (cache_home / "train-images-idx3-ubyte.gz").write_bytes(served)
    with pytest.raises(JobError, match=r"dataset-fashion-mnist or set data.path|SHA-256 differs"):
        fashion_mnist(None)
