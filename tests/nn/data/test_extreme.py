"""Extreme-classification files: what is read, what is refused and where it stands."""

from __future__ import annotations

import errno
import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from idletrain.errors import JobError
from idletrain.nn.data import extreme
from idletrain.nn.data.extreme import SparseFiles, SparseSamples, sparse_names
from idletrain.nn.data.remote import find_remote

TEXT = """4 6 5
1,3 0:0.5 2:1 5:-2e-1
 1:1
4 3:0.25
0,2
"""


def write(folder: Path, text: str, name: str = "train.txt") -> str:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


def opened(folder: Path, text: str = TEXT, name: str = "train.txt", **choices: Any) -> SparseSamples:
    return SparseFiles((write(folder, text, name),), "data.train", **choices).open()


def plain(samples: SparseSamples) -> list[tuple[list[int], dict[int, float]]]:
    rows = [samples.batch(np.array([i])) for i in range(len(samples))]
    return [
        (
            y.indices.tolist(),
            dict(zip(x.indices.tolist(), np.round(x.values.numpy().astype(np.float64), 6).tolist(), strict=True)),
        )
        for x, y in rows
    ]


ALL = [([1, 3], {0: 0.5, 2: 1.0, 5: -0.2}), ([], {1: 1.0}), ([4], {3: 0.25}), ([0, 2], {})]


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_a_file_is_read_and_memory_mapped(tmp_path: Path, cache: Path, name: str) -> None:
    samples = opened(tmp_path, name=name, empty="keep")
    assert plain(samples) == ALL
    assert isinstance(samples.x.columns, np.memmap)
    assert (samples.census.rows, samples.census.features, samples.census.labels) == (4, 6, 5)
    assert samples.census.without_labels == 1
    assert len(list((cache / "sparse").iterdir())) == 1


def test_rows_without_labels_are_dropped_and_counted_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        samples = opened(tmp_path, empty="drop")
    assert plain(samples) == [ALL[0], ALL[2], ALL[3]]
    assert samples.census.without_labels == 1
    assert "1 rows without labels: drop" in caplog.text


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, cache: Path) -> None:
    opened(tmp_path)
    (folder,) = (cache / "sparse").iterdir()
    before = (folder / "census.json").stat().st_mtime_ns
    opened(tmp_path)
    assert (folder / "census.json").stat().st_mtime_ns == before
    assert len(opened(tmp_path, TEXT.replace("4 6 5", "5 6 5") + "1 1:1\n")) == 4


def test_a_header_may_be_missing(tmp_path: Path) -> None:
    samples = opened(tmp_path, "3 0:1 7:1\n1 2:0.5\n")
    assert plain(samples) == [([3], {0: 1.0, 7: 1.0}), ([1], {2: 0.5})]
    assert (samples.census.features, samples.census.labels) == (8, 4)


def test_features_out_of_order_or_repeated_are_mended_and_counted(tmp_path: Path) -> None:
    samples = opened(tmp_path, "2 6 5\n3,1 5:1 2:1 5:0.5\n1 2:1\n")
    assert plain(samples) == [([1, 3], {2: 1.0, 5: 1.5}), ([1], {2: 1.0})]
    assert samples.census.repaired_rows == 1


def test_the_rows_of_some_labels_are_found(tmp_path: Path) -> None:
    samples = opened(tmp_path, "4 6 5\n1,3 0:1\n0 1:1\n3 2:1\n1,4 1:1\n")
    assert samples.holding(np.array([1])).tolist() == [0, 3]
    assert samples.holding(np.array([3, 4, 0])).tolist() == [0, 1, 2, 3]
    assert samples.holding(np.array([2])).tolist() == []


