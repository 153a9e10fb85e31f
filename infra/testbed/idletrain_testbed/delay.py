"""When packets that wait may go on: a queue with a constant delay. No clock, no sockets."""

from __future__ import annotations

from collections import deque


class DelayQueue:
    """Packets of one link, numbered upwards by the kernel, each let go `delay` seconds after it came."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._waiting: deque[tuple[float, int]] = deque()  # (when, the last packet that came then)

    def add(self, packet: int, now: float) -> None:
        """All packets up to `packet` that were not there before came at `now`."""
        self._waiting.append((now + self.delay, packet))

    def due(self, now: float) -> int | None:
        """The last packet that may go at `now`, and all before it; None: none may."""
        last = None
        while self._waiting and self._waiting[0][0] <= now:
            last = self._waiting.popleft()[1]
        return last

    def next(self) -> float | None:
        """When the next one may go."""
        return self._waiting[0][0] if self._waiting else None
