"""Admission of payloads over TCP: workers that finish together would overrun a shallow buffer, and TCP recovers slowly.

So only a few payloads travel at once. The limit rises by one as long as that brings more bytes a second, as it does
where each worker's own link is the slow one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from idletrain.exchange.messages import LeaseId

ADMISSION_BYTES = 1 << 16  # a smaller payload is not queued: it fits into the buffers
MIN_HOLDERS = 2  # while the first waits for an answer, the second fills the link
MIN_GAIN = 0.5  # rate that one more holder must bring, as a fraction of the mean rate of the others
RATE_WINDOW_SECONDS = 0.2  # over which bytes are counted
PROBE_AGAIN_SECONDS = 10.0  # after one more holder brought too little
MIN_RATE = 1e6  # bytes a second that a pull is given at least: it reports nothing before its end
HOLDER_SILENCE_SECONDS = 5.0  # after which a holder without progress loses its slot


def holder_of(lease: LeaseId) -> str:
    """Return the name under which a lease's payloads hold a slot."""
    return f"{lease.round}/{lease.attempt}"


@dataclass
class AdmissionQueue:
    """Slots for payloads in one direction of the store's link.

    Attributes:
        now: The clock.
        max_holders: How many slots there are, adjusted to the measured rate.
    """

    now: Callable[[], float] = time.monotonic
    max_holders: int = MIN_HOLDERS
    _holders: dict[str, tuple[float, float]] = field(default_factory=dict)  # deadline if no byte arrives, and patience
    _waiting: deque[tuple[str, float, asyncio.Future[None]]] = field(default_factory=deque)
    _since: float | None = None
    _bytes: int = 0
    _rate_before: float = 0.0  # bytes a second with one holder fewer
    _probe_at: float = 0.0

    async def acquire(self, holder: str, patience: float = HOLDER_SILENCE_SECONDS, *, urgent: bool = False) -> None:
        """Wait for a slot, last in the queue, or first if urgent; after `patience` seconds without a byte, the slot is
        lost.
        """
        if holder in self._holders:  # requested again, because the answer was lost
            return
        admitted = next((future for waiting, _, future in self._waiting if waiting == holder), None)
        if admitted is None:
            admitted = asyncio.get_running_loop().create_future()
            place = 0 if urgent else len(self._waiting)
            self._waiting.insert(place, (holder, patience, admitted))
        try:
            self._admit_waiting()
            while not admitted.done():
                await asyncio.wait((admitted,), timeout=HOLDER_SILENCE_SECONDS)
                self._admit_waiting()
        except asyncio.CancelledError:
            self._waiting = deque(entry for entry in self._waiting if entry[2] is not admitted)
            if admitted.done():
                self.release(holder)
            raise

    def release(self, holder: str) -> None:
        """Free a slot."""
        self._holders.pop(holder, None)
        self._admit_waiting()

    def cancel(self, holder: str) -> None:
        """Free the slot of a holder that is gone, or stop its wait for one."""
        for waiting, _, admitted in self._waiting:
            if waiting == holder and not admitted.done():
                admitted.set_result(None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != holder)
        self.release(holder)

    def transferred(self, holder: str, count: int) -> None:
        """Count bytes of a holder's payload that arrived."""
        if holder in self._holders:
            _, patience = self._holders[holder]
            self._holders[holder] = self.now() + patience, patience
        self._bytes += count
        # A rate is measured only while all slots are used.
        if self._since is None or len(self._holders) < self.max_holders or not self._waiting:
            self._since, self._bytes = self.now(), 0
        elif self.now() - self._since > RATE_WINDOW_SECONDS:
            self._adjust_limit(self._bytes / (self.now() - self._since))
            self._since, self._bytes = self.now(), 0
            self._admit_waiting()

    def _adjust_limit(self, rate: float) -> None:
        """Add a slot if the last one added raised the rate; else remove one, and keep that for a while."""
        if self.now() < self._probe_at:
            return
        if rate > self._rate_before * (1 + MIN_GAIN / (self.max_holders - 1)):
            self.max_holders, self._rate_before = self.max_holders + 1, rate
        else:
            self.max_holders, self._rate_before, self._probe_at = (
                max(MIN_HOLDERS, self.max_holders - 1),
                0.0,
                self.now() + PROBE_AGAIN_SECONDS,
            )

    def _admit_waiting(self) -> None:
        """Drop silent holders, and admit the next in the queue."""
        now = self.now()
        self._holders = {holder: limit for holder, limit in self._holders.items() if limit[0] > now}
        while self._waiting and len(self._holders) < self.max_holders:
            holder, patience, admitted = self._waiting.popleft()
            if not admitted.done():
                self._holders[holder] = now + patience, patience
                admitted.set_result(None)
