"""Loops over sparse rows for which torch has no fast operator, compiled by Numba for the CPU.

Callers check the arrays first: Numba checks no bounds. `benchmarks/kernels.py` measures each function against torch.
Letters: B rows of a batch, H hidden, Z entries, R rows of a matrix.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
_compiled = numba.njit(cache=True, nogil=True)
_summing = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # else sums are not vectorized


@_compiled
def bag_backward(offsets: Ids, places: Ids, values: Floats, grad_BH: Floats, out_UH: Floats) -> None:
    """Sum the gradient of each of U distinct embeddings into `out_UH`, zeros before.

    `places` `[Z]` holds each entry's place among the distinct embeddings.
    """
    for b in range(len(grad_BH)):
        for z in range(offsets[b], offsets[b + 1]):
            row, value = places[z], values[z]
            for h in range(grad_BH.shape[1]):
                out_UH[row, h] += value * grad_BH[b, h]


@_compiled
def distinct(ids: Ids, seen_R: NDArray[np.int32], unique: Ids, places: Ids) -> int:
    """Write the distinct ids by first appearance and each id's place among them; return the number of distinct ids.

    `seen_R` holds -1 before and after, so that no pass over all R is needed.
    """
    count = 0
    for z in range(len(ids)):
        if seen_R[ids[z]] < 0:
            seen_R[ids[z]] = count
            unique[count] = ids[z]
            count += 1
        places[z] = seen_R[ids[z]]
    for u in range(count):
        seen_R[unique[u]] = -1
    return count


@_summing
def adagrad_rows(
    weight_RH: Floats, sums_R: Floats, index_A: Ids, grad_AH: Floats, lr: float, start: float, eps: float
) -> None:
    """Do a step of row-wise Adagrad on A distinct rows: add their mean squared gradients to their sums first."""
    for a in range(len(index_A)):
        row, squares = index_A[a], np.float32(0)
        for h in range(grad_AH.shape[1]):
            squares += grad_AH[a, h] * grad_AH[a, h]
        sums_R[row] += squares / np.float32(grad_AH.shape[1])
        rate = np.float32(lr) / (np.sqrt(sums_R[row] + np.float32(start)) + np.float32(eps))
        for h in range(weight_RH.shape[1]):
            weight_RH[row, h] -= rate * grad_AH[a, h]


class Distinct:
    """Find distinct numbers below `size`, in time proportional to their number, not to `size`."""

    def __init__(self, size: int) -> None:
        self._seen = np.full(size, -1, dtype=np.int32)

    def __call__(self, ids: NDArray[Any]) -> tuple[Ids, Ids]:
        """Return the distinct ids by first appearance, and each id's place among them.

        Raises:
            ValueError: an id is not below `size`.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._seen):
            raise ValueError(f"{int(ids.min())} to {int(ids.max())} are not all within 0 to {len(self._seen) - 1}")
        unique, places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        count = distinct(np.ascontiguousarray(ids, dtype=np.int64), self._seen, unique, places)
        return unique[:count], places
