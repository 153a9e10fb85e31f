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
MIN_SCALE = 1e-30  # a smaller scale has no finite inverse; its values count as zero
Floats = NDArray[np.float32]
Uint32s = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
_compiled = numba.njit(cache=True, nogil=True)
_summing = numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})


@_compiled
def _subtract(values_K: Floats, base_K: Floats, out_K: Floats) -> None:
    for k in range(VALUES_PER_ROW):
        out_K[k] = values_K[k] - base_K[k]


@_compiled
def _max_magnitude(bits_K: Uint32s) -> np.uint32:
    """Return the bits of the largest magnitude, as an integer: NaN and infinity are above all others."""
    most = np.uint32(0)
    for k in range(VALUES_PER_ROW):
        magnitude = np.uint32(bits_K[k] & np.uint32(0x7FFFFFFF))
        most = max(most, magnitude)
    return most


@_summing
def _norm(x_K: Floats) -> np.float32:
    """Return the Euclidean norm."""
    total = np.float32(0)
    for k in range(VALUES_PER_ROW):
        total += x_K[k] * x_K[k]
    norm: np.float32 = np.sqrt(total)
    return norm


@_compiled
def _head(x_K: Floats, levels: float, one: Floats) -> tuple[np.uint32, np.float32]:
    """Return a chunk's scale (upper half) and norm as bfloat16, and the scale's inverse, 0 if values count as zero."""
    bits = one.view(np.uint32)
    most = _max_magnitude(x_K.view(np.uint32))
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
    one[0] = _norm(x_K)
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
def _round(x_K: Floats, inverse: np.float32, chance_K: Bytes, zero: int, out_K: Bytes) -> None:
    above = np.float32(zero) + np.float32(0.5 / 256)
    for k in range(VALUES_PER_ROW):
        chance = np.float32(chance_K[k]) * np.float32(1 / 256) + above
        out_K[k] = np.uint8(np.int32(x_K[k] * inverse + chance))


@_compiled
def _pack(codes_K: Bytes, row_B: Bytes) -> None:
    for b in range(HALF_ROW):
        row_B[b] = np.uint8(codes_K[b] | np.uint8(codes_K[b + HALF_ROW] << np.uint8(4)))


@_compiled
def _pack_layers(codes_K: Bytes, base_B: Bytes, fine_B: Bytes) -> None:
    for b in range(HALF_ROW):
        low, high = codes_K[b], codes_K[b + HALF_ROW]
        base_B[b] = np.uint8(np.uint8(low >> np.uint8(4)) | np.uint8(high & np.uint8(240)))
        fine_B[b] = np.uint8(np.uint8(low & np.uint8(15)) | np.uint8(high << np.uint8(4)))


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
        base_CK: Old values.
        first: Number of the first of these chunks.
        fine: True for eight bits a value, a base layer of four and a refinement of four; False for four.
        key: Of the random rounding.
        by_chance: Whether to round at random; else to the nearest.
        heads: Output: a scale and a norm each, `[all chunks]`.
        rows: Output: the base layer of each chunk, then the refinement of each, `[R, B]`.
    """
    x_K, codes_K, one = (
        np.empty(VALUES_PER_ROW, np.float32),
        np.empty(VALUES_PER_ROW, np.uint8),
        np.empty(1, np.float32),
    )
    chance_K = np.full(VALUES_PER_ROW, 127, np.uint8)  # to the nearest
    levels, zero = (119, 136) if fine else (7, 8)
    for c in range(len(values_CK)):
        _subtract(values_CK[c], base_CK[c], x_K)
        heads[first + c], inverse = _head(x_K, levels, one)
        if inverse == 0:
            x_K[:] = 0
        if by_chance:
            _chances(key, first + c, chance_K.view(np.uint32))
        _round(x_K, inverse, chance_K, zero, codes_K)
        if fine:
            _pack_layers(codes_K, rows[first + c], rows[len(heads) + first + c])
        else:
            _pack(codes_K, rows[first + c])


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
def _add(codes_K: Bytes, scale: np.float32, zero: int, base_K: Floats, out_K: Floats) -> None:
    for k in range(VALUES_PER_ROW):
        out_K[k] = base_K[k] + scale * np.float32(np.int32(codes_K[k]) - np.int32(zero))


@_compiled
def dequantize(
    rows: Bytes, places_R: NDArray[np.int64], heads: Uint32s, first: int, fine: bool, base_CK: Floats, out_CK: Floats
) -> None:
    """Undo `quantize`, for chunks from number `first` on.

    Args:
        places_R: The row that holds each chunk's base layer, then its refinement; -1 if it is missing, which counts
            as no change.
    """
    codes_K, one = np.empty(VALUES_PER_ROW, np.uint8), np.empty(1, np.float32)
    bits = one.view(np.uint32)
    zero = 136 if fine else 8
    for c in range(len(out_CK)):
        bits[0] = heads[first + c] & np.uint32(0xFFFF0000)
        base = places_R[first + c]
        refinement = places_R[len(heads) + first + c] if fine else -1
        if base < 0:
            codes_K[:] = zero
        elif not fine:
            _unpack(rows[base], codes_K)
        elif refinement < 0:
            _unpack_base(rows[base], codes_K)
        else:
            _unpack_layers(rows[base], rows[refinement], codes_K)
        _add(codes_K, one[0], zero, base_CK[c], out_CK[c])


@_compiled
def halve(values_N: Floats, base_N: Floats, out_N: NDArray[np.uint16]) -> None:
    """Write the change as bfloat16, rounded to nearest even; NaN stays NaN."""
    one_K = np.empty(VALUES_PER_ROW, np.float32)
    bits_K = one_K.view(np.uint32)
    for start in range(0, len(values_N), VALUES_PER_ROW):
        values, base, out = (
            values_N[start : start + VALUES_PER_ROW],
            base_N[start : start + VALUES_PER_ROW],
            out_N[start : start + VALUES_PER_ROW],
        )
        for k in range(len(values)):
            one_K[k] = values[k] - base[k]
        for k in range(len(values)):
            bits = bits_K[k]
            up = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
            is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[k] = np.uint16(np.uint32(0x7FC0) if is_nan else np.uint32(np.uint32(bits + up) >> np.uint32(16)))


@_compiled
def double(halves_N: NDArray[np.uint16], base_N: Floats, out_N: Floats) -> None:
    """Undo `halve`: write base plus the bfloat16 change."""
    one_K = np.empty(VALUES_PER_ROW, np.float32)
    bits_K = one_K.view(np.uint32)
    for start in range(0, len(halves_N), VALUES_PER_ROW):
        halves, base, out = (
            halves_N[start : start + VALUES_PER_ROW],
            base_N[start : start + VALUES_PER_ROW],
            out_N[start : start + VALUES_PER_ROW],
        )
        for k in range(len(halves)):
            bits_K[k] = np.uint32(np.uint32(halves[k]) << np.uint32(16))
        for k in range(len(halves)):
            out[k] = base[k] + one_K[k]
