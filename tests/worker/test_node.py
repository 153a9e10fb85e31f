"""What a worker reports to the head when it joins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import torch
from distributed import Client, Scheduler, Worker

from idletrain.cluster import dask_settings
from idletrain.worker import tasks
from idletrain.worker.memory_limits import memory_limit_bytes
from idletrain.worker.node import WorkerNode

MEMORY_BYTES = 1 << 40


async def _describe() -> list[dict[str, Any]]:
    """Return what a worker says of itself, for a job that compiles nothing and for one that does."""
    dask_settings.apply()
    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, nthreads=1, name="box", memory_limit=0, dashboard=False) as worker,
        Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
    ):
        WorkerNode.of(worker).memory_bytes = MEMORY_BYTES
        return [await client.submit(tasks.describe, on, pure=False) for on in ((), ("cpu", "cuda"))]


def test_a_worker_reports_its_memory_device_speed_cohort_and_name() -> None:
    description, compiling = asyncio.run(_describe())
    known = {"memory_bytes", "device", "steps_per_second", "cohort", "leases", "restarts", "pid", "name"}
    assert description.keys() == known
    expected = min(MEMORY_BYTES, memory_limit_bytes())
    assert expected // 2 < description["memory_bytes"] < expected
    assert description["steps_per_second"] > 0
    assert description["name"] == "box"
    assert torch.__version__ in description["cohort"]
    assert compiling["cohort"].startswith(f"{description['cohort']}/")


def test_a_worker_imports_nothing_that_few_jobs_need() -> None:
    program = (
        "import sys, idletrain.worker.process, idletrain.worker.node, idletrain.worker.attempt\n"
        "rare = {'torch._inductor', 'torch._dynamo', 'sympy', 'pandas', 'sklearn', 'transformers'}\n"
        "print(*rare & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
