"""Data sets that idletrain knows by name: scikit-learn's digits, and Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import urllib.request
import zlib
from pathlib import Path

import numpy as np

from idletrain import storage
from idletrain.errors import JobError
from idletrain.nn.data.arrays import FileSource, write_atomically
from idletrain.nn.data.values import Array

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_URL = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
FASHION_MNIST = {  # file -> SHA-256 of its content, uncompressed (compression differs between publishers)
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


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
    cache = storage.cache_folder() / "fashion-mnist"
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
    write_atomically(to, lambda file: file.write(content))
