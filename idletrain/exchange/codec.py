"""Encode a flat buffer for the wire: float32, bfloat16, or whole numbers with a scale for each chunk. Pure.

Large tensors are coded; small ones (biases, norms) and optimizer state are sent as float32: they are few, and matter.
Of an update, the change is coded, so that rounding errors are in proportion to a step; of a pull, the values. Rounding
up or down at random keeps the mean of a change (QSGD, arXiv 1610.02132, section 3.1); the randomness is keyed, so that
a push that is sent again has the same bits.

Whole numbers are useful before all of them arrive (DLCP, arXiv 2008.08445): first the float32 values and every chunk's
scale and norm, then a base layer of four bits a value, then, for int8, a refinement of the other four. In both layers
the chunks that changed most come first, and among equal ones those of the network's first layers.

Letters: N values, C chunks, R rows (a chunk's part of a layer), B bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_HEAD_BYTES = 4  # a chunk's scale and norm, bfloat16 each
ROW_BYTES = 128  # a chunk's four bits a value
VALUES_PER_CHUNK = 2 * ROW_BYTES
CODE_LAYERS = {"int8": 2, "int4": 1}
CODECS = ("bf16", *CODE_LAYERS)
SMALL_TENSOR = 1024  # values; smaller tensors are sent as float32: coding them saves next to nothing, and they matter
ReceivedMask = NDArray[np.bool_]
Rows = NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes flat buffers of one layout.

    Attributes:
        kind: How values within `spans` are coded: `bf16`, `int8` or `int4`.
        spans: `[start, stop)` of the values that are coded, ascending; no chunk reaches from one span into the next.
        size: Values in the buffer.
        ranked: Whether chunks are sent by falling norm; else in their order in the buffer.

    Raises:
        ValueError: there is no such kind.
    """

    kind: str
    spans: tuple[tuple[int, int], ...]
    size: int
    ranked: bool = True

    def __post_init__(self) -> None:
        if self.kind not in CODECS:
            raise ValueError(f"{self.kind!r} is not one of {', '.join(CODECS)}")

    @property
    def coded(self) -> int:
        """Values that are coded."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def chunks(self) -> int:
        """Chunks, each with a scale; 0 for bf16."""
        return 0 if self.kind == "bf16" else sum(-(-(stop - start) // VALUES_PER_CHUNK) for start, stop in self.spans)

    @property
    def rows(self) -> int:
        """Parts of a chunk that may arrive in any order, or not at all."""
        return CODE_LAYERS.get(self.kind, 0) * self.chunks

    @property
    def first_row(self) -> int:
        """Offset of the first row; all bytes before it must arrive for a row to be useful."""
        halves = 2 * self.coded if self.kind == "bf16" else 0
        return 4 * (self.size - self.coded) + CHUNK_HEAD_BYTES * self.chunks + halves

    @property
    def nbytes(self) -> int:
        """Bytes of an encoded buffer."""
        return self.first_row + ROW_BYTES * self.rows

    def encode(self, flat: Tensor, base: Tensor | None = None, chance: int | None = None) -> Tensor:
        """Encode a buffer `[N]` as bytes, uint8.

        Args:
            flat: Float32, on the CPU.
            base: `[N]`; coded values are sent as their change from it. Values outside `spans` are sent as they are.
            chance: Key of the random rounding of whole numbers; None to round to the nearest.
        """
        content = np.empty(self.nbytes, np.uint8)  # NumPy requests huge pages, which halves the time
        exact, heads_C, halves, rows_RB = self._split(content)
        for (start, stop), at in self._exact_spans():
            exact[at : at + stop - start] = flat[start:stop].numpy()
        if self.kind == "bf16":
            self._halve(flat, base, halves)
        elif self.chunks:
            heads_C[:] = self._quantise(flat, base, chance, rows_RB)
        return torch.from_numpy(content)

    def decode(self, content: Tensor, onto: Tensor | None = None, received: ReceivedMask | None = None) -> Tensor:
        """Decode bytes to a buffer `[N]`.

        Args:
            content: Uint8, on the CPU.
            onto: `[N]`, the base that was given to `encode`: it is overwritten and returned; None for a new buffer.
            received: Which rows arrived `[R]`; all if None. A chunk without rows counts as unchanged.

        Raises:
            ValueError: `content` has not `nbytes` bytes.
        """
        if len(content) != self.nbytes:
            raise ValueError(f"{len(content)} bytes, where {self.size} values take {self.nbytes}")
        flat = torch.from_numpy(np.empty(self.size, np.float32)) if onto is None else onto
        exact, heads_C, halves, rows_RB = self._split(content.numpy())
        for (start, stop), at in self._exact_spans():
            flat[start:stop] = torch.from_numpy(exact[at : at + stop - start])
        if self.kind == "bf16":
            self._double(flat, halves, adds=onto is not None)
        elif self.chunks:
            self._restore(flat, heads_C, rows_RB, received, adds=onto is not None)
        return flat

    def gains(self, content: Tensor) -> NDArray[np.float64]:
        """Return each row's share of the change's squared norm `[R]`, by the chunks' norms; zeros if one is not finite.

        Args:
            content: Encoded bytes from the first on, at least `first_row`.
        """
        begin = 4 * (self.size - self.coded)
        heads_C = content[begin : begin + CHUNK_HEAD_BYTES * self.chunks].numpy().view(np.uint32)
        heads_C = heads_C[self._order(heads_C)]
        squares_C = _norms(heads_C).astype(np.float64) ** 2
        step_C, total = 16.0 * _scales(heads_C), squares_C.sum()  # steps of the base layer alone
        if not np.isfinite(step_C.sum() + total):
            return np.zeros(self.rows)
        if not total:
            return np.full(self.rows, 1 / max(1, self.rows))
        if CODE_LAYERS[self.kind] == 1:
            parts = [squares_C]
        else:
            # The mean square error of a value rounded to steps is a twelfth of a step's square.
            left_C = np.minimum(VALUES_PER_CHUNK * step_C**2 / 12, squares_C)
            parts = [squares_C - left_C, left_C]
        shares: NDArray[np.float64] = np.concatenate(parts) / total
        return shares

    def arrived_rows(self, content: Tensor, received: ReceivedMask) -> Tensor:
        """Return `[N]`: 1 for values that arrived, 0 for those of chunks whose base row did not."""
        _, heads_C, _, _ = self._split(content.numpy())
        arrived_C = np.empty(self.chunks, np.float32)
        arrived_C[self._order(heads_C)] = received[: self.chunks]
        values, at = np.ones(self.size, np.float32), 0
        for start, stop in self.spans if self.chunks else ():
            chunks = -(-(stop - start) // VALUES_PER_CHUNK)
            values[start:stop] = np.repeat(arrived_C[at : at + chunks], VALUES_PER_CHUNK)[: stop - start]
            at += chunks
        return torch.from_numpy(values)

    def rows_before(self, size: int) -> ReceivedMask:
        """Return which rows are complete in the first `size` bytes `[R]`."""
        return np.arange(self.rows) < max(0, size - self.first_row) // ROW_BYTES

    def rows_within(self, pieces: ReceivedMask, piece_bytes: int) -> ReceivedMask:
        """Return which rows are complete in the pieces that arrived, of `piece_bytes` each `[R]`."""
        starts = self.first_row + ROW_BYTES * np.arange(self.rows)
        ends = starts + ROW_BYTES - 1
        return pieces[starts // piece_bytes] & pieces[ends // piece_bytes]  # a row is in two pieces at most

    def _halve(self, flat: Tensor, base: Tensor | None, halves: NDArray[np.uint16]) -> None:
        from idletrain.exchange import quantize_kernels  # imports Numba, which takes a second

        at = 0
        for start, stop in self.spans:
            count = stop - start
            quantize_kernels.halve(flat[start:stop].numpy(), _values(base, start, stop), halves[at : at + count])
            at += count

    def _double(self, flat: Tensor, halves: NDArray[np.uint16], *, adds: bool) -> None:
        from idletrain.exchange import quantize_kernels

        at = 0
        for start, stop in self.spans:
            count = stop - start
            quantize_kernels.double(halves[at : at + count], adds, flat[start:stop].numpy())
            at += count

    def _quantise(self, flat: Tensor, base: Tensor | None, chance: int | None, out_RB: Rows) -> NDArray[np.uint32]:
        """Write rows to `out_RB` in the order of sending; return heads in the order of chunks."""
        from idletrain.exchange import quantize_kernels

        rows_RB = np.empty_like(out_RB) if self.ranked else out_RB
        heads_C = np.empty(self.chunks, np.uint32)
        fine, key = self.kind == "int8", np.uint32((chance or 0) & 0xFFFFFFFF)
        for start, stop, at in self._chunk_ranges():
            parts = (_chunked(tensor, start, stop) for tensor in (flat, base))
            quantize_kernels.quantize(*parts, at, fine, key, chance is not None, heads_C, rows_RB)
        if self.ranked:
            for layer, order in self._layers(self._order(heads_C)):
                np.take(rows_RB, order, axis=0, out=out_RB[layer], mode="clip")  # else it would copy once more
        return heads_C

    def _restore(
        self,
        flat: Tensor,
        heads_C: NDArray[np.uint32],
        rows_RB: Rows,
        received: ReceivedMask | None,
        *,
        adds: bool,
    ) -> None:
        from idletrain.exchange import quantize_kernels

        places_R = np.empty(self.rows, np.int64)
        for layer, order in self._layers(self._order(heads_C)):
            places_R[order] = np.arange(layer.start, layer.stop)
        if received is not None:
            places_R[~received[places_R]] = -1
        fine = self.kind == "int8"
        for start, stop, at in self._chunk_ranges():
            out_CK = _chunked(flat, start, stop)
            quantize_kernels.dequantize(rows_RB, places_R, heads_C, at, fine, adds, out_CK)
            if (stop - start) % VALUES_PER_CHUNK:
                flat[start:stop] = torch.from_numpy(out_CK).view(-1)[: stop - start]

    def _chunk_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield `[start, stop)` of a span's whole chunks, then of its rest, each with the number of the first chunk."""
        at = 0
        for start, stop in self.spans:
            middle = stop - (stop - start) % VALUES_PER_CHUNK
            yield from (
                (first, last, at + (first - start) // VALUES_PER_CHUNK)
                for first, last in ((start, middle), (middle, stop))
                if first < last
            )
            at += -(-(stop - start) // VALUES_PER_CHUNK)

    def _layers(self, order_C: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Yield the slice of each layer's rows, and their numbers in the order of chunks."""
        for layer in range(CODE_LAYERS[self.kind]):
            begin = layer * self.chunks
            yield slice(begin, begin + self.chunks), order_C + begin

    def _order(self, heads_C: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return chunks in the order of sending (a positive bfloat16 sorts like its bits; 16 bits sort fast)."""
        return np.argsort(~heads_C.astype(np.uint16), kind="stable") if self.ranked else np.arange(self.chunks)

    def _split(self, content: Rows) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.uint16], Rows]:
        """Return views of `content`: float32 values, heads, bfloat16 values, rows."""
        sizes = 4 * (self.size - self.coded), CHUNK_HEAD_BYTES * self.chunks, 2 * self.coded * (self.kind == "bf16")
        exact, heads, halves, rows = np.split(content, np.cumsum(sizes))
        return exact.view(np.float32), heads.view(np.uint32), halves.view(np.uint16), rows.reshape(-1, ROW_BYTES)

    def _exact_spans(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield `[start, stop)` of values sent as float32, and the index of the first among all such values."""
        edges, at = [0, *(edge for span in self.spans for edge in span), self.size], 0
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield (start, stop), at
            at += stop - start


def warm() -> None:
    """Load or compile Numba's loops before they are needed."""
    for kind in CODECS:
        codec = Codec(kind, ((0, VALUES_PER_CHUNK),), VALUES_PER_CHUNK)
        codec.decode(codec.encode(torch.zeros(VALUES_PER_CHUNK)))


def spans_of(sizes: Iterable[tuple[int, bool]]) -> tuple[tuple[int, int], ...]:
    """Return the coded spans, neighbours merged, of tensors given as (values, whether it is coded)."""
    spans: list[tuple[int, int]] = []
    at = 0
    for size, coded in sizes:
        if coded and size and spans and spans[-1][1] == at:
            spans[-1] = spans[-1][0], at + size
        elif coded and size:
            spans.append((at, at + size))
        at += size
    return tuple(spans)


def _values(flat: Tensor | None, start: int, stop: int) -> NDArray[np.float32]:
    """Return a part of a buffer; no values, which count as zeros, if the buffer is None."""
    return np.empty(0, np.float32) if flat is None else flat[start:stop].numpy()


def _chunked(flat: Tensor | None, start: int, stop: int) -> NDArray[np.float32]:
    """Return a part of a buffer as `[C, K]`: a view if it is whole chunks, else a copy padded with zeros; one chunk of
    zeros, which counts for all, if the buffer is None.
    """
    if flat is None:
        return np.zeros((1, VALUES_PER_CHUNK), np.float32)
    padding = (start - stop) % VALUES_PER_CHUNK
    values = flat[start:stop].numpy()
    return (np.pad(values, (0, padding)) if padding else values).reshape(-1, VALUES_PER_CHUNK)


def _scales(heads_C: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the scale of every chunk, from the upper half of its head."""
    return (heads_C & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _norms(heads_C: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the norm of every chunk; norm 0 beside a scale above 0, or NaN, marks values that are not finite."""
    return (heads_C << np.uint32(16)).view(np.float32)
