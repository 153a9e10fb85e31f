"""Loops of the indexes over rows for which torch has no fast operator, compiled by Numba for the CPU.

Callers check the arrays first: Numba checks no bounds. `benchmarks/kernels.py` measures each function against torch.
Letters: B rows of a batch, H hidden, R rows of a matrix, L tables.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from idletrain.nn.optim.kernels import Floats, Ids

CACHE_LINE_BYTES = 64
CLEARED_TOGETHER = 32  # neighbouring counts that are set to zero in less time than one by its number
_compiled = numba.njit(cache=True, nogil=True)
_summing = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # else sums are not vectorized


@_compiled
def sign_codes(products_CB: Floats, out_LB: NDArray[Any]) -> None:
    """Write bucket numbers for L tables, each made of the signs of C / L products."""
    k, B = len(products_CB) // len(out_LB), out_LB.shape[1]
    for table in range(len(out_LB)):
        numbers = np.zeros(B, np.uint32)
        for j in range(k):  # innermost along B, which is vectorized
            products, bit = products_CB[table * k + j], np.uint32(1 << j)
            for b in range(B):
                numbers[b] |= bit if products[b] > 0 else np.uint32(0)
        out_LB[table] = numbers


@_compiled
def winner_codes(x_BH: Floats, coordinates_CI: Ids, out_LB: NDArray[Any]) -> None:
    """Write bucket numbers for L tables, each made of C / L codes: the place of the largest of I coordinates.

    I is a power of two.
    """
    k, compared = len(coordinates_CI) // len(out_LB), coordinates_CI.shape[1]
    for b in range(len(x_BH)):
        for table in range(len(out_LB)):
            number = 0
            for j in range(k):
                coordinates = coordinates_CI[table * k + j]
                best, largest = 0, x_BH[b, coordinates[0]]
                for i in range(1, compared):
                    if x_BH[b, coordinates[i]] > largest:
                        best, largest = i, x_BH[b, coordinates[i]]
                number = number * compared + best
            out_LB[table, b] = number


@_compiled
def largest_in_columns(scores_LB: Floats, out_B: NDArray[np.int32]) -> None:
    """Write the row of each column's largest score, the first of equal ones."""
    L, B = scores_LB.shape
    largest_B = scores_LB[0].copy()
    out_B[:] = 0
    for first in range(1, L, 4):  # four rows at a time: fewer passes over `largest_B` and `out_B`
        second, third, fourth = min(first + 1, L - 1), min(first + 2, L - 1), min(first + 3, L - 1)
        for b in range(B):  # innermost and without a branch, so that it is vectorized
            left, right = scores_LB[first, b], scores_LB[third, b]
            left_row, right_row = np.int32(first), np.int32(third)
            left_row = np.int32(second) if scores_LB[second, b] > left else left_row
            left = max(left, scores_LB[second, b])
            right_row = np.int32(fourth) if scores_LB[fourth, b] > right else right_row
            right = max(right, scores_LB[fourth, b])
            left_row = right_row if right > left else left_row
            left = max(left, right)
            out_B[b] = left_row if left > largest_B[b] else out_B[b]
            largest_B[b] = max(largest_B[b], left)


@_compiled
def count_in_buckets(codes_N: NDArray[Any], bucket: int, starts_S: NDArray[np.int32]) -> int:
    """Add to each bucket's count the rows of its number, up to `bucket`; return by how much all counts grew.

    The count of bucket s is `starts_S[s + 1]`.
    """
    added = 0
    for n in range(len(codes_N)):
        after = np.uint32(codes_N[n]) + np.uint32(1)
        grows = starts_S[after] < bucket
        starts_S[after] += grows
        added += grows
    return added


@_compiled
def fill_buckets(
    codes_N: NDArray[Any], rows_N: NDArray[np.int32], starts_S: NDArray[np.int32], ids: NDArray[np.int32]
) -> None:
    """Write row numbers by bucket with a counting sort, the first of each bucket's in `rows_N`, as many as counted.

    `starts_S`, one longer than there are buckets, holds counts as `count_in_buckets` leaves them before, and after
    where each bucket starts.
    """
    for s in range(1, len(starts_S)):
        starts_S[s] += starts_S[s - 1]
    at_S = starts_S[:-1].copy()
    for n in range(len(codes_N)):
        code = np.int64(codes_N[n])
        if at_S[code] < starts_S[code + 1]:
            ids[at_S[code]] = rows_N[n]
            at_S[code] += 1


