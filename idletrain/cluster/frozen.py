"""End the workers on this machine whose processes live but that send their scheduler nothing any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from idletrain.cluster import contact
from idletrain.cluster.known_workers import SeenWorker
from idletrain.cluster.local import LocalFleet

FROZEN_SECONDS, FROZEN_POLL_SECONDS = 60.0, 5.0  # Dask's scheduler forgets a worker within two minutes
FROZEN_REASON = "its process lives but sends nothing; it is ended, and another is started"


async def end_frozen(
    fleet: LocalFleet, workers: Callable[[], Awaitable[Sequence[SeenWorker]]], record: Callable[..., None]
) -> None:
    """Kill every worker that its scheduler has not heard from for a minute, until cancelled.

    A stopped process, or one whose code never lets go of the interpreter, sends nothing; `keep_workers` replaces what
    is killed.

    Args:
        fleet: The workers.
        workers: Asks the scheduler for the workers that it knows.
        record: Called with a `worker_sick` event for each that is killed.
    """
    signs: dict[str, tuple[float, float]] = {}  # of each address the last sign of life, and when it was news
    while True:
        await asyncio.sleep(FROZEN_POLL_SECONDS)
        try:
            known, now = await workers(), time.monotonic()
        except contact.UnreachableError:  # the next poll may reach it
            continue
        before, signs = signs, {}
        for worker in known:
            former = before.get(worker.address)
            signs[worker.address] = former if former and former[0] == worker.last_seen else (worker.last_seen, now)
            if now - signs[worker.address][1] > FROZEN_SECONDS and worker.name in fleet.alive():
                fleet.stop([worker.name])
                signs[worker.address] = (worker.last_seen, now)
                record("worker_sick", worker=worker.address, name=worker.name, cause="frozen", reason=FROZEN_REASON)