def test_some_rows_can_be_asked_for(tmp_path: Path) -> None:
    text = "100 6 100\n" + "".join(f"{i} {i % 6}:1\n" for i in range(100))
    some = opened(tmp_path, text, most_rows=10)
    assert len(some) == 10
    labels = some.batch(np.arange(10))[1].indices.tolist()
    assert labels == sorted(set(labels)) != list(range(10))
    assert some.holding(np.array(labels[:2])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("2 6 5\n1 0:1\n1 0;1\n", r"line 3: '1 0;1' is not"),
        ("2 6 5\n1 0:1\n1,x 0:1\n", r"line 3: '1,x 0:1' is not"),
        ("2 6 5\n1 0:1\n1 0:nan\n", r"line 3: .* is not"),
        ("2 6 5\n1 0:1\n1 0:1:2\n", r"line 3: .* is not"),
        ("2 6 5\n1 0:1\n1 0:1 2\n", r"line 3: .* is not"),
        ("2 6 5\n1 0:1\n1 0:1e99\n", r"line 3: a value is beyond float32"),
        ("2 6 5\n1 0:1\n5 0:1\n", r"line 3: label 5 is beyond the 5 labels that line 1 names"),
        ("2 6 5\n1 6:1\n1 0:1\n", r"line 2: feature 6 is beyond the 6 features that line 1 names"),
        ("1 6 5\n1 99999999999999999999:1\n", r"line 2: feature 1\d+ is beyond the 6 features that line 1 names"),
        ("1 6 5\n99999999999999999999 0:1\n", r"line 2: label 1\d+ is beyond the 5 labels that line 1 names"),
        (f"1 6 5\n{'9' * 400} 0:1\n", r"line 2: label inf is beyond the 5 labels that line 1 names"),
        (f"1 6 5\n{'9' * 9999} 0:1\n", r"line 2: label inf is beyond the 5 labels that line 1 names"),
        (f"1 6 {'9' * 9999}\n1 0:1\n", r"line 1: '1 6 9+' is not `label,label feature:value"),
        ("1 99999999999999999999:1\n", r"line 1: feature 1\d+ is beyond the \d+ features that can be had"),
        ("2000000000 0:1\n", r"line 1: label 2000000000 is beyond the 100000000 labels that can be had without a"),
        ("1 6 9999999999\n1 0:1\n", r"line 1 names 9999999999 columns; at most 2147483647"),
        ("3 6 5\n1 0:1\n1 0:1\n", r"line 1 names 3 rows and 2 follow"),
        ("1 6 5\n 0:1\n", r"hold no rows with labels"),
        ("", r"hold no rows"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, cache: Path, text: str, fault: str) -> None:
    with np.errstate(over="ignore"), pytest.raises(JobError, match=f"data.train: .*train.txt.*{fault}"):
        opened(tmp_path, text)
    assert not [p for p in (cache / "sparse").iterdir() if not (p / "census.json").exists()]


def test_blank_lines_at_the_end_are_no_rows(tmp_path: Path) -> None:
    assert len(opened(tmp_path, "2 6 5\n1 0:1\n2 1:1\n\n \n")) == 2


def test_a_file_that_is_not_there_or_not_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nowhere.txt cannot be read \(No such file"):
        SparseFiles((str(tmp_path / "nowhere.txt"),), "data.train").open()
    (tmp_path / "odd.txt.gz").write_bytes(b"plain")
    with pytest.raises(JobError, match=r"odd.txt.gz cannot be read \(Not a gzipped file"):
        SparseFiles((str(tmp_path / "odd.txt.gz"),), "data.train").open()
    packed = bytearray(gzip.compress(b"1 6 5\n1 0:1\n" * 100))
    packed[14:18] = b"\xff" * 4
    (tmp_path / "hurt.txt.gz").write_bytes(packed)
    with pytest.raises(JobError, match=r"hurt.txt.gz cannot be read \(Error -3 while decompressing"):
        SparseFiles((str(tmp_path / "hurt.txt.gz"),), "data.train").open()


def test_a_full_disk_is_not_taken_for_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(extreme, "_write", full)
    with pytest.raises(JobError, match=r"sparse has no room for .*train.txt as arrays; free some there"):
        opened(tmp_path, "1 6 5\n1 0:1\n")


def save(folder: Path, x: Any, y: Any) -> SparseFiles:
    scipy.sparse.save_npz(folder / "x.npz", x)
    scipy.sparse.save_npz(folder / "y.npz", y)
    return SparseFiles((str(folder / "x.npz"), str(folder / "y.npz")), "data.train")


def test_a_pair_of_csr_matrices_is_read(tmp_path: Path) -> None:
    x = scipy.sparse.csr_matrix(np.array([[0, 2.5], [1, 0], [3, 4]]))
    y = scipy.sparse.csr_matrix(np.array([[0, 1, 0], [0, 0, 0], [1, 0, 1]]))
    samples = save(tmp_path, x, y).open()
    assert plain(samples) == [([1], {1: 2.5}), ([0, 2], {0: 3.0, 1: 4.0})]
    assert samples.census.without_labels == 1
    assert (samples.census.features, samples.census.labels) == (2, 3)


def test_a_stored_zero_is_no_label(tmp_path: Path) -> None:
    y = scipy.sparse.csr_matrix(np.array([[0, 1, 0], [0, 1, 1], [1, 0, 1]]))
    y.data[1] = 0
    samples = save(tmp_path, scipy.sparse.csr_matrix(np.eye(3)), y).open()
    assert [labels for labels, _ in plain(samples)] == [[1], [2], [0, 2]]


def test_matrices_that_are_wrong_are_refused(tmp_path: Path) -> None:
    x, y = scipy.sparse.csr_matrix(np.eye(3)), scipy.sparse.csr_matrix(np.eye(3))
    with pytest.raises(JobError, match=r"has 3 rows and .* 2; they should have as many"):
        save(tmp_path, x, y[:2]).open()
    with pytest.raises(JobError, match=r"holds a b?'csc' matrix; save matrix.tocsr\(\)"):
        save(tmp_path, x.tocsc(), y).open()
    short = {"format": "csr", "shape": (3, 3), "indptr": x.indptr, "indices": x.indices, "data": x.data[:2]}
    scipy.sparse.save_npz(tmp_path / "y.npz", y)
    np.savez(tmp_path / "x.npz", **short)
    with pytest.raises(JobError, match=r"x.npz: 3 indices, 2 values"):
        SparseFiles((str(tmp_path / "x.npz"), str(tmp_path / "y.npz")), "data.train").open()
    x.data[1] = np.nan
    with pytest.raises(JobError, match=r"x.npz, row 1: .* not finite"):
        save(tmp_path, x, y).open()
    np.savez(tmp_path / "x.npz", x=np.eye(3))
    with pytest.raises(JobError, match=r"is not what scipy.sparse.save_npz writes"):
        SparseFiles((str(tmp_path / "x.npz"), str(tmp_path / "y.npz")), "data.train").open()


def test_sparse_files_are_distinguished_from_others() -> None:
    assert sparse_names("a/train.txt.gz") == ("a/train.txt.gz",)
    assert sparse_names(("x.npz", "y.npz")) == ("x.npz", "y.npz")
    assert sparse_names("train.npz") == ()
    assert sparse_names(("x.npy", "y.npy")) == ()


def test_an_s3_object_is_fetched_once_for_each_content(prefix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix.put("train.txt", TEXT.encode())
    url = prefix.url + "train.txt"
    before = SparseFiles((find_remote(url, "data.train"),), "data.train")
    assert len(before.open()) == 3
    prefix.put("train.txt", b"1 6 5\n1 0:1\n")
    assert len(SparseFiles((find_remote(url, "data.train"),), "data.train").open()) == 1
    assert len(before.open()) == 3  # the copy of what it was
