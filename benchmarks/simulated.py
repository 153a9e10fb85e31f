"""Simulated workers: stock Dask workers, many on one event loop, that sleep instead of training and do all else.

python -m benchmarks.simulated SCHEDULER COUNT
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dask
import numpy as np
from distributed import Worker, get_worker
from numpy.typing import NDArray

from idletrain.cluster import dask_settings
from idletrain.cluster.forked_processes import WORKER_ENVIRONMENT
from idletrain.cluster.shutdown import when_parent_ends

INPUTS = 8
A_PROCESS = 125  # more share one interpreter's lock, fewer cost 200 MB of RAM the process
# Each machine of a real fleet would measure itself; here one machine would measure itself a thousand times.
QUIET = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "5s",
    "distributed.admin.system-monitor.interval": "1h",
}


@dataclass(frozen=True)
class Slow:
    """A sample that takes a worker `seconds` to come by, and nobody else."""

    seconds: float

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        with contextlib.suppress(ValueError):  # not in a worker
            get_worker()
            time.sleep(self.seconds)
        return np.ones(INPUTS, dtype=np.float32), np.zeros((), dtype=np.int64)


def samples(seconds: float) -> tuple[Slow, Slow]:
    """Return the data of a job whose local steps last `seconds` each, with a batch of one."""
    return Slow(seconds), Slow(seconds)


@contextlib.contextmanager
def started(scheduler: str, count: int, logs: Path) -> Iterator[list[int]]:
    """Start simulated workers that end with the block; yield the ids of their processes."""
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    counts = [min(A_PROCESS, count - first) for first in range(0, count, A_PROCESS)]
    processes = []
    try:
        for number, share in enumerate(counts):
            command = [sys.executable, "-m", "benchmarks.simulated", scheduler, str(share)]
            with (logs / f"simulated-{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
                )
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def serve(scheduler: str, count: int) -> None:
    """Serve as `count` workers of a scheduler until it is gone."""
    dask_settings.apply()
    dask_settings.lift_file_limit()
    dask.config.set(QUIET)
    with tempfile.TemporaryDirectory(prefix="idletrain-simulated-") as folder:
        workers = [
            Worker(scheduler, nthreads=1, memory_limit=0, dashboard=False, local_directory=folder) for _ in range(count)
        ]
        async with contextlib.AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(worker)
            await asyncio.gather(*(worker.finished() for worker in workers))


if __name__ == "__main__":
    when_parent_ends(lambda: os._exit(0))
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
