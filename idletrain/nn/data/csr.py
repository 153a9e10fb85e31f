"""Sparse rows: a batch as tensors, and a whole matrix as memory-mapped arrays (CSR).

Letters: B rows of a batch, N rows, Z stored entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """A batch of sparse rows; row i has the entries `offsets[i]` to `offsets[i + 1]`.

    Attributes:
        offsets: `[B + 1]` int64.
        indices: `[Z]` int64: the columns, ascending within a row.
        values: `[Z]` float32, or None where every entry is 1.
    """

    offsets: Tensor
    indices: Tensor
    values: Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> torch.Size:
        """Return the number of rows alone: only the layer knows the number of columns."""
        return torch.Size([len(self)])

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the column numbers."""
        return self.indices.dtype

    def to(self, device: torch.device | str) -> Rows:
        """Copy the rows to another device."""
        values = None if self.values is None else self.values.to(device)
        return Rows(self.offsets.to(device), self.indices.to(device), values)

    def some(self, start: int, stop: int) -> Rows:
        """Return the rows from `start` to before `stop`."""
        offsets = self.offsets[start : min(stop, len(self)) + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        values = None if self.values is None else self.values[entries]
        return Rows(offsets - offsets[0], self.indices[entries], values)

    def row_numbers(self) -> Tensor:
        """Return the row number of every entry `[Z]`."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.offsets.device), self.offsets.diff())


@dataclass(frozen=True)
class Csr:
    """A matrix by rows: `starts` `[N + 1]`, `columns` `[Z]`, and `values` `[Z]` or None for ones."""

    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def only(self, index: NDArray[np.int64]) -> Csr:
        """Copy some rows, in this order, into a new matrix."""
        begin = self.starts[index]
        lengths = self.starts[index + 1] - begin
        starts = np.concatenate([[0], np.cumsum(lengths)])
        places = np.arange(starts[-1]) + np.repeat(begin - starts[:-1], lengths)
        return Csr(starts, self.columns[places], None if self.values is None else self.values[places])

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Copy some rows, in this order, into a batch."""
        part = self.only(index)
        values = None if part.values is None else torch.from_numpy(part.values)
        return Rows(torch.from_numpy(part.starts), torch.from_numpy(part.columns.astype(np.int64)), values)

    def counts(self, columns: int) -> NDArray[np.int64]:
        """Return the number of entries of every column `[columns]`."""
        return np.bincount(self.columns, minlength=columns)


def transpose(matrix: Csr, columns: int) -> Csr:
    """Return the same entries by columns (without values), rows ascending within each column."""
    rows = np.repeat(np.arange(len(matrix), dtype=np.int32), np.diff(matrix.starts))
    starts = np.concatenate([[0], np.cumsum(matrix.counts(columns))])
    return Csr(starts, rows[np.argsort(matrix.columns, kind="stable")])


def canonical(matrix: Csr) -> tuple[Csr, int]:
    """Sort the columns within each row and add up repeated ones; return the matrix and the number of rows repaired."""
    rows = np.repeat(np.arange(len(matrix)), np.diff(matrix.starts))
    wrong = (np.diff(matrix.columns) <= 0) & (np.diff(rows) == 0)
    if not wrong.any():
        return matrix, 0
    repaired = len(np.unique(rows[1:][wrong]))
    order = np.lexsort((matrix.columns, rows))
    rows, columns = rows[order], matrix.columns[order]
    first = np.append(True, (np.diff(columns) != 0) | (np.diff(rows) != 0))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows[first], minlength=len(matrix)))])
    if matrix.values is None:
        return Csr(starts, columns[first]), repaired
    values = np.add.reduceat(matrix.values[order], np.flatnonzero(first)).astype(np.float32)
    return Csr(starts, columns[first], values), repaired
