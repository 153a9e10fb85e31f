"""Who may send now: many workers that end together would overrun a shallow buffer, and TCP waits long after that.

So few payloads travel over TCP at once; one more as long as that brought more bytes a second, as it does where each
worker's own link is the slow one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from idletrain.exchange.messages import LeaseId

ADMISSION_BYTES = 1 << 16  # a smaller payload is in the buffers before others notice
MIN_HOLDERS = 2  # while the first waits for an answer, the second fills the link
BACKOFF = 0.5  # of what each of the others brings is what one more at once has to
RATE_WINDOW_SECONDS = 0.2  # in which bytes are counted
PROBE_AGAIN_SECONDS = 10.0  # after one more at once brought nothing
MIN_RATE = 1e6  # bytes a second: a pull says nothing until all of it has come
HOLDER_SILENCE_SECONDS = 5.0  # without a byte, whoever has a turn has lost it


def holder_of(lease: LeaseId) -> str:
    """Whose turn a lease's payloads take."""
    return f"{lease.round}/{lease.attempt}"


@dataclass
class AdmissionQueue:
    """Turns on one way of the store's link.

    Attributes:
        now: The clock.
        most: How many are given at once, as found so far.
    """

    now: Callable[[], float] = time.monotonic
    max_holders: int = MIN_HOLDERS
    _holders: dict[str, tuple[float, float]] = field(default_factory=dict)  # until when, if nothing comes, and how long
    _waiting: deque[tuple[str, float, asyncio.Future[None]]] = field(default_factory=deque)
    _since: float | None = None
    _bytes: int = 0
    _before: float = 0.0  # bytes a second with one fewer
    _again_at: float = 0.0

    async def acquire(self, holder: str, patience: float = HOLDER_SILENCE_SECONDS, *, urgent: bool = False) -> None:
        """Wait for a turn, behind those that came before, or before all if it is urgent; without a byte in `patience`
        seconds it is lost again.
        """
        if holder in self._holders:  # asked again, as the answer did not come
            return
        mine = next((told for waiting, _, told in self._waiting if waiting == holder), None)
        if mine is None:
            mine = asyncio.get_running_loop().create_future()
            place = 0 if urgent else len(self._waiting)
            self._waiting.insert(place, (holder, patience, mine))
        try:
            self._admit_waiting()
            while not mine.done():
                await asyncio.wait((mine,), timeout=HOLDER_SILENCE_SECONDS)
                self._admit_waiting()
        except asyncio.CancelledError:
            self._waiting = deque(one for one in self._waiting if one[2] is not mine)
            if mine.done():
                self.release(holder)
            raise

    def release(self, holder: str) -> None:
        """The turn is over."""
        self._holders.pop(holder, None)
        self._admit_waiting()

    def cancel(self, holder: str) -> None:
        """Who had a turn, or waits for one, is gone."""
        for waiting, _, told in self._waiting:
            if waiting == holder and not told.done():
                told.set_result(None)
        self._waiting = deque(one for one in self._waiting if one[0] != holder)
        self.release(holder)

    def transferred(self, holder: str, count: int) -> None:
        """So many bytes of a holder's have come."""
        if holder in self._holders:
            _, patience = self._holders[holder]
            self._holders[holder] = self.now() + patience, patience
        self._bytes += count
        if (
            self._since is None or len(self._holders) < self.max_holders or not self._waiting
        ):  # tells nothing of so many
            self._since, self._bytes = self.now(), 0
        elif self.now() - self._since > RATE_WINDOW_SECONDS:
            self._adjust_limit(self._bytes / (self.now() - self._since))
            self._since, self._bytes = self.now(), 0
            self._admit_waiting()

    def _adjust_limit(self, rate: float) -> None:
        """One more at once if the last one more brought something, else one fewer for a while."""
        if self.now() < self._again_at:
            return
        if rate > self._before * (1 + BACKOFF / (self.max_holders - 1)):
            self.max_holders, self._before = self.max_holders + 1, rate
        else:
            self.max_holders, self._before, self._again_at = (
                max(MIN_HOLDERS, self.max_holders - 1),
                0.0,
                self.now() + PROBE_AGAIN_SECONDS,
            )

    def _admit_waiting(self) -> None:
        """Forget who is silent, and let the next begin."""
        now = self.now()
        self._holders = {holder: limit for holder, limit in self._holders.items() if limit[0] > now}
        while self._waiting and len(self._holders) < self.max_holders:
            holder, patience, told = self._waiting.popleft()
            if not told.done():
                self._holders[holder] = now + patience, patience
                told.set_result(None)
