"""Payloads that arrive in parts, held until the push that completes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PAYLOADS_KEPT = 2  # of one attempt: a progress checkpoint in flight and the update behind it
PayloadKey = tuple[int, bool]  # the steps that a payload holds; True for an update, False for a progress checkpoint


@dataclass
class _PartialPayload:
    parts: dict[int, Sequence[memoryview]] = field(default_factory=dict)
    size: int = 0
    train_seconds: float = 0.0


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
        replaced = [at for at, part in partial.parts.items() if at == start or (at < stop and start < at + _size(part))]
        size = partial.size + _size(frames) - sum(_size(partial.parts[at]) for at in replaced)
        if size > most_bytes:
            return False
        for at in replaced:
            del partial.parts[at]
        partial.parts[start], partial.size, partial.train_seconds = frames, size, train_seconds
        for oldest in sorted(payloads)[:-PAYLOADS_KEPT]:
            del payloads[oldest]
        return True

    def payload(self, attempt: int, key: PayloadKey) -> list[memoryview]:
        """Return a payload's frames in order up to the first gap, and keep them: a push may be repeated."""
        frames: list[memoryview] = []
        at = 0
        for start, part in sorted(self._partial(attempt, key).parts.items()):
            if start != at:
                break
            frames += part
            at += _size(part)
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
