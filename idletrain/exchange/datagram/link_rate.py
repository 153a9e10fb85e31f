"""A receiver's model of its link, pure and without a clock: the highest rate and the lowest round trip of late.

It is that of BBR (ACM Queue 14, 5).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

FIRST_WINDOW = 16  # pieces that may always be in flight: 22 KB, less than the shallowest buffer of a switch port
INTERPRETER_PAUSE_SECONDS = 0.002  # added to a round trip, at the link's rate, to cover the interpreter's own pauses
RATE_SECONDS = 0.02  # arrivals are counted in spans as long as this
RATE_KEPT_SECONDS = 10.0  # rates and round trips
RATE_GROWTH, ROUNDS_WITHOUT = 1.25, 3  # the rate is at its maximum after so many rounds without such growth (BBR)
FIRST_GAIN, PACE = 2.0, 1.05  # of the rate: until its maximum is known, and then, to notice a faster link


@dataclass
class RoundTrip:
    """The shortest round trip of late to one sender.

    Attributes:
        seconds: 0 before the first measurement.
    """

    seconds: float = 0.0
    _at: float = -math.inf

    def took(self, seconds: float, now: float) -> None:
        """Add a measurement: the time from a grant to the first piece that it released."""
        if seconds < self.seconds or now - self._at > RATE_KEPT_SECONDS:
            self.seconds, self._at = seconds, now


@dataclass
class LinkRate:
    """A receiver's estimate of its link: pieces a second, and so how many may be in flight."""

    _rates: deque[tuple[float, float]] = field(
        default_factory=deque
    )  # time and rate, without rates that a later one exceeds
    _since: float | None = None
    _count: int = 0
    _best: float = 0.0
    _without: int = 0
    _tokens: float = FIRST_WINDOW
    _refilled_at: float = -math.inf

    def arrived(self, now: float, pieces: int) -> None:
        """Count pieces that arrived."""
        if self._since is None or now - self._since > 10 * RATE_SECONDS:  # an idle link says nothing about its rate
            self._since, self._count = now, 0
            return
        self._count += pieces
        if now - self._since < RATE_SECONDS:
            return
        rate = self._count / (now - self._since)
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((now, rate))
        while self._rates[0][0] < now - RATE_KEPT_SECONDS:
            self._rates.popleft()
        self._without = 0 if rate > RATE_GROWTH * self._best else self._without + 1
        self._best = max(self._best, rate)
        self._since, self._count = now, 0

    @property
    def rate(self) -> float:
        """Pieces a second, 0 before any are counted."""
        return self._rates[0][1] if self._rates else 0.0

    def window(self, trip_seconds: float) -> int:
        """Return how many pieces may be in flight over this round trip."""
        return math.ceil(self.rate * self._gain * trip_seconds + self._slack)

    def without_queueing(self, trip_seconds: float, nearest_seconds: float) -> float:
        """Return a round trip less the time that pieces may queue at the link, that of the nearest sender's window."""
        queueing = self.window(nearest_seconds) / self.rate if self.rate else 0.0
        return max(nearest_seconds, trip_seconds - queueing)

    def tokens(self, now: float) -> int:
        """Return how many pieces may be granted now: no faster than they can arrive, because a whole window released at
        once would overrun a smaller buffer.
        """
        gained = (now - self._refilled_at) * self._gain * self.rate if self.rate else self._slack
        self._tokens, self._refilled_at = min(self._slack, self._tokens + gained), now
        return max(0, int(self._tokens))

    def spend(self, pieces: int) -> None:
        """Subtract pieces that were granted."""
        self._tokens -= pieces

    @property
    def _slack(self) -> float:
        """Pieces that may queue at the link; at least `FIRST_WINDOW`, even if the link seems slow: a loop whose pauses
        are longer than the round trip would never learn that the link is faster.
        """
        return max(FIRST_WINDOW, self.rate * INTERPRETER_PAUSE_SECONDS)

    @property
    def _gain(self) -> float:
        return FIRST_GAIN if self._without < ROUNDS_WITHOUT else PACE
