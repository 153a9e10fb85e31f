"""A queue with a constant delay, without a clock or sockets."""

from __future__ import annotations

from collections import deque


class DelayQueue:
    """Packets of one link, numbered upwards by the kernel, each due `delay` seconds after it arrived."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._waiting: deque[tuple[float, int]] = deque()  # (due time, number of the last packet that arrived together)

    def add(self, packet: int, now: float) -> None:
        """Add the packets up to number `packet` that arrived at `now`."""
        self._waiting.append((now + self.delay, packet))

    def due(self, now: float) -> int | None:
        """Remove the packets that are due at `now`; return the last one's number, or None if there is none."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        return last

    def next(self) -> float | None:
        """Return when the next packet is due, or None if none waits."""
        return self._waiting[0][0] if self._waiting else None
