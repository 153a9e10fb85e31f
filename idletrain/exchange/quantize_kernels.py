"""Loops that round values to whole numbers, compiled by Numba: torch would pass over memory a dozen times.

The same input gives the same bits on every machine: randomness is a hash of a value's place, and floats are added only
in the order written (except for a chunk's norm, which only ranks it). Loops cover whole chunks without branches: LLVM
vectorises no others. Letters: C chunks, K values a chunk, R rows (a chunk's part of a layer), B bytes.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

VALUES_PER_ROW = (
    256  # values with one scale: 0.016 bytes a value for it, and an outlier spoils the precision of no more than these
)
HALF_ROW = VALUES_PER_ROW // 2  # bytes of a row: a chunk's first half goes below its second
BATCH = 64  # chunks whose rows are fetched together: 16 KB, which stay in the nearest cache
MIN_SCALE = 1e-30  # a smaller scale has no finite inverse; its values count as zero
Floats = NDArray[np.float32]
Uint32s = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
_compiled = numba.njit(cache=True, nogil=True)
_summing = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})


@_summing
def _change(values_K: Floats, base_K: Floats, x_K: Floats, bits_K: Uint32s) -> tuple[np.uint32, np.float32]:
    """Write the change to `x_K`; return the bits of its largest magnitude, and the sum of its squares.

    `bits_K` is a view of `x_K`: as integers, NaN and infinity are above all other magnitudes.
    """
    most, squares = np.uint32(0), np.float32(0)
    for k in range(VALUES_PER_ROW):
        x = values_K[k] - base_K[k]
        x_K[k] = x
        squares += x * x
    for k in range(VALUES_PER_ROW):
        magnitude = np.uint32(bits_K[k] & np.uint32(0x7FFFFFFF))
        most = max(most, magnitude)
    return most, squares


@_compiled
def _head(most: np.uint32, squares: np.float32, levels: float, one: Floats) -> tuple[np.uint32, np.float32]:
    """Return a chunk's scale (upper half) and norm as bfloat16, and the scale's inverse, 0 if values count as zero."""
    bits = one.view(np.uint32)
    if most >= np.uint32(0x7F800000):
        return np.uint32(0x7FC00000), np.float32(0)
    bits[0] = most
    one[0] /= np.float32(levels)
    bits[0] = (bits[0] + np.uint32(0xFFFF)) & np.uint32(
        0xFFFF0000
    )  # rounded up, so that no value is beyond the last level
    scale, scale_bits = one[0], bits[0]
    if not np.isfinite(scale):
        return scale_bits, np.float32(0)
    if scale < MIN_SCALE:
        return np.uint32(0), np.float32(0)
    one[0] = np.sqrt(squares)
    return np.uint32(scale_bits | bits[0] >> np.uint32(16)), np.float32(1) / scale


@_compiled
def _chances(key: np.uint32, c: int, out: Uint32s) -> None:
    """Write a uniform random byte a value: a hash of its place (`lowbias32`, C. Wellons, nullprogram.com, 2018)."""
    first = np.uint32(c * (VALUES_PER_ROW // 4))
    for w in range(VALUES_PER_ROW // 4):
        x = np.uint32(np.uint32(first + np.uint32(w)) * np.uint32(0x9E3779B9)) ^ key
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
        out[w] = np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@_compiled
def _round_and_pack(x_K: Floats, inverse: np.float32, chance_K: Bytes, row_B: Bytes) -> None:
    above = np.float32(8) + np.float32(0.5 / 256)
    for b in range(HALF_ROW):
        h = b + HALF_ROW
        low = np.int32(x_K[b] * inverse + (np.float32(chance_K[b]) * np.float32(1 / 256) + above))
        high = np.int32(x_K[h] * inverse + (np.float32(chance_K[h]) * np.float32(1 / 256) + above))
        row_B[b] = np.uint8(low | np.int32(high << np.int32(4)))


@_compiled
def _round_and_pack_layers(x_K: Floats, inverse: np.float32, chance_K: Bytes, base_B: Bytes, fine_B: Bytes) -> None:
    above = np.float32(136) + np.float32(0.5 / 256)
    for b in range(HALF_ROW):
        h = b + HALF_ROW
        low = np.int32(x_K[b] * inverse + (np.float32(chance_K[b]) * np.float32(1 / 256) + above))
        high = np.int32(x_K[h] * inverse + (np.float32(chance_K[h]) * np.float32(1 / 256) + above))
        base_B[b] = np.uint8(np.int32(low >> np.int32(4)) | np.int32(high & np.int32(240)))
        fine_B[b] = np.uint8(np.int32(low & np.int32(15)) | np.int32(high << np.int32(4)))


@_compiled
def quantize(
    values_CK: Floats,
    base_CK: Floats,
    first: int,
    fine: bool,
    key: np.uint32,
    by_chance: bool,
    heads: Uint32s,
    rows: Bytes,
) -> None:
    """Quantize the change from `base_CK` to `values_CK` as rows.

    Args:
        values_CK: New values.
        base_CK: Old values; or one chunk `[1, K]`, which counts for all.
        first: Number of the first of these chunks.
        fine: True for eight bits a value, a base layer of four and a refinement of four; False for four.
        key: Of the random rounding.
        by_chance: Whether to round at random; else to the nearest.
        heads: Output: a scale and a norm each, `[all chunks]`.
        rows: Output: the base layer of each chunk, then the refinement of each, `[R, B]`.
    """
    x_K, one = np.empty(VALUES_PER_ROW, np.float32), np.empty(1, np.float32)
    bits_K = x_K.view(np.uint32)
    chance_K = np.full(VALUES_PER_ROW, 127, np.uint8)  # to the nearest
    chance_W = chance_K.view(np.uint32)
    levels = 119 if fine else 7
    for c in range(len(values_CK)):
        most, squares = _change(values_CK[c], base_CK[min(c, len(base_CK) - 1)], x_K, bits_K)
        heads[first + c], inverse = _head(most, squares, levels, one)
        if inverse == 0:
            x_K[:] = 0
        if by_chance:
            _chances(key, first + c, chance_W)
        if fine:
            _round_and_pack_layers(x_K, inverse, chance_K, rows[first + c], rows[len(heads) + first + c])
        else:
            _round_and_pack(x_K, inverse, chance_K, rows[first + c])


@_compiled
def _unpack(row_B: Bytes, codes_K: Bytes) -> None:
    for b in range(HALF_ROW):
        codes_K[b] = row_B[b] & np.uint8(15)
        codes_K[b + HALF_ROW] = row_B[b] >> np.uint8(4)


@_compiled
def _unpack_base(row_B: Bytes, codes_K: Bytes) -> None:
    """Unpack the base layer alone: the middle of the 16 codes that share it."""
    for b in range(HALF_ROW):
        codes_K[b] = np.uint8(np.uint8(row_B[b] << np.uint8(4)) | np.uint8(8))
        codes_K[b + HALF_ROW] = np.uint8(np.uint8(row_B[b] & np.uint8(240)) | np.uint8(8))


@_compiled
def _unpack_layers(base_B: Bytes, fine_B: Bytes, codes_K: Bytes) -> None:
    for b in range(HALF_ROW):
        codes_K[b] = np.uint8(np.uint8(base_B[b] << np.uint8(4)) | np.uint8(fine_B[b] & np.uint8(15)))
        codes_K[b + HALF_ROW] = np.uint8(np.uint8(base_B[b] & np.uint8(240)) | np.uint8(fine_B[b] >> np.uint8(4)))


@_compiled
def _add(codes_K: Bytes, scale: np.float32, zero: int, out_K: Floats) -> None:
    for k in range(VALUES_PER_ROW):
        out_K[k] += scale * np.float32(np.int32(codes_K[k]) - np.int32(zero))


@_compiled
def _gather(rows: Bytes, places: NDArray[np.int64], out_JB: Bytes) -> None:
    """Copy the rows at `places` to the first rows of `out_JB`; any row where a place is -1."""
    for j in range(len(places)):
        place = max(places[j], 0)
        for b in range(HALF_ROW):
            out_JB[j, b] = rows[place, b]


@_compiled
def dequantize(
    rows: Bytes, places_R: NDArray[np.int64], heads: Uint32s, first: int, fine: bool, adds: bool, out_CK: Floats
) -> None:
    """Undo `quantize`, for chunks from number `first` on.

    Args:
        rows: Rows in the order of sending `[R, B]`.
        places_R: The row that holds each chunk's base layer, then its refinement; -1 if it is missing, which counts
            as no change.
        heads: A scale and a norm each, `[all chunks]`.
        first: Number of the first of these chunks.
        fine: As given to `quantize`.
        adds: Whether to add the change to the values in `out_CK`; else to zero.
        out_CK: Output.
    """
    codes_K, one = np.empty(VALUES_PER_ROW, np.uint8), np.empty(1, np.float32)
    bits = one.view(np.uint32)
    bases_JB, fines_JB = np.empty((BATCH, HALF_ROW), np.uint8), np.empty((BATCH, HALF_ROW), np.uint8)
    zero = 136 if fine else 8
    for start in range(0, len(out_CK), BATCH):
        # Rows lie anywhere in memory: loads that nothing else depends on wait for it together, not one by one.
        count = min(BATCH, len(out_CK) - start)
        base_J = places_R[first + start : first + start + count]
        _gather(rows, base_J, bases_JB)
        if fine:
            fine_J = places_R[len(heads) + first + start : len(heads) + first + start + count]
            _gather(rows, fine_J, fines_JB)
        for j in range(count):
            c = start + j
            if base_J[j] < 0:
                codes_K[:] = zero
            elif not fine:
                _unpack(bases_JB[j], codes_K)
            elif fine_J[j] < 0:
                _unpack_base(bases_JB[j], codes_K)
            else:
                _unpack_layers(bases_JB[j], fines_JB[j], codes_K)
            if not adds:
                out_CK[c] = 0
            bits[0] = heads[first + c] & np.uint32(0xFFFF0000)
            _add(codes_K, one[0], zero, out_CK[c])


@_compiled
def halve(values_N: Floats, base_N: Floats, out_N: NDArray[np.uint16]) -> None:
    """Write the change as bfloat16, rounded to nearest even; NaN stays NaN. No values in `base_N` count as zeros."""
    one_K, zeros_K = np.empty(VALUES_PER_ROW, np.float32), np.zeros(VALUES_PER_ROW, np.float32)
    bits_K = one_K.view(np.uint32)
    for start in range(0, len(values_N), VALUES_PER_ROW):
        values = values_N[start : start + VALUES_PER_ROW]
        base = base_N[start : start + VALUES_PER_ROW] if len(base_N) else zeros_K
        out = out_N[start : start + VALUES_PER_ROW]
        for k in range(len(values)):
            one_K[k] = values[k] - base[k]
        for k in range(len(values)):
            bits = bits_K[k]
            up = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
            is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[k] = np.uint16(np.uint32(0x7FC0) if is_nan else np.uint32(np.uint32(bits + up) >> np.uint32(16)))


@_compiled
def double(halves_N: NDArray[np.uint16], adds: bool, out_N: Floats) -> None:
    """Undo `halve`: add the bfloat16 change to the values in `out_N` if `adds`, else to zero."""
    one_K = np.empty(VALUES_PER_ROW, np.float32)
    bits_K = one_K.view(np.uint32)
    for start in range(0, len(halves_N), VALUES_PER_ROW):
        halves, out = halves_N[start : start + VALUES_PER_ROW], out_N[start : start + VALUES_PER_ROW]
        for k in range(len(halves)):
            bits_K[k] = np.uint32(np.uint32(halves[k]) << np.uint32(16))
        if not adds:
            out[:] = 0
        for k in range(len(halves)):
            out[k] += one_K[k]
