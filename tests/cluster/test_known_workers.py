"""What a scheduler says of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from distributed import Scheduler, Worker
from distributed.security import Security

from idletrain.cluster import contact, dask_settings
from idletrain.cluster.known_workers import SeenWorker, known_workers, trained_workers
from idletrain.worker.node import WorkerNode


def test_a_worker_is_known_with_the_steps_that_it_has_trained() -> None:
    async def seen() -> list[Any]:
        dask_settings.apply()
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Worker(scheduler.address, nthreads=1, name="box", memory_limit=0, dashboard=False) as worker,
        ):
            node, results = WorkerNode.of(worker), []
            for node.steps in (0, 7):
                await worker.heartbeat()
                results += await known_workers(scheduler.address, Security())
            return results

    before, after = asyncio.run(seen())
    assert (before.name, before.steps, after.steps) == ("box", 0, 7)
    assert after.address.startswith("tcp://127.0.0.1:")


def test_who_has_trained_is_told_by_name_and_nobody_of_a_scheduler_that_is_silent() -> None:
    async def two() -> Sequence[SeenWorker]:
        return [SeenWorker("fresh", "tcp://a", 1.0), SeenWorker("busy", "tcp://b", 1.0, 3)]

    async def silent() -> Sequence[SeenWorker]:
        raise contact.UnreachableError("tcp://a", "it is gone")

    assert asyncio.run(trained_workers(two)) == {"busy"}
    assert asyncio.run(trained_workers(silent)) == frozenset()
