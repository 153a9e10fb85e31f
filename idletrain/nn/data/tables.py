"""Tables: DataFrames with their columns by name, and SciPy's sparse matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idletrain.errors import JobError
from idletrain.nn.data.arrays import map_array
from idletrain.nn.data.csr import Csr, Rows, canonical
from idletrain.nn.data.values import NUMBER_KINDS, Array, as_label, described_type


def is_frame(data: Any) -> bool:
    """Return True for a DataFrame, of pandas or another library."""
    return hasattr(data, "columns") and hasattr(data, "dtypes")


def frame_array(frame: Any, name: str) -> Array:
    """Return a DataFrame's columns as one array `[N, columns]`.

    Args:
        frame: The DataFrame.
        name: What it holds, for faults.

    Raises:
        JobError: columns hold something else than numbers; they are named.
    """
    names = list(frame.columns)
    if twice := [column for column in names if names.count(column) > 1]:
        raise JobError(f"data: of the {name}, several columns are called {twice[0]!r}; give each a name of its own")
    columns = {column: np.asarray(frame[column]) for column in names}
    wrong = {column: described_type(array) for column, array in columns.items() if array.dtype.kind not in NUMBER_KINDS}
    if wrong:
        held = ", ".join(f"{column!r} ({kind})" for column, kind in wrong.items())
        raise JobError(
            f"data: of the {name}, these columns are no numbers: {held}; encode them, for example with "
            "pandas.get_dummies, or leave them out"
        )
    if not columns:
        raise JobError(f"data: the {name} have no columns")
    return np.stack(list(columns.values()), axis=1)


def is_sparse(data: Any) -> bool:
    """Return True for a matrix or array of scipy.sparse."""
    return hasattr(data, "tocsr")


@dataclass(frozen=True)
class SparseTable:
    """A sparse matrix `[N, columns]` of inputs, and labels `[N, ...]`.

    Attributes:
        x: The matrix.
        columns: Its width.
        y: The labels.
        dense: Whether a batch is a tensor `[B, columns]`; else it is sparse rows.
    """

    x: Csr
    columns: int
    y: Array
    dense: bool = True

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, index: NDArray[np.int64]) -> tuple[Tensor | Rows, Tensor]:
        rows, labels = self.x.take(index), as_label(self.y[index])
        if not self.dense:
            return rows, labels
        assert rows.values is not None
        x = torch.zeros(len(rows), self.columns)
        x[rows.row_numbers(), rows.indices] = rows.values
        return x, labels

    @property
    def parts(self) -> dict[str, Array]:
        """Return its arrays by name."""
        assert self.x.values is not None
        return {"starts": self.x.starts, "columns": self.x.columns, "values": self.x.values, "y": self.y}

    def stored(self, paths: Mapping[str, str], field: str) -> StoredTable:
        """Return the source of the same samples from files."""
        return StoredTable(dict(paths), self.columns, field)


@dataclass(frozen=True)
class StoredTable:
    """A `SparseTable` whose parts are in `.npy` files."""

    paths: dict[str, str]
    columns: int
    field: str

    def open(self) -> SparseTable:
        parts = {name: map_array(path, self.field) for name, path in self.paths.items()}
        return SparseTable(Csr(parts["starts"], parts["columns"], parts["values"]), self.columns, parts["y"])


def sparse_table(matrix: Any, labels: Array) -> SparseTable:
    """Return the samples of a matrix of scipy.sparse.

    Raises:
        JobError: it has another number of rows than labels, or a value that is not finite; the row is named.
    """
    csr = matrix.tocsr()
    if csr.dtype.kind not in NUMBER_KINDS:
        raise JobError(f"data: the sparse inputs hold {csr.dtype}; write them as floats, integers or booleans")
    if csr.shape[0] != len(labels) or not csr.shape[0]:
        count = f"{csr.shape[0]} inputs and {len(labels)} labels"
        raise JobError(f"data: {count}; there should be as many, and at least one")
    x, _ = canonical(Csr(csr.indptr.astype(np.int64), csr.indices.astype(np.int32), csr.data.astype(np.float32)))
    assert x.values is not None
    wrong = np.flatnonzero(~np.isfinite(x.values))
    if len(wrong):
        row = int(np.searchsorted(x.starts, wrong[0], "right")) - 1
        raise JobError(f"data: the inputs hold NaN or infinity in row {row}; clean the data")
    return SparseTable(x, csr.shape[1], labels)
