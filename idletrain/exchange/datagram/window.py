"""Credit, missing pieces and completion of a datagram transfer, at its sender and its receiver: pure, without a clock.

The receiver drives: it knows how fast pieces arrive and how many senders share its link, so its grants neither leave
the link idle nor fill a shallow buffer (NDP, SIGCOMM 2017; Homa, SIGCOMM 2018). Letters: N pieces of a transfer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from idletrain.exchange.datagram.link_rate import LinkRate, RoundTrip

GRANT_BATCH = 3  # pieces granted at once at least, while any are in flight
MAX_CHECKS = 64  # of whether the pieces that arrived are acceptable
FORGIVEN_SECONDS, FORGIVEN_TRIPS = 0.01, 3.0  # of silence, after which pieces in flight count as lost
SILENT_SECONDS, SILENT_TRIPS = 0.1, 5.0  # after which a sender gets no more credit until it probes
ANSWER_DELAY_SECONDS = 0.003  # a probe may overtake pieces by this much, or by a quarter of a round trip
MIN_PROBE_SECONDS, PROBE_TRIPS, PROBE_BACKOFF, MAX_PROBE_SECONDS = 0.004, 2.0, 2.0, 0.05
ReceivedMask = NDArray[np.bool_]


class ReceiveWindow:
    """Track one transfer at its receiver.

    Args:
        pieces: N.
        required_pieces: Pieces, from the first on, that must arrive; all if None.
        min_pieces: How many pieces must arrive; all if None.
        is_acceptable: Decides, by which pieces arrived `[N]`, once those two rules are met.
        trip: Round trip shared with the sender's other transfers.

    Attributes:
        received: Which pieces are here, `[N]`.
        count: How many.
        limit: The sequence up to which the sender may send.
        top: The highest sequence seen, or given up as lost.
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
        self._required_pieces = pieces if required_pieces is None else required_pieces
        self._min_pieces = pieces if min_pieces is None else min_pieces
        self._is_acceptable = is_acceptable
        self._check_at = 0
        self._granted: deque[tuple[int, float]] = deque()
        self._probe: tuple[int, int, float] | None = None
        self._last = pieces  # sequence of the last piece that the sender knows it has to send

    @property
    def missing(self) -> int:
        """Pieces that have not arrived."""
        return len(self.received) - self.count

    @property
    def wants(self) -> int:
        """Pieces that the sender would send if they were granted."""
        return self._last - self.limit

    @property
    def in_flight(self) -> int:
        """Pieces that were granted, have not arrived, and are not given up."""
        return self.limit - self.top

    def take(self, sequence: int, piece: int, now: float) -> bool:
        """Note a piece; return False if it arrived before, or is none of this transfer's."""
        if not (0 <= piece < len(self.received) and 0 < sequence <= self.limit):
            return False
        self._heard_at = now
        self._measure_trip(sequence, now)
        self.top = max(self.top, sequence)
        if self.received[piece]:
            return False
        self.received[piece] = True
        self.count += 1
        return True

    def _measure_trip(self, sequence: int, now: float) -> None:
        """Measure the time since this piece was granted, if it is the first that its grant released."""
        while self._granted and self._granted[0][0] < sequence:
            first, at = self._granted.popleft()
            if first + 1 == sequence:
                self.trip.took(now - at, now)

    def probed(self, probe: int, sequence: int, now: float) -> None:
        """Note a probe: the sender has sent all up to this sequence, and asks what is missing."""
        self._heard_at = now
        self._probe = probe, min(sequence, self.limit), now + max(ANSWER_DELAY_SECONDS, self.trip.seconds / 4)

    def forgive(self, now: float) -> None:
        """Give up pieces in flight after a long silence, so that other transfers may use their credit."""
        if self.in_flight and now - self._heard_at > max(FORGIVEN_SECONDS, FORGIVEN_TRIPS * self.trip.seconds):
            self.top = self.limit

    def is_heard(self, now: float) -> bool:
        """Return whether the sender was heard of late; if not, it probes once it is back."""
        return now - self._heard_at < max(SILENT_SECONDS, SILENT_TRIPS * self.trip.seconds)

    def answer(self, now: float) -> int | None:
        """Return the probe to answer now: all pieces up to its sequence arrived, or are lost; None if there is none."""
        if self._probe is None or (self.top < self._probe[1] and now < self._probe[2]):
            return None
        (probe, sequence, _), self._probe = self._probe, None
        self.top = max(self.top, sequence)
        if sequence >= self._last:
            self._last = sequence + self.missing
        return probe

    @property
    def answer_at(self) -> float:
        """The latest time to answer the probe; infinity if there is none."""
        return self._probe[2] if self._probe else math.inf

    def grant(self, more: int, now: float) -> None:
        """Grant `more` pieces."""
        if more > 0:
            self._granted.append((self.limit, now))
            self.limit += more

    def is_done(self) -> bool:
        """Return whether the transfer is complete, or complete enough."""
        if not self.missing:
            return True
        if self.count < max(self._min_pieces, self._check_at) or not self.received[: self._required_pieces].all():
            return False
        if self._is_acceptable is None or self._is_acceptable(self.received):
            return True
        self._check_at = self.count + max(1, len(self.received) // MAX_CHECKS)  # a check reads all pieces
        return False


def share(
    link: LinkRate, transfers: Sequence[ReceiveWindow], now: float, *, first: Sequence[ReceiveWindow] = ()
) -> list[ReceiveWindow]:
    """Grant the link's credit to transfers with missing pieces; return those whose limit grew.

    Half of the window goes to the transfer with the fewest missing pieces, half of the rest to the next, and so on
    (Homa's shortest remaining first): they finish one after the other, so that each is processed while the next
    arrives, yet no slow sender holds up the link.

    Args:
        link: The receiver's.
        transfers: All incoming transfers.
        now: Seconds.
        first: Transfers that have just started or probed: each may have one piece in flight whatever the window says.
    """
    for transfer in transfers:
        transfer.forgive(now)
    grown = []
    room = link.tokens(now)
    in_flight = sum(t.in_flight for t in transfers)
    wanting = sorted((t for t in transfers if t.wants > 0 and t.is_heard(now)), key=lambda t: t.missing)
    nearest = min((t.trip.seconds for t in transfers if t.trip.seconds), default=0.0)
    windows = [link.window(link.without_queueing(t.trip.seconds, nearest)) for t in wanting]
    total, part = max(windows, default=0), 1.0
    for transfer, window in zip(wanting, windows, strict=True):
        part = part / 2 if transfer is not wanting[-1] else part
        own = math.ceil(part * window) - transfer.in_flight
        more = max(0, min(room, total - in_flight, own, transfer.wants))
        if more < min(GRANT_BATCH, transfer.wants) and transfer.in_flight:
            more = 0  # a grant costs both sides as much as a piece
        more = max(more, 1 if transfer in first and not transfer.in_flight else 0)
        if more:
            transfer.grant(more, now)
            grown.append(transfer)
            link.spend(more)
            room, in_flight = max(0, room - more), in_flight + more
    return grown


@dataclass
class SendWindow:
    """Track one transfer at its sender.

    Attributes:
        pieces: N.
        limit: The highest sequence that may be sent.
        sequence: The highest that was sent.
        stopped: Whether the receiver has reported that it is done.
        trip_seconds: How long the last answer to a first probe took.
    """

    pieces: int
    limit: int = 0
    sequence: int = 0
    stopped: bool = False
    trip_seconds: float = 0.0
    _pending: deque[int] = field(default_factory=deque)
    _probes: int = 0
    _unanswered: int = 0  # probes since a piece could be sent: a sender that waits while others are served probes less
    _probed_at: dict[int, float] = field(default_factory=dict)  # probes since the last piece, and when each was sent
    # The probe whose answer counts, and the first pieces of the parts of that answer that arrived.
    _answer: tuple[int, set[int]] = field(default_factory=lambda: (0, set()))
    _probe_at: float = -math.inf  # the first probe asks for the first grant

    def __post_init__(self) -> None:
        self._pending.extend(range(self.pieces))

    @property
    def ready(self) -> bool:
        """Return whether a piece may be sent."""
        return bool(self._pending) and self.sequence < self.limit and not self.stopped

    def next(self) -> tuple[int, int] | None:
        """Return the next piece to send and its sequence; None if none may be sent."""
        if not self.ready:
            return None
        self.sequence += 1
        self._unanswered = 0
        self._probed_at.clear()
        piece = self._pending.popleft()
        if not self._pending:
            self._probe_at = -math.inf  # all is sent: probe at once for what is missing
        return piece, self.sequence

    def sent(self, now: float) -> None:
        """Delay the next probe: a piece was sent, and the grant that follows takes a while."""
        if self._pending:
            self._probe_at = now + self._patience

    def granted(self, limit: int, now: float) -> None:
        """Raise the limit to what the receiver granted."""
        if limit > self.limit:
            self._unanswered = 0
            self.limit = limit
            self._probe_at = now + self._patience

    def report_missing(self, probe: int, arrived: Sequence[bool], start: int, now: float) -> None:
        """Queue the pieces that a part of a probe's answer reports as missing; ignore answers to probes sent before the
        last piece.

        Args:
            probe: The probe's number.
            arrived: Whether each piece, from number `start` on, arrived.
            start: The first piece of this part.
            now: Seconds.
        """
        if probe in self._probed_at:
            self.trip_seconds = now - self._probed_at[probe]
            self._probed_at.clear()
            self._answer = probe, set()
        if probe != self._answer[0] or start in self._answer[1] or self.stopped:
            return
        self._answer[1].add(start)
        pending = set(self._pending)
        missing = [start + i for i, is_here in enumerate(arrived) if not is_here and start + i < self.pieces]
        self._pending.extendleft(piece for piece in reversed(missing) if piece not in pending)

    def stop(self) -> None:
        """Send no more: the receiver is done."""
        self.stopped = True

    def probe(self, now: float) -> int | None:
        """Return the number of the probe to send now; None unless nothing may be sent and no answer came."""
        if self.ready or now < self._probe_at:
            return None
        longest = max(MAX_PROBE_SECONDS, self._patience)
        self._probe_at = now + min(longest, self._patience * PROBE_BACKOFF**self._unanswered)
        self._unanswered += 1
        self._probes += 1
        self._probed_at[self._probes] = now
        return self._probes

    def wake_at(self) -> float:
        """Return when the next probe is due."""
        return self._probe_at

    @property
    def _patience(self) -> float:
        return max(MIN_PROBE_SECONDS, PROBE_TRIPS * self.trip_seconds)
