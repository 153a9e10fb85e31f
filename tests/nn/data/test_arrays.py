"""Where samples come from: mapped files, found data sets, made arrays, Datasets."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from idletrain import storage
from idletrain.errors import JobError
from idletrain.nn.data.arrays import ArraySource, FileSource
from idletrain.nn.data.datasets import MapStyleSource
from idletrain.nn.data.given import as_samples

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


def test_a_cache_that_cannot_be_written_is_not_the_file_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_pair(tmp_path, "idx.gz")
    monkeypatch.setattr(storage, "cache_folder", lambda: Path("/dev/null"))
    where = r"x-ubyte.gz is unpacked to /dev/null/unpacked, which cannot be written \(Not a directory\)"
    with pytest.raises(JobError, match=where):
        files.open()


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


def test_bytes_of_a_mask_stay_whole_numbers_beside_an_image() -> None:
    data = {"image": np.full((2, 3), 51, np.uint8), "pixel_mask": np.ones((2, 3), np.uint8), "labels": np.zeros(2)}
    for samples in (as_samples(data), MapStyleSource([{k: v[i] for k, v in data.items()} for i in range(2)])):
        batch, _ = samples.batch(np.array([0, 1]))
        assert batch["image"].unique().tolist() == [pytest.approx(0.2)]
        assert (batch["pixel_mask"].dtype, batch["pixel_mask"].unique().tolist()) == (torch.int64, [1])


class Planted:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (np.float32(1.0), "the array x of .* is a single value; its first dimension should count the samples"),
        (np.array(["a", "b"]), "the array x of .* holds str32; write it as floats, integers or booleans"),
        (np.zeros(2, np.complex64), "holds complex64"),
        (np.zeros(2, "datetime64[s]"), "holds datetime64"),
        (np.zeros(2, [("a", "f4")]), "holds void32"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_an_array_that_holds_no_samples_is_refused(tmp_path: Path, kind: str, x: Any, fault: str) -> None:
    file = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(file, x)
    else:
        np.savez(file, x=x, y=np.arange(2))
    labels = tmp_path / "y.npy"
    np.save(labels, np.arange(2))
    with pytest.raises(JobError, match=fault):
        FileSource(str(file), str(labels) if kind == "npy" else str(file), "data.train").open()


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_an_object_in_a_file_is_refused_and_never_unpickled(tmp_path: Path, kind: str) -> None:
    file, trace = tmp_path / f"x.{kind}", tmp_path / "trace"
    planted = np.array([Planted(trace)], dtype=object)
    if kind == "npy":
        np.save(file, planted)
    else:
        np.savez(file, x=planted, y=np.arange(1))
    with pytest.raises(JobError, match=r"data.train: .* is not an .npy, .npz .* or IDX file"):
        FileSource(str(file), str(file), "data.train").open()
    assert not trace.exists()
    np.load(file, allow_pickle=True)[... if kind == "npy" else "x"]
    assert trace.exists()  # it would have
