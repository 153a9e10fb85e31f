"""DataFrames and sparse matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from idletrain.errors import JobError
from idletrain.nn.data.csr import Rows
from idletrain.nn.data.given import as_samples
from idletrain.nn.data.run_files import RunData
from idletrain.nn.data.tables import SparseTable

DENSE = np.array([[0, 1.5, 0], [2, 0, 0], [0, 0, 0], [0, 3, 4]])


@pytest.mark.parametrize(
    "kind",
    [
        scipy.sparse.csr_matrix,
        scipy.sparse.csr_array,
        scipy.sparse.coo_array,
        scipy.sparse.dok_matrix,
        scipy.sparse.dok_array,
    ],
)
def test_a_sparse_matrix_is_read_as_dense_or_sparse_rows(kind: Any) -> None:
    samples = as_samples((kind(DENSE), np.arange(4)))
    assert isinstance(samples, SparseTable)
    inputs, labels = samples.batch(np.array([3, 2, 0]))
    assert inputs.tolist() == DENSE[[3, 2, 0]].tolist()
    assert labels.tolist() == [3, 2, 0]
    rows, _ = SparseTable(samples.x, 3, samples.y, dense=False).batch(np.array([3, 0]))
    assert isinstance(rows, Rows)
    assert rows.indices.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("matrix", "labels", "fault"),
    [
        (scipy.sparse.csr_array(DENSE), np.arange(3), "4 inputs and 3 labels"),
        (scipy.sparse.csr_array(np.array([[0, 1], [np.nan, 0]])), np.arange(2), "NaN or infinity in row 1; clean"),
        (scipy.sparse.csr_array(DENSE.astype(complex)), np.arange(4), "hold complex128"),
    ],
)
def test_a_sparse_matrix_with_a_fault_is_refused(matrix: Any, labels: Any, fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        as_samples((matrix, labels))


def test_a_data_frame_becomes_an_array_and_its_strings_are_named_by_column() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1, 2], "income": [0.5, 1.5], "city": ["Rio", "Recife"], "plan": ["a", None]})
    inputs, labels = as_samples((frame[["age", "income"]], frame["age"])).batch(np.array([1, 0]))
    assert inputs.tolist() == [[2, 1.5], [1, 0.5]]
    assert labels.tolist() == [2, 1]
    with pytest.raises(JobError, match=r"of the inputs, these columns are no numbers: 'city' \(str\), 'plan' \(str\)"):
        as_samples((frame, frame["age"]))
    with pytest.raises(JobError, match="the array of labels holds str"):
        as_samples((frame[["age"]], frame["city"]))
    with pytest.raises(JobError, match="a DataFrame alone does not say what the labels are"):
        as_samples(frame)


def test_a_sparse_matrix_travels_to_workers_as_files(tmp_path: Any) -> None:
    data = RunData((scipy.sparse.csr_array(DENSE), np.arange(4)), tmp_path / "data" / "train")
    data.write()
    make, arguments = data.__reduce__()
    there = make(*arguments).open()
    assert isinstance(there.x.values, np.memmap)
    for ours, theirs in zip(data.open().batch(np.array([1, 3])), there.batch(np.array([1, 3])), strict=True):
        assert torch.equal(ours, theirs)


def test_data_frames_may_be_parts_and_hold_numbers_of_several_kinds() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [1, 2], "income": [0.5, 1.5], "member": [True, False]})
    for data in ((frame, frame[["age"]], frame["age"]), {"x": frame, "labels": frame["age"]}):
        inputs, _ = as_samples(data).batch(np.array([1]))
        assert (inputs["x"] if isinstance(data, dict) else inputs[0]).tolist() == [[2, 1.5, 0]]


def test_columns_of_one_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2, 3.0]], columns=["age", "age", "income"])
    with pytest.raises(JobError, match="of the inputs, several columns are called 'age'; give each a name of its own"):
        as_samples((frame, [0]))
