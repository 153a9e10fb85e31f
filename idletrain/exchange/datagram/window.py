"""How much may be on its way, what is missing and who says when it is enough: pure, time comes with the calls.

The receiver drives: it knows how fast pieces arrive and how many senders share its link, so its grants neither leave
the link idle nor fill a shallow buffer (NDP, SIGCOMM 2017; Homa, SIGCOMM 2018). Its model of the link is BBR's (ACM
Queue 14, 5): the highest rate and the lowest round trip of late. Letters: N pieces of a transfer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FIRST_WINDOW = 16  # pieces: 22 KB, less than the shallowest buffer of a switch port; may always wait there
SLACK_SECONDS = 0.002  # of the link's rate on top of what a round trip takes: the interpreter's own pauses
RATE_SECONDS = 0.02  # arrivals are counted in spans as long as this
RATE_KEPT_SECONDS = 10.0  # rates and round trips
GROWTH, ROUNDS_WITHOUT = 1.25, 3  # the rate has found its end when it has not grown so in so many rounds (BBR)
FIRST_GAIN, PACE = 2.0, 1.05  # of the rate: while its end is sought, and then, so that a faster link is found
GRANT_BATCH = 3  # pieces that are granted at once, where any are on their way
PROBES_KEPT = 64  # times at most whether pieces are enough
FORGIVEN_SECONDS, FORGIVEN_TRIPS = 0.01, 3.0
SILENT_SECONDS, SILENT_TRIPS = 0.1, 5.0
ANSWER_DELAY_SECONDS = 0.003  # what overtook the piece before it may be this much ahead, or a quarter of a round trip
LEAST_PROBE_SECONDS, PROBE_TRIPS, PROBE_BACKOFF, MOST_PROBE_SECONDS = 0.004, 2.0, 2.0, 0.05
ReceivedMask = NDArray[np.bool_]


@dataclass
class RoundTrip:
    """The shortest round trip of late to one sender.

    Attributes:
        seconds: It, 0 before the first.
    """

    seconds: float = 0.0
    _at: float = -math.inf

    def took(self, seconds: float, now: float) -> None:
        """A grant and the first piece that it let go took so long."""
        if seconds < self.seconds or now - self._at > RATE_KEPT_SECONDS:
            self.seconds, self._at = seconds, now


@dataclass
class LinkRate:
    """What a receiver knows of its link: pieces a second, and so how much may be on its way."""

    _rates: deque[tuple[float, float]] = field(default_factory=deque)  # without those that later ones exceed
    _since: float | None = None
    _count: int = 0
    _best: float = 0.0
    _without: int = 0
    _tokens: float = FIRST_WINDOW
    _refilled_at: float = -math.inf

    def arrived(self, now: float, pieces: int) -> None:
        """Count what has come."""
        if self._since is None or now - self._since > 10 * RATE_SECONDS:  # nobody sent for a while
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
        self._without = 0 if rate > GROWTH * self._best else self._without + 1
        self._best = max(self._best, rate)
        self._since, self._count = now, 0

    @property
    def rate(self) -> float:
        """Pieces a second, 0 before anything has come."""
        return self._rates[0][1] if self._rates else 0.0

    def window(self, trip_seconds: float) -> int:
        """How many pieces may be on their way, if all come from so far away."""
        return math.ceil(self.rate * self._gain * trip_seconds + self._slack)

    def without_waiting(self, trip_seconds: float, nearest_seconds: float) -> float:
        """A round trip without what may have been waiting before the link meanwhile: all that the nearest may send."""
        waiting = self.window(nearest_seconds) / self.rate if self.rate else 0.0
        return max(nearest_seconds, trip_seconds - waiting)

    def tokens(self, now: float) -> int:
        """How many pieces may be granted by now: no faster than they can come, or what a whole window lets go at once
        would overrun a buffer that is smaller than that.
        """
        gained = (now - self._refilled_at) * self._gain * self.rate if self.rate else self._slack
        self._tokens, self._refilled_at = min(self._slack, self._tokens + gained), now
        return max(0, int(self._tokens))

    def spend(self, pieces: int) -> None:
        """Note what was granted."""
        self._tokens -= pieces

    @property
    def _slack(self) -> float:
        """Pieces that may wait before the link. No fewer where it seems slow: a loop whose pauses are longer than its
        round trip would never find that it is not.
        """
        return max(FIRST_WINDOW, self.rate * SLACK_SECONDS)

    @property
    def _gain(self) -> float:
        return FIRST_GAIN if self._without < ROUNDS_WITHOUT else PACE


class ReceiveWindow:
    """One transfer at its receiver.

    Args:
        pieces: N.
        enough: Whether these `[N]` are enough; asked once all of the first `needed` are there.
        needed: Pieces, from the first on, without which nothing is enough.
        least: How many pieces are enough at least.
        trip: That of its sender's other transfers.

    Attributes:
        got: Which are there, `[N]`.
        count: How many.
        limit: The sequence up to which the sender may send.
        top: The highest sequence seen, or given up.
    """

    def __init__(
        self,
        pieces: int,
        required_pieces: int | None = None,
        min_pieces: int | None = None,
        is_acceptable: Callable[[ReceivedMask], bool] | None = None,
        trip: RoundTrip | None = None,
    ) -> None:
        self.received = np.zeros(pieces, bool)
        self.count = self.limit = self.top = 0
        self.trip = trip or RoundTrip()
        self._heard_at = -math.inf
        self._needed = pieces if required_pieces is None else required_pieces
        self._least = pieces if min_pieces is None else min_pieces
        self._enough = is_acceptable
        self._ask_at = 0
        self._granted: deque[tuple[int, float]] = deque()
        self._probe: tuple[int, int, float] | None = None
        self._last = pieces  # the sequence of the last piece that the sender knows it has to send

    @property
    def missing(self) -> int:
        """Pieces that are not there."""
        return len(self.received) - self.count

    @property
    def wants(self) -> int:
        """Pieces that the sender would send if it might."""
        return self._last - self.limit

    @property
    def in_flight(self) -> int:
        """Pieces that may come and have not been given up."""
        return self.limit - self.top

    def take(self, sequence: int, piece: int, now: float) -> bool:
        """Note a piece; False if it is there already, or none of this transfer's."""
        if not (0 <= piece < len(self.received) and 0 < sequence <= self.limit):
            return False
        self._heard_at = now
        self._tell_trip(sequence, now)
        self.top = max(self.top, sequence)
        if self.received[piece]:
            return False
        self.received[piece] = True
        self.count += 1
        return True

    def _tell_trip(self, sequence: int, now: float) -> None:
        """How long ago this piece was granted, if it is the first that its grant let go."""
        while self._granted and self._granted[0][0] < sequence:
            first, at = self._granted.popleft()
            if first + 1 == sequence:
                self.trip.took(now - at, now)

    def probed(self, probe: int, sequence: int, now: float) -> None:
        """The sender has sent all up to this sequence, and asks what is missing."""
        self._heard_at = now
        self._probe = probe, min(sequence, self.limit), now + max(ANSWER_DELAY_SECONDS, self.trip.seconds / 4)

    def forgive(self, now: float) -> None:
        """What has not come for so long does not: others may have its place."""
        if self.in_flight and now - self._heard_at > max(FORGIVEN_SECONDS, FORGIVEN_TRIPS * self.trip.seconds):
            self.top = self.limit

    def has_arrived(self, now: float) -> bool:
        """Whether the sender was heard of late; else it asks when it is back."""
        return now - self._heard_at < max(SILENT_SECONDS, SILENT_TRIPS * self.trip.seconds)

    def answer(self, now: float) -> int | None:
        """The probe to answer now: all up to its sequence has come, or will not."""
        if self._probe is None or (self.top < self._probe[1] and now < self._probe[2]):
            return None
        (probe, sequence, _), self._probe = self._probe, None
        self.top = max(self.top, sequence)
        if sequence >= self._last:
            self._last = sequence + self.missing
        return probe

    @property
    def answer_at(self) -> float:
        """When an answer is due at the latest."""
        return self._probe[2] if self._probe else math.inf

    def grant(self, more: int, now: float) -> None:
        """Let so many more be sent."""
        if more > 0:
            self._granted.append((self.limit, now))
            self.limit += more

    def is_done(self) -> bool:
        """Whether the sender may stop."""
        if not self.missing:
            return True
        if self.count < max(self._least, self._ask_at) or not self.received[: self._needed].all():
            return False
        if self._enough is None or self._enough(self.received):
            return True
        self._ask_at = self.count + max(1, len(self.received) // PROBES_KEPT)  # it looks at all of them
        return False


def share(
    link: LinkRate, transfers: Sequence[ReceiveWindow], now: float, *, first: Sequence[ReceiveWindow] = ()
) -> list[ReceiveWindow]:
    """Grant what may be on its way to those that miss something; returns whose limit grew.

    Half of it to whoever misses least, half of the rest to the next, and so on: they end one after the other, and what
    has to be done with each goes on beside the next (Homa's shortest remaining first), yet nobody who is slow holds up
    the link.

    Args:
        link: The receiver's.
        transfers: All that are coming.
        now: Seconds.
        first: Those that have just begun or asked: each may have one piece on its way whatever the window says.
    """
    for transfer in transfers:
        transfer.forgive(now)
    grown = []
    room = link.tokens(now)
    under_way = sum(t.in_flight for t in transfers)
    wanting = sorted((t for t in transfers if t.wants > 0 and t.has_arrived(now)), key=lambda t: t.missing)
    nearest = min((t.trip.seconds for t in transfers if t.trip.seconds), default=0.0)
    windows = [link.window(link.without_waiting(t.trip.seconds, nearest)) for t in wanting]
    most, part = max(windows, default=0), 1.0
    for transfer, window in zip(wanting, windows, strict=True):
        part = part / 2 if transfer is not wanting[-1] else part
        mine = math.ceil(part * window) - transfer.in_flight
        more = max(0, min(room, most - under_way, mine, transfer.wants))
        if more < min(GRANT_BATCH, transfer.wants) and transfer.in_flight:
            more = 0  # a grant costs both sides as much as a piece
        more = max(more, 1 if transfer in first and not transfer.in_flight else 0)
        if more:
            transfer.grant(more, now)
            grown.append(transfer)
            link.spend(more)
            room, under_way = max(0, room - more), under_way + more
    return grown


@dataclass
class SendWindow:
    """One transfer at its sender.

    Attributes:
        pieces: N.
        limit: The highest sequence that may be sent.
        sequence: The last that was.
        stopped: Whether the receiver has enough.
        trip_seconds: How long the last answer to a first probe took.
    """

    pieces: int
    limit: int = 0
    sequence: int = 0
    stopped: bool = False
    trip_seconds: float = 0.0
    _pending: deque[int] = field(default_factory=deque)
    _asked: int = 0
    _in_vain: int = (
        0  # probes since a piece could be sent: many wait while others are served, and need not ask so often
    )
    _asked_at: dict[int, float] = field(default_factory=dict)  # of the probes since the last piece
    _answer: tuple[int, set[int]] = field(
        default_factory=lambda: (0, set())
    )  # the probe whose answer counts, and what has come of that
    _probe_at: float = -math.inf  # the first asks for the first grant

    def __post_init__(self) -> None:
        self._pending.extend(range(self.pieces))

    @property
    def ready(self) -> bool:
        """Whether a piece may be sent."""
        return bool(self._pending) and self.sequence < self.limit and not self.stopped

    def next(self) -> tuple[int, int] | None:
        """The next piece to send and its sequence, if there is one that may be."""
        if not self.ready:
            return None
        self.sequence += 1
        self._in_vain = 0
        self._asked_at.clear()
        piece = self._pending.popleft()
        if not self._pending:
            self._probe_at = -math.inf  # all is sent: ask at once what is missing
        return piece, self.sequence

    def sent(self, now: float) -> None:
        """A piece was sent just now: the grant that follows takes a while."""
        if self._pending:
            self._probe_at = now + self._patience

    def granted(self, limit: int, now: float) -> None:
        """The receiver lets more be sent."""
        if limit > self.limit:
            self._in_vain = 0
            self.limit = limit
            self._probe_at = now + self._patience

    def report_missing(self, probe: int, arrived: Sequence[bool], start: int, now: float) -> None:
        """A part of the answer to a probe: send what is not there again; what was asked before the last piece went does
        not count.
        """
        if probe in self._asked_at:
            self.trip_seconds = now - self._asked_at[probe]
            self._asked_at.clear()
            self._answer = probe, set()
        if probe != self._answer[0] or start in self._answer[1] or self.stopped:
            return
        self._answer[1].add(start)
        waiting = set(self._pending)
        again = [start + i for i, one in enumerate(arrived) if not one and start + i < self.pieces]
        self._pending.extendleft(piece for piece in reversed(again) if piece not in waiting)

    def stop(self) -> None:
        """The receiver has enough."""
        self.stopped = True

    def probe(self, now: float) -> int | None:
        """The number of the probe that is due, if nothing may be sent and nobody answers."""
        if self.ready or now < self._probe_at:
            return None
        most = max(MOST_PROBE_SECONDS, self._patience)
        self._probe_at = now + min(most, self._patience * PROBE_BACKOFF**self._in_vain)
        self._in_vain += 1
        self._asked += 1
        self._asked_at[self._asked] = now
        return self._asked

    def wake_at(self) -> float:
        """When to look again if nothing comes."""
        return self._probe_at

    @property
    def _patience(self) -> float:
        return max(LEAST_PROBE_SECONDS, PROBE_TRIPS * self.trip_seconds)
