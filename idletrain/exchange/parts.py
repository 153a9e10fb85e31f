"""Payloads that arrive in parts, held until the push that completes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

PAYLOADS_KEPT = 2  # of one attempt: a progress checkpoint in flight and the update behind it
PayloadKey = tuple[int, bool]  # the steps that a payload holds; True for an update, False for a progress checkpoint


@dataclass
class _PartialPayload:
    parts: dict[int, Sequence[memoryview]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # of the parts, ascending; none overlap
    size: int = 0
    train_seconds: float = 0.0

    def put(self, start: int, frames: Sequence[memoryview]) -> None:
        """Hold a part."""
        if start not in self.parts:
            insort(self.starts, start)
        self.parts[start] = frames
        self.size += _size(frames)

    def cut(self, start: int, stop: int) -> None:
        """Forget the bytes between two; what parts have beside them stays."""
        first = max(0, bisect_right(self.starts, start) - 1)
        for begin in self.starts[first : bisect_left(self.starts, stop)]:
            part = self.parts[begin]
            end = begin + _size(part)
            if end > start:
                self.starts.remove(begin)
                del self.parts[begin]
                self.size -= end - begin
                for left, right in ((begin, min(start, end)), (max(stop, begin), end)):
                    if left < right:
                        self.put(left, _between(part, left - begin, right - begin))


class Parts:
    """The incomplete payloads of every attempt."""

    def __init__(self) -> None:
        self._payloads: dict[int, dict[PayloadKey, _PartialPayload]] = {}

    def hold(
        self,
        attempt: int,
        key: PayloadKey,
        start: int,
        frames: Sequence[memoryview],
        most_bytes: int,
        train_seconds: float = 0.0,
    ) -> bool:
        """Hold a part from byte `start` on, in place of what an earlier send has there; return False above
        `most_bytes`.
        """
        payloads = self._payloads.setdefault(attempt, {})
        partial = payloads.setdefault(key, _PartialPayload())
        stop = start + _size(frames)
        partial.cut(start, stop)
        if partial.size + stop - start > most_bytes:
            return False
        partial.put(start, frames)
        partial.train_seconds = train_seconds
        for oldest in sorted(payloads)[:-PAYLOADS_KEPT]:
            del payloads[oldest]
        return True

    def payload(self, attempt: int, key: PayloadKey) -> list[memoryview]:
        """Return a payload's frames in order up to the first gap, and keep them: a push may be repeated."""
        frames: list[memoryview] = []
        at = 0
        partial = self._partial(attempt, key)
        for start in partial.starts:
            if start != at:
                break
            frames += partial.parts[start]
            at += _size(partial.parts[start])
        return frames

    def train_seconds(self, attempt: int, key: PayloadKey) -> float:
        """Return the seconds spent in the payload's steps, as its last part reports them."""
        return self._partial(attempt, key).train_seconds

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._payloads.pop(attempt, None)

    def _partial(self, attempt: int, key: PayloadKey) -> _PartialPayload:
        return self._payloads.get(attempt, {}).get(key, _PartialPayload())


def _size(frames: Sequence[memoryview]) -> int:
    return sum(len(frame) for frame in frames)


def _between(frames: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the bytes between two of a part's."""
    found, at = [], 0
    for frame in frames:
        if piece := frame[max(0, start - at) : max(0, stop - at)]:
            found.append(piece)
        at += len(frame)
    return found
