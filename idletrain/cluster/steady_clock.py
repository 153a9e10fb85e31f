"""Time Dask's messages and periodic work by a clock that nobody sets.

Dask and tornado read the wall clock. Where it is set back, by an hour say, messages between a scheduler, its workers
and its clients may wait for an hour (`distributed.batched.BatchedSend` waits for a deadline), and heartbeats stop for
as long (`tornado.ioloop.PeriodicCallback`).
"""

from __future__ import annotations

import functools
import time

from distributed import batched
from tornado.ioloop import IOLoop


@functools.cache  # once: a second offset would move the deadlines that were made with the first
def use() -> None:
    """Have this process's event loops, and what Dask sends in them, go by a clock that only goes on from now."""
    ahead = time.time() - time.monotonic()

    def now(_loop: IOLoop | None = None) -> float:
        return ahead + time.monotonic()

    vars(batched)["time"] = now
    IOLoop.time = now  # type: ignore[assignment, method-assign]
