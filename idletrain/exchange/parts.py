"""Payloads that come in parts, held until the push that says that they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PAYLOADS_KEPT = 2  # of one attempt at once: a mark on its way and the update behind it
PayloadKey = tuple[int, bool]  # how many steps a payload holds, and whether it is an update or a mark


@dataclass
class _PartialPayload:
    parts: dict[int, Sequence[memoryview]] = field(default_factory=dict)
    size: int = 0
    train_seconds: float = 0.0


class Parts:
    """Of every attempt the payloads that are coming."""

    def __init__(self) -> None:
        self._held: dict[int, dict[PayloadKey, _PartialPayload]] = {}

    def hold(
        self,
        attempt: int,
        what: PayloadKey,
        start: int,
        frames: Sequence[memoryview],
        most_bytes: int,
        train_seconds: float = 0.0,
    ) -> bool:
        """Hold a part from byte `start` on, in the place of an earlier send; False if that would be too much."""
        payloads = self._held.setdefault(attempt, {})
        coming = payloads.setdefault(what, _PartialPayload())
        size = coming.size + _size(frames) - _size(coming.parts.get(start, ()))
        if size > most_bytes:
            return False
        coming.parts[start], coming.size, coming.train_seconds = frames, size, train_seconds
        for oldest in sorted(payloads)[:-PAYLOADS_KEPT]:
            del payloads[oldest]
        return True

    def payload(self, attempt: int, what: PayloadKey) -> list[memoryview]:
        """A payload's frames in order up to the first gap or overlap; as often as asked: a push may be sent again."""
        frames: list[memoryview] = []
        at = 0
        for start, part in sorted(self._incoming(attempt, what).parts.items()):
            if start != at:
                break
            frames += part
            at += _size(part)
        return frames

    def train_seconds(self, attempt: int, what: PayloadKey) -> float:
        """Time in steps, as its last part tells."""
        return self._incoming(attempt, what).train_seconds

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._held.pop(attempt, None)

    def _incoming(self, attempt: int, what: PayloadKey) -> _PartialPayload:
        return self._held.get(attempt, {}).get(what, _PartialPayload())


def _size(frames: Sequence[memoryview]) -> int:
    return sum(len(frame) for frame in frames)
