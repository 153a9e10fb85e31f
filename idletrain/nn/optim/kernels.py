"""Loops over sparse rows that torch has no fast words for, compiled by Numba for the CPU.

Every function is given arrays that its caller has checked: Numba looks at no bounds. `benchmarks/kernels.py` measures
each against torch. Letters: B rows of a batch, H hidden, Z entries, R rows of a matrix, L tables.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
_compiled = numba.njit(cache=True, nogil=True)
_summing = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # else sums are taken one by one


@_compiled
def bag_backward(offsets: Ids, places: Ids, values: Floats, grad_BH: Floats, out_UH: Floats) -> None:
    """Add up the gradient of each distinct embedding, into zeros; `places` are numbers of distinct ones."""
    for b in range(len(grad_BH)):
        for z in range(offsets[b], offsets[b + 1]):
            row, value = places[z], values[z]
            for h in range(grad_BH.shape[1]):
                out_UH[row, h] += value * grad_BH[b, h]


@_compiled
def distinct(ids: Ids, seen_R: NDArray[np.int32], unique: Ids, places: Ids) -> int:
    """The distinct ids in the order of their first appearance, and each id's place among them; returns their number.

    `seen_R` holds -1 before and after: no pass over all R.
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
    """Row-wise Adagrad on A distinct rows, whose mean squared gradients are added to their sums."""
    for a in range(len(index_A)):
        row, squares = index_A[a], np.float32(0)
        for h in range(grad_AH.shape[1]):
            squares += grad_AH[a, h] * grad_AH[a, h]
        sums_R[row] += squares / np.float32(grad_AH.shape[1])
        rate = np.float32(lr) / (np.sqrt(sums_R[row] + np.float32(start)) + np.float32(eps))
        for h in range(weight_RH.shape[1]):
            weight_RH[row, h] -= rate * grad_AH[a, h]


@_compiled
def sign_codes(products_CB: Floats, out_LB: NDArray[Any]) -> None:
    """Bucket numbers from the signs of C / L products each."""
    k, B = len(products_CB) // len(out_LB), out_LB.shape[1]
    for table in range(len(out_LB)):
        numbers = np.zeros(B, np.uint32)
        for j in range(k):  # along B, which processors do many at a time
            products, bit = products_CB[table * k + j], np.uint32(1 << j)
            for b in range(B):
                numbers[b] |= bit if products[b] > 0 else np.uint32(0)
        out_LB[table] = numbers


@_compiled
def winner_codes(x_BH: Floats, coordinates_CI: Ids, out_LB: NDArray[Any]) -> None:
    """Bucket numbers from C / L codes each: which of I coordinates, a power of two, is the largest."""
    k, compared = len(coordinates_CI) // len(out_LB), coordinates_CI.shape[1]
    for b in range(len(x_BH)):
        for table in range(len(out_LB)):
            number = 0
            for j in range(k):
                mine = coordinates_CI[table * k + j]
                best, most = 0, x_BH[b, mine[0]]
                for i in range(1, compared):
                    if x_BH[b, mine[i]] > most:
                        best, most = i, x_BH[b, mine[i]]
                number = number * compared + best
            out_LB[table, b] = number


@_compiled
def fill_buckets(
    codes_R: NDArray[Any], order_R: NDArray[np.int32], bucket: int, starts_S: NDArray[np.int32], ids: NDArray[np.int32]
) -> None:
    """Row numbers by bucket, of each bucket's the first `bucket` in `order_R`: a counting sort.

    `starts_S`, one longer than there are buckets, holds zeros before.
    """
    for r in range(len(codes_R)):
        after = np.int64(codes_R[r]) + 1
        if starts_S[after] < bucket:
            starts_S[after] += 1
    for s in range(1, len(starts_S)):
        starts_S[s] += starts_S[s - 1]
    at_S = starts_S[:-1].copy()
    for r in range(len(order_R)):
        row = order_R[r]
        code = np.int64(codes_R[row])
        if at_S[code] < starts_S[code + 1]:
            ids[at_S[code]] = row
            at_S[code] += 1


@_compiled
def most_hits(
    codes_LB: NDArray[Any],
    starts_LS: NDArray[np.int32],
    ids_LI: NDArray[np.int32],
    keep: int,
    counts_R: NDArray[Any],
    out: Ids,
) -> int:
    """For each row the `keep` ids that are in most of its L buckets; returns how many were written in all.

    `counts_R` holds zeros before and after.
    """
    L = len(codes_LB)
    found = np.empty(len(counts_R), dtype=np.int32)
    by_hits = np.empty(L + 1, dtype=np.int64)
    written = 0
    for b in range(codes_LB.shape[1]):
        many = 0
        for table in range(L):
            code = np.int64(codes_LB[table, b])
            for at in range(starts_LS[table, code], starts_LS[table, code + 1]):
                row = ids_LI[table, at]
                if counts_R[row] == 0:
                    found[many] = row
                    many += 1
                counts_R[row] += 1
        by_hits[:] = 0
        for f in range(many):
            by_hits[counts_R[found[f]]] += 1
        # All with more hits than `least` are kept, and of those with `least` what is left.
        least: Any = L
        above: Any = 0
        while least > 0 and above + by_hits[least] < keep:
            above += by_hits[least]
            least -= 1
        left = keep - above
        for f in range(many):
            hits = counts_R[found[f]]
            if hits > least or (hits == least and least > 0 and left > 0):
                left -= hits == least
                out[written] = found[f]
                written += 1
            counts_R[found[f]] = 0
    return written


@_summing
def best_in_lists(
    query_BH: Floats,
    rows_RH: Floats,
    lists_BP: Ids,
    starts_L: NDArray[np.int32],
    rows_M: NDArray[np.int32],
    best_BK: Ids,
    scores_BK: Floats,
) -> None:
    """For each query the K members of its P lists whose rows have the largest products, the largest first.

    `rows_M` are the lists' members; `best_BK` holds -1 before, and from where the lists have no more.
    """
    K = best_BK.shape[1]
    for b in range(len(query_BH)):
        kept = 0
        for one in lists_BP[b]:
            for at in range(starts_L[one], starts_L[one + 1]):
                row, score = rows_M[at], np.float32(0)
                for h in range(query_BH.shape[1]):
                    score += query_BH[b, h] * rows_RH[row, h]
                if kept == K and not score > scores_BK[b, K - 1]:
                    continue
                kept = min(kept + 1, K)
                place = kept - 1
                while place > 0 and score > scores_BK[b, place - 1]:
                    scores_BK[b, place], best_BK[b, place] = scores_BK[b, place - 1], best_BK[b, place - 1]
                    place -= 1
                scores_BK[b, place], best_BK[b, place] = score, at


class Distinct:
    """Finds distinct numbers below `size` in time that grows with how many there are, not with `size`."""

    def __init__(self, size: int) -> None:
        self._seen = np.full(size, -1, dtype=np.int32)

    def __call__(self, ids: NDArray[Any]) -> tuple[Ids, Ids]:
        """The distinct ids by first appearance, and each id's place among them.

        Raises:
            ValueError: an id is not below `size`.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._seen):
            raise ValueError(f"{int(ids.min())} to {int(ids.max())} are not all within 0 to {len(self._seen) - 1}")
        unique, places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        count = distinct(np.ascontiguousarray(ids, dtype=np.int64), self._seen, unique, places)
        return unique[:count], places
