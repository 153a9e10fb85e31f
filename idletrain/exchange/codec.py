"""How values travel: as they are, in half precision, or as whole numbers with a scale for each chunk. Pure.

Large tensors are coded, small ones (biases, norms) and optimizer state are sent as they are: they are few, and matter.
What is coded of an update is its change, which rounds around zero and so to what a step is worth; what is coded of a
pull are values. Rounding up or down by chance leaves the mean of a change where it is (QSGD, arXiv 1610.02132, section
3.1); it is keyed, so that a push that is sent again has the same bits.

What whole numbers are sent as is of use before all of it is there (DLCP, arXiv 2008.08445): first what is exact and
every chunk's scale and norm, then a base layer of four bits a value, then, of eight, the other four; in both layers the
chunks that changed most come first, and of those that changed as much, the network's first layers.

Letters: N values, C chunks, R rows (a chunk's part of a layer), B bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_HEAD_BYTES = 4  # of a chunk: scale and norm
ROW_BYTES = 128  # a chunk's four bits a value
VALUES_PER_CHUNK = 2 * ROW_BYTES
CODE_LAYERS = {"int8": 2, "int4": 1}
CODECS = ("bf16", *CODE_LAYERS)
SMALL_TENSOR = 1024  # values; smaller tensors are sent as they are: they save next to nothing, and matter
ReceivedMask = NDArray[np.bool_]
Rows = NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """How a flat buffer of one layout travels.

    Attributes:
        kind: `bf16`, `int8` or `int4`, of the values within `spans`.
        spans: `[start, stop)` of what is coded, ascending; chunks do not reach from one into the next.
        size: Values in the buffer.
        ranked: Whether the chunks with the largest norm go first; else they go as they lie.

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
        """Chunks with a scale each."""
        return 0 if self.kind == "bf16" else sum(-(-(stop - start) // VALUES_PER_CHUNK) for start, stop in self.spans)

    @property
    def rows(self) -> int:
        """Parts that may come in any order, or not at all."""
        return CODE_LAYERS.get(self.kind, 0) * self.chunks

    @property
    def first_row(self) -> int:
        """Bytes that have to be there before a row is of use."""
        halves = 2 * self.coded if self.kind == "bf16" else 0
        return 4 * (self.size - self.coded) + CHUNK_HEAD_BYTES * self.chunks + halves

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return self.first_row + ROW_BYTES * self.rows

    def encode(self, flat: Tensor, base: Tensor | None = None, chance: int | None = None) -> Tensor:
        """A buffer `[N]` as bytes, uint8.

        Args:
            flat: Float32, on the CPU.
            base: What is coded is the change from it; from zero if None. What is not coded is never a change.
            chance: Rounds whole numbers up or down by chance with this key; to the nearest if None.
        """
        content = np.empty(self.nbytes, np.uint8)  # NumPy asks for huge pages, which halves the time
        exact, heads_C, halves, rows_RB = self._parts(content)
        for (start, stop), at in self._rest():
            exact[at : at + stop - start] = flat[start:stop].numpy()
        if self.kind == "bf16":
            self._halve(flat, base, halves)
        elif self.chunks:
            heads_C[:] = self._quantise(flat, base, chance, rows_RB)
        return torch.from_numpy(content)

    def decode(self, content: Tensor, base: Tensor | None = None, received: ReceivedMask | None = None) -> Tensor:
        """The buffer `[N]` that bytes stand for.

        Args:
            content: Uint8, on the CPU.
            base: What the change is from.
            got: Which of the rows are there; all if None. A chunk without any has not changed.

        Raises:
            ValueError: there are more or fewer bytes than there should be.
        """
        if len(content) != self.nbytes:
            raise ValueError(f"{len(content)} bytes, where {self.size} values take {self.nbytes}")
        flat = torch.from_numpy(np.empty(self.size, np.float32))
        exact, heads_C, halves, rows_RB = self._parts(content.numpy())
        for (start, stop), at in self._rest():
            flat[start:stop] = torch.from_numpy(exact[at : at + stop - start])
        if self.kind == "bf16":
            self._double(flat, base, halves)
        elif self.chunks:
            self._restore(flat, base, heads_C, rows_RB, received)
        return flat

    def gains(self, content: Tensor) -> NDArray[np.float64]:
        """Which share of the change's squared norm each row brings `[R]`, by what its head says; none if that is not
        finite.

        Args:
            content: From its beginning, `first_row` bytes or more.
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
            left_C = np.minimum(
                VALUES_PER_CHUNK * step_C**2 / 12, squares_C
            )  # a value within a step is off by a twelfth of its square
            parts = [squares_C - left_C, left_C]
        shares: NDArray[np.float64] = np.concatenate(parts) / total
        return shares

    def arrived_rows(self, content: Tensor, received: ReceivedMask) -> Tensor:
        """1 for each value that came, 0 for those of chunks of which no row did `[N]`."""
        _, heads_C, _, _ = self._parts(content.numpy())
        came_C = np.empty(self.chunks, np.float32)
        came_C[self._order(heads_C)] = received[: self.chunks]
        values, at = np.ones(self.size, np.float32), 0
        for start, stop in self.spans if self.chunks else ():
            chunks = -(-(stop - start) // VALUES_PER_CHUNK)
            values[start:stop] = np.repeat(came_C[at : at + chunks], VALUES_PER_CHUNK)[: stop - start]
            at += chunks
        return torch.from_numpy(values)

    def rows_before(self, size: int) -> ReceivedMask:
        """Which rows are whole in so many bytes from the beginning `[R]`."""
        return np.arange(self.rows) < max(0, size - self.first_row) // ROW_BYTES

    def rows_within(self, pieces: ReceivedMask, piece_bytes: int) -> ReceivedMask:
        """Which rows are whole in these pieces of all bytes `[R]`."""
        starts = self.first_row + ROW_BYTES * np.arange(self.rows)
        return (
            pieces[starts // piece_bytes] & pieces[(starts + ROW_BYTES - 1) // piece_bytes]
        )  # a row is in two at most

    def _halve(self, flat: Tensor, base: Tensor | None, halves: NDArray[np.uint16]) -> None:
        from idletrain.exchange import quantize_kernels  # and with it Numba, which takes a second

        at = 0
        for start, stop in self.spans:
            count = stop - start
            quantize_kernels.halve(flat[start:stop].numpy(), _values(base, start, stop), halves[at : at + count])
            at += count

    def _double(self, flat: Tensor, base: Tensor | None, halves: NDArray[np.uint16]) -> None:
        from idletrain.exchange import quantize_kernels

        at = 0
        for start, stop in self.spans:
            count = stop - start
            quantize_kernels.double(halves[at : at + count], _values(base, start, stop), flat[start:stop].numpy())
            at += count

    def _quantise(self, flat: Tensor, base: Tensor | None, chance: int | None, out_RB: Rows) -> NDArray[np.uint32]:
        """Rows in the order in which they go; returns heads in the order of chunks."""
        from idletrain.exchange import quantize_kernels

        made_RB = np.empty_like(out_RB) if self.ranked else out_RB
        heads_C = np.empty(self.chunks, np.uint32)
        fine, key = self.kind == "int8", np.uint32((chance or 0) & 0xFFFFFFFF)
        for start, stop, at in self._wholes():
            parts = (_chunked(tensor, start, stop) for tensor in (flat, base))
            quantize_kernels.quantize(*parts, at, fine, key, chance is not None, heads_C, made_RB)
        if self.ranked:
            for layer, order in self._layers(self._order(heads_C)):
                np.take(made_RB, order, axis=0, out=out_RB[layer])
        return heads_C

    def _restore(
        self,
        flat: Tensor,
        base: Tensor | None,
        heads_C: NDArray[np.uint32],
        rows_RB: Rows,
        received: ReceivedMask | None,
    ) -> None:
        from idletrain.exchange import quantize_kernels

        places_R = np.empty(self.rows, np.int64)
        for layer, order in self._layers(self._order(heads_C)):
            places_R[order] = np.arange(layer.start, layer.stop)
        if received is not None:
            places_R[~received[places_R]] = -1
        fine = self.kind == "int8"
        for start, stop, at in self._wholes():
            out_CK = _chunked(flat, start, stop)
            quantize_kernels.dequantize(rows_RB, places_R, heads_C, at, fine, _chunked(base, start, stop), out_CK)
            if (stop - start) % VALUES_PER_CHUNK:
                flat[start:stop] = torch.from_numpy(out_CK).view(-1)[: stop - start]

    def _wholes(self) -> Iterator[tuple[int, int, int]]:
        """`[start, stop)` of a span's whole chunks, then of what is left, and the number of the first chunk there."""
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
        """Where a layer's rows lie, and what lies there of those in the order of chunks."""
        for layer in range(CODE_LAYERS[self.kind]):
            begin = layer * self.chunks
            yield slice(begin, begin + self.chunks), order_C + begin

    def _order(self, heads_C: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Chunks in the order in which their rows go (a positive bfloat16 sorts like its bits; 16 bits sort fast)."""
        return np.argsort(~heads_C.astype(np.uint16), kind="stable") if self.ranked else np.arange(self.chunks)

    def _parts(self, content: Rows) -> tuple[NDArray[np.float32], NDArray[np.uint32], NDArray[np.uint16], Rows]:
        """What is not coded; heads; halves of bf16; rows."""
        sizes = 4 * (self.size - self.coded), CHUNK_HEAD_BYTES * self.chunks, 2 * self.coded * (self.kind == "bf16")
        exact, heads, halves, rows = np.split(content, np.cumsum(sizes))
        return exact.view(np.float32), heads.view(np.uint32), halves.view(np.uint16), rows.reshape(-1, ROW_BYTES)

    def _rest(self) -> Iterator[tuple[tuple[int, int], int]]:
        """`[start, stop)` of what is sent as it is, and the place of the first among such values."""
        edges, at = [0, *(edge for span in self.spans for edge in span), self.size], 0
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield (start, stop), at
            at += stop - start


def warm() -> None:
    """Load what coding takes, Numba's compiled loops."""
    for kind in CODECS:
        codec = Codec(kind, ((0, VALUES_PER_CHUNK),), VALUES_PER_CHUNK)
        for base in (None, torch.zeros(VALUES_PER_CHUNK)):
            codec.decode(codec.encode(torch.zeros(VALUES_PER_CHUNK), base), base)


def spans_of(sizes: Iterable[tuple[int, bool]]) -> tuple[tuple[int, int], ...]:
    """What is coded, neighbours together, of tensors in their order: how many values each has, and whether it is."""
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
    """A part of a buffer; zeros if there is none."""
    return np.broadcast_to(np.float32(0), stop - start) if flat is None else flat[start:stop].numpy()


def _chunked(flat: Tensor | None, start: int, stop: int) -> NDArray[np.float32]:
    """The same as `[C, K]`: a view if these are whole chunks, else a copy filled up with zeros."""
    lacking = (start - stop) % VALUES_PER_CHUNK
    if flat is None:
        return np.broadcast_to(np.float32(0), ((stop - start + lacking) // VALUES_PER_CHUNK, VALUES_PER_CHUNK))
    values = flat[start:stop].numpy()
    return (np.pad(values, (0, lacking)) if lacking else values).reshape(-1, VALUES_PER_CHUNK)


def _scales(heads_C: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Of every chunk, in the upper half."""
    return (heads_C & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _norms(heads_C: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Of every chunk; a scale without one stands for something that is not finite."""
    return (heads_C << np.uint32(16)).view(np.float32)