@_compiled
def _copy_buckets(
    codes_L: NDArray[Any],
    starts_LS: NDArray[np.int32],
    ids_LI: NDArray[np.int32],
    bounds_L2: NDArray[np.int64],
    out: NDArray[np.uint32],
) -> int:
    """Write the ids of one bucket of each table, one bucket after the other; return their number.

    Memory is slow to give the first of a bucket. So all bounds are read first, then a word of each cache line: no read
    waits for one before.
    """
    count, touched = 0, 0
    for table in range(len(codes_L)):
        code = np.int64(codes_L[table])
        bounds_L2[table, 0], bounds_L2[table, 1] = starts_LS[table, code], starts_LS[table, code + 1]
    for table in range(len(codes_L)):
        for at in range(bounds_L2[table, 0], bounds_L2[table, 1], CACHE_LINE_BYTES // 4):
            touched += ids_LI[table, at]
    for table in range(len(codes_L)):
        ids = ids_LI[table, bounds_L2[table, 0] : bounds_L2[table, 1]]
        out[count : count + len(ids)] = ids
        count += len(ids)
    bounds_L2[0, 0] = touched  # used for nothing, but without it the compiler would leave the reads out
    return count


@_compiled
def most_hits(
    codes_LB: NDArray[Any],
    starts_LS: NDArray[np.int32],
    ids_LI: NDArray[np.int32],
    bucket: int,
    keep: int,
    counts_R: NDArray[Any],
    out: Ids,
) -> int:
    """Write, for each row, the `keep` ids that are in most of its L buckets; return the number of ids written.

    No bucket holds more than `bucket` ids. `counts_R` holds zeros before and after.
    """
    L = len(codes_LB)
    found = np.empty(L * min(bucket, ids_LI.shape[1]), np.uint32)  # unsigned: Numba tests for no index from the end
    repeated, bounds_L2 = np.empty_like(found), np.empty((L, 2), np.int64)
    with_hits = np.empty(L + 1, np.int64)
    written = 0
    for b in range(codes_LB.shape[1]):
        size, repeats = _copy_buckets(codes_LB[:, b], starts_LS, ids_LI, bounds_L2, found), np.uint32(0)
        for at in range(size):
            row = found[np.uint32(at)]
            hits = np.uint32(counts_R[row] + 1)
            counts_R[row] = hits
            repeated[repeats] = row  # written each time, and kept at the second hit: a branch would be mispredicted
            repeats += np.uint32(hits == 2)
        with_hits[:] = 0
        candidates = repeated[:repeats]  # most ids have one hit, so that few are looked at again
        for row in candidates:
            with_hits[counts_R[row]] += 1
        # Take all with more than `least` hits, and as many with `least` as are left.
        least, left = L, keep
        while least > 1 and with_hits[least] < left:
            left -= with_hits[least]
            least -= 1
        if least == 1:
            candidates = found[:size]
        for row in candidates:
            seen = np.int64(counts_R[row])
            counts_R[row] = 0  # so that a repeat is passed over
            if seen >= least and (seen > least or left > 0):
                left -= seen == least
                out[written] = row
                written += 1
        if len(counts_R) < CLEARED_TOGETHER * size:
            counts_R[:] = 0
        else:
            for at in range(size):
                counts_R[found[np.uint32(at)]] = 0
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
    """Write, for each query, the K members of its P lists whose rows have the largest products, the largest first.

    `rows_M` are the lists' members. `best_BK` holds -1 before, and after in the places for which there is no member.
    """
    K = best_BK.shape[1]
    for b in range(len(query_BH)):
        filled = 0
        for number in lists_BP[b]:
            for at in range(starts_L[number], starts_L[number + 1]):
                row, score = rows_M[at], np.float32(0)
                for h in range(query_BH.shape[1]):
                    score += query_BH[b, h] * rows_RH[row, h]
                if filled == K and not score > scores_BK[b, K - 1]:
                    continue
                filled = min(filled + 1, K)
                place = filled - 1
                while place > 0 and score > scores_BK[b, place - 1]:
                    scores_BK[b, place], best_BK[b, place] = scores_BK[b, place - 1], best_BK[b, place - 1]
                    place -= 1
                scores_BK[b, place], best_BK[b, place] = score, at
