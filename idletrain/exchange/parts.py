"""Payloads that come in parts, held until the push that says that they are whole."""

from __future__ import annotations

from collections.abc import Sequence

VALUE_BYTES = 4
PAYLOADS = 2  # of one attempt at once: a mark on its way and the update behind it


class Parts:
    """Of every attempt the payloads that are coming, by their steps."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, dict[int, Sequence[memoryview]]]] = {}

    def hold(self, attempt: int, steps: int, start: int, frames: Sequence[memoryview], most_bytes: int) -> bool:
        """Hold a part from value `start` on, in the place of an earlier send; False if that would be too much."""
        payloads = self._held.setdefault(attempt, {})
        held = {**payloads.get(steps, {}), start: frames}
        if sum(len(frame) for part in held.values() for frame in part) > most_bytes:
            return False
        payloads[steps] = held
        for oldest in sorted(payloads)[:-PAYLOADS]:
            del payloads[oldest]
        return True

    def payload(self, attempt: int, steps: int) -> list[memoryview]:
        """A payload's frames in order, none if there is a gap; as often as asked: a push may be sent again."""
        frames: list[memoryview] = []
        at = 0
        for start, part in sorted(self._held.get(attempt, {}).get(steps, {}).items()):
            if VALUE_BYTES * start != at:
                return []
            frames += part
            at += sum(len(frame) for frame in part)
        return frames

    def drop(self, attempt: int) -> None:
        """Forget an attempt that has ended."""
        self._held.pop(attempt, None)
