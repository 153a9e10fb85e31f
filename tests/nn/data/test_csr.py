"""Sparse rows, against a dense matrix."""

from __future__ import annotations

import numpy as np
import torch

from idletrain.nn.data.csr import Csr, Rows, canonical, transpose

DENSE = np.array([[0, 2, 0, 3], [0, 0, 0, 0], [1, 0, 0, 4]], dtype=np.float32)
MATRIX = Csr(np.array([0, 2, 2, 4]), np.array([1, 3, 0, 3], np.int32), np.array([2, 3, 1, 4], np.float32))


def dense(rows: Rows, columns: int) -> np.ndarray:
    result = torch.zeros(len(rows), columns)
    values = torch.ones(len(rows.indices)) if rows.values is None else rows.values
    result[rows.row_numbers(), rows.indices] = values
    return result.numpy()


def test_rows_are_taken_in_any_order_empty_ones_too() -> None:
    index = np.array([2, 1, 0, 2])
    rows = MATRIX.take(index)
    assert len(rows) == 4
    assert np.array_equal(dense(rows, 4), DENSE[index])
    assert len(MATRIX.take(np.empty(0, np.int64))) == 0


def test_the_transpose_has_every_entry_s_row_by_column() -> None:
    by_column = transpose(MATRIX, 5)
    assert [by_column.take(np.array([c])).indices.tolist() for c in range(5)] == [[2], [0], [], [0, 2], []]
    assert MATRIX.counts(5).tolist() == [1, 1, 0, 2, 0]


def test_columns_are_put_in_order_and_repeated_ones_added_up() -> None:
    odd = Csr(np.array([0, 4, 4, 5]), np.array([3, 1, 3, 0, 2], np.int32), np.array([1, 2, 3, 4, 5], np.float32))
    mended, rows = canonical(odd)
    assert rows == 1
    assert mended.starts.tolist() == [0, 3, 3, 4]
    assert mended.columns.tolist() == [0, 1, 3, 2]
    assert mended.values is not None
    assert mended.values.tolist() == [4, 2, 4, 5]
    assert canonical(mended) == (mended, 0)


def test_rows_move_to_another_device_with_all_they_have() -> None:
    moved = MATRIX.take(np.array([0, 2])).to("meta")
    assert moved.values is not None
    assert {t.device.type for t in (moved.offsets, moved.indices, moved.values)} == {"meta"}
    assert moved.shape == (2,)


def test_some_rows_are_cut_out_with_their_entries() -> None:
    rows = Rows(torch.tensor([0, 2, 2, 5]), torch.tensor([1, 4, 0, 2, 3]), torch.arange(5.0))
    part = rows.some(1, 9)
    assert (part.offsets.tolist(), part.indices.tolist()) == ([0, 0, 3], [0, 2, 3])
    assert part.values is not None
    assert part.values.tolist() == [2, 3, 4]
    assert Rows(rows.offsets, rows.indices).some(0, 1).values is None
