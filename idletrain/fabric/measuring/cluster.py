"""The cluster to measure: an existing one, or workers on this machine for the length of the measurement."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from distributed import Client
from distributed.security import Security

from idletrain.cluster import access, dask_scheduler, dask_settings, local
from idletrain.errors import RunError
from idletrain.nn.memory import HEAD_RESERVE_BYTES
from idletrain.worker.memory_limits import available_bytes

CLUSTER_JOIN_SECONDS = 60.0


@contextlib.asynccontextmanager
async def existing_cluster(address: str) -> AsyncIterator[Client]:
    """Connect to an existing cluster with Dask's configured certificates; yield the client."""
    dask_settings.apply()
    dask_settings.lift_file_limit()
    async with Client(address, asynchronous=True, security=Security(), set_as_default=False) as client:
        yield client


@contextlib.asynccontextmanager
async def local_cluster(count: int) -> AsyncIterator[Client]:
    """Start a cluster of `count` worker processes on this machine, end it with the context; yield a client.

    Each worker has an equal share of the available memory.

    Raises:
        RunError: Not all of them start.
    """
    share = max(1, (available_bytes() - HEAD_RESERVE_BYTES) // count)
    with tempfile.TemporaryDirectory(prefix="idletrain-fabric-") as folder:
        dask_settings.apply()
        dask_settings.lift_file_limit()
        async with (
            access.issued(Path(folder), "fabric") as (identity, options),
            dask_scheduler.started(Path(folder), identity=identity) as address,
        ):
            fleet = local.LocalFleet(address, share, Path(folder) / "logs", "fabric", options)
            fleet.start(count)
            try:
                security = identity.security()
                async with Client(address, asynchronous=True, security=security, set_as_default=False) as client:
                    await _all_joined(client, count)
                    yield client
            finally:
                await fleet.close()


async def _all_joined(client: Client, count: int) -> None:
    try:
        await asyncio.wait_for(client.wait_for_workers(count), CLUSTER_JOIN_SECONDS)
    except TimeoutError:
        raise RunError(
            f"{count} workers did not start in {CLUSTER_JOIN_SECONDS:.0f} s; ask for fewer with --nodes"
        ) from None
