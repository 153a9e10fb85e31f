"""What a worker tells of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from distributed import Client, Scheduler, Worker

from idletrain.cluster import dask_settings
from idletrain.worker import tasks
from idletrain.worker.attempt import WorkerNode, measure_speed
from idletrain.worker.memory_limits import memory_limit_bytes

GIVEN = 1 << 40  # bytes


async def _describe() -> dict[str, Any]:
    dask_settings.apply()
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, nthreads=1, name="box", memory_limit=0, dashboard=False) as worker,
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        WorkerNode.of(worker).memory_bytes = GIVEN
        about: dict[str, Any] = await client.submit(tasks.describe, pure=False)
        return about


def test_a_worker_tells_its_memory_device_speed_cohort_and_name() -> None:
    about = asyncio.run(_describe())
    assert about.keys() == {"memory_bytes", "device", "steps_per_second", "cohort", "leases", "pid", "name"}
    given = min(GIVEN, memory_limit_bytes())
    assert given // 2 < about["memory_bytes"] < given
    assert about["steps_per_second"] > 0
    assert about["name"] == "box"
    assert torch.__version__ in about["cohort"]


def test_speed_is_measured_in_steps_a_second() -> None:
    assert 1 < measure_speed(torch.device("cpu")) < 1e6
