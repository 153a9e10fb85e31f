"""How values travel: as they are, in half precision, or as whole numbers with a scale for each chunk. Pure.

Large tensors are coded, small ones (biases, norms) and optimizer state are sent as they are: they are few, and matter.
What is coded of an update is its change, which rounds around zero and so to what a step is worth; what is coded of a
pull are values. Rounding up or down by chance leaves the mean of a change where it is (QSGD, arXiv 1610.02132, section
3.1); numbers come from the caller's generator, so that a push that is sent again has the same bits.

Letters: N values, C chunks, K values a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

K = 256  # values with one scale: 0.016 bytes a value for it, and an outlier spoils no more than these
LEVELS = {"int8": 127, "int4": 7}
CODE_BYTES = {"int8": K, "int4": K // 2}  # of a chunk
BLOCK = 1 << 11  # chunks at a time: two megabytes, which stay in the cache, and few calls
CHANCES = 256  # that a rounding goes up: a byte
LEAST = 1e-30  # a scale below has no finite inverse, and its values are as good as zero


@dataclass(frozen=True)
class Codec:
    """How a flat buffer of one layout travels: first what is not coded, then scales, then codes.

    Attributes:
        kind: `bf16`, `int8` or `int4`, of the values within `spans`.
        spans: `[start, stop)` of what is coded, ascending; chunks do not reach from one into the next.
        size: Values in the buffer.
    """

    kind: str
    spans: tuple[tuple[int, int], ...]
    size: int

    @property
    def coded(self) -> int:
        """Values that are coded."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def chunks(self) -> int:
        """Chunks with a scale each."""
        return 0 if self.kind == "bf16" else sum(-(-(stop - start) // K) for start, stop in self.spans)

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        codes = 2 * self.coded if self.kind == "bf16" else self.chunks * CODE_BYTES[self.kind]
        return 4 * (self.size - self.coded) + 4 * self.chunks + codes

    def encode(self, flat: Tensor, base: Tensor | None = None, chance: torch.Generator | None = None) -> Tensor:
        """A buffer `[N]` as bytes, uint8.

        Args:
            flat: Float32, on the CPU.
            base: What is coded is the change from it; from zero if None. What is not coded is never a change.
            chance: Rounds up or down by chance; to the nearest if None.
        """
        content = torch.empty(self.nbytes, dtype=torch.uint8)
        exact, scales_C, codes = self._parts(content)
        for (start, stop), at in self._rest():
            exact[at : at + stop - start] = flat[start:stop].view(torch.uint8).view(-1, 4)
        for (start, stop), chunks in self._blocks():
            values = flat[start:stop] if base is None else flat[start:stop] - base[start:stop]
            if self.kind == "bf16":
                codes[chunks] = values.bfloat16().view(torch.uint8).view(-1, 2)
            else:
                scales, codes[chunks] = _quantised(_chunked(values), self.kind, chance)
                scales_C[chunks] = scales.view(torch.uint8).view(-1, 4)
        return content

    def decode(self, content: Tensor, base: Tensor | None = None) -> Tensor:
        """The buffer `[N]` that bytes stand for.

        Args:
            content: Uint8, on the CPU.
            base: What the change is from.

        Raises:
            ValueError: there are more or fewer bytes than there should be.
        """
        if len(content) != self.nbytes:
            raise ValueError(f"{len(content)} bytes, where {self.size} values take {self.nbytes}")
        flat = torch.empty(self.size)
        exact, scales_C, codes = self._parts(content)
        for (start, stop), at in self._rest():
            flat[start:stop].view(torch.uint8).view(-1, 4).copy_(exact[at : at + stop - start])
        for (start, stop), chunks in self._blocks():
            if self.kind == "bf16":
                values = codes[chunks].clone().view(torch.bfloat16).view(-1)
            else:
                scales = scales_C[chunks].clone().view(torch.float32)
                values = _restored(codes[chunks], scales, self.kind).view(-1)[: stop - start]
            if base is None:
                flat[start:stop] = values
            else:
                torch.add(base[start:stop], values, out=flat[start:stop])
        return flat

    def _parts(self, content: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is not coded and scales, four bytes each, and codes, of two bytes a value or so many a chunk."""
        exact, scales = 4 * (self.size - self.coded), 4 * self.chunks
        each = 2 if self.kind == "bf16" else CODE_BYTES[self.kind]
        first, second, third = content[:exact], content[exact : exact + scales], content[exact + scales :]
        return first.view(-1, 4), second.view(-1, 4), third.view(-1, each)

    def _rest(self) -> Iterator[tuple[tuple[int, int], int]]:
        """`[start, stop)` of what is sent as it is, and the place of the first among such values."""
        edges, at = [0, *(edge for span in self.spans for edge in span), self.size], 0
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield (start, stop), at
            at += stop - start

    def _blocks(self) -> Iterator[tuple[tuple[int, int], slice]]:
        """`[start, stop)` of what is coded at once, and where its codes lie: by value in bf16, by chunk otherwise."""
        at = 0
        for first, last in self.spans:
            for start in range(first, last, BLOCK * K):
                stop = min(start + BLOCK * K, last)
                count = stop - start if self.kind == "bf16" else -(-(stop - start) // K)
                yield (start, stop), slice(at, at + count)
                at += count


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


def _chunked(values: Tensor) -> Tensor:
    """`[C, K]`, the last chunk filled up with zeros."""
    lacking = -len(values) % K
    return (torch.cat([values, values.new_zeros(lacking)]) if lacking else values).view(-1, K)


def _quantised(x_CK: Tensor, kind: str, chance: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Scales `[C]`, and each chunk's codes as bytes."""
    scale_C = x_CK.abs().amax(1) / LEVELS[kind]  # aminmax takes five times as long
    # NaN and infinity stay, in the scale.
    x_CK = x_CK * torch.where(scale_C > LEAST, 1 / scale_C, 0.0)[:, None]
    if chance is None:
        x_CK.round_()
    else:
        x_CK.add_(_chances(x_CK, chance), alpha=1 / CHANCES).add_(0.5 / CHANCES).floor_()
    whole = x_CK.to(torch.int8)
    if kind == "int8":
        return scale_C, whole.view(torch.uint8)
    shifted = whole.add_(8).view(torch.uint8)  # a chunk's first half goes below its second
    return scale_C, shifted[:, : K // 2] | (shifted[:, K // 2 :] << 4)


def _chances(like_CK: Tensor, chance: torch.Generator) -> Tensor:
    """Whole numbers from 0 to CHANCES - 1, each as likely."""
    words = torch.empty(like_CK.numel() // 8, dtype=torch.int64)
    words.random_(torch.iinfo(torch.int64).min, None, generator=chance)
    return words.view(torch.uint8).view(like_CK.shape)


def _restored(codes: Tensor, scale_C: Tensor, kind: str) -> Tensor:
    """Values `[C, K]`."""
    if kind == "int8":
        return codes.view(torch.int8) * scale_C
    values = torch.empty(len(codes), K)
    torch.mul((codes & 15).view(torch.int8).sub_(8), scale_C, out=values[:, : K // 2])
    torch.mul((codes >> 4).view(torch.int8).sub_(8), scale_C, out=values[:, K // 2 :])
    return values
