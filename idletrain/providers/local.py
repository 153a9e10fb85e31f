"""Provide worker processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable

import torch
from distributed.security import Security

from idletrain.cluster import access, dask_scheduler, frozen, known_workers, local
from idletrain.job import Job
from idletrain.nn.memory import HEAD_RESERVE_BYTES
from idletrain.providers.protocol import LaunchRequest
from idletrain.worker.memory_limits import available_bytes


class LocalProcesses:
    """Worker processes on this machine, replaced when one is lost; see `WorkerProvider`."""

    scheduler: str | None = None
    measurable = True
    dashboard_port: int | None = dask_scheduler.DASHBOARD_PORT

    def __init__(self, request: LaunchRequest = LaunchRequest()) -> None:  # noqa: B008 (frozen)
        self._request = request

    def faults(self, _job: Job) -> list[str]:
        return self._request.cloud_faults

    async def check(self) -> None:
        """Do nothing: this machine is always there."""

    @contextlib.asynccontextmanager
    async def cluster(self, job: Job, record: Callable[..., None]) -> AsyncIterator[tuple[str, Security]]:
        """Start a scheduler on loopback and the job's number of workers; end them all behind the context.

        They speak TLS with certificates of the run's own: every user of this machine can connect to its ports.
        """
        local.warm_up()
        async with (
            access.issued(job.run_dir, job.name) as (identity, options),
            dask_scheduler.started(job.run_dir, identity=identity) as address,
        ):
            fleet = local.LocalFleet(address, worker_bytes(job), job.run_dir / "logs", options=options)
            workers = functools.partial(known_workers.known_workers, address, identity.security())
            tasks = [
                asyncio.ensure_future(local.keep_workers(fleet, job.nodes.count, record)),
                asyncio.ensure_future(frozen.end_frozen(fleet, workers, record)),
            ]
            if self._request.churn_seconds:
                trained = functools.partial(known_workers.trained_workers, workers)
                tasks.append(asyncio.ensure_future(local.churn(fleet, self._request.churn_seconds, trained)))
            try:
                yield address, identity.security()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await fleet.close()


def worker_bytes(job: Job) -> int:
    """Return the bytes that each local worker may use: what the job says, or an equal share of what is free here."""
    if job.nodes.memory:
        return job.nodes.memory
    free = available_bytes() - HEAD_RESERVE_BYTES
    if torch.cuda.is_available():  # all workers train on it
        free = min(free, torch.cuda.mem_get_info()[0])
    return max(free // job.nodes.count, 1)
