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


@functools.cache  # once: deadlines that follow from the first would be wrong by a second
def use() -> None:
    """Have this process's event loops, and what Dask sends in them, go by a clock that only goes on from now."""
    ahead = time.time() - time.monotonic()
    vars(batched)["time"] = lambda: ahead + time.monotonic()
    IOLoop.time = lambda _loop: ahead + time.monotonic()  # type: ignore[assignment, method-assign]
