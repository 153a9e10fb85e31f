"""`idletrain worker`: a Dask worker in this very process (no nanny), with a drain of its own.

Dask's own SIGTERM, retirement and lifetime all throw the running task away. Here a first SIGTERM is a notice: no new
leases, the running subnet stops after at most one step and is pushed home, and the process ends. A second ends it now.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from distributed import Worker
from distributed.core import rpc
from distributed.security import Security

from idletrain.cluster import dask_settings
from idletrain.errors import JobError, RefusedError, RunError
from idletrain.worker.attempt import LEASES, WorkerNode
from idletrain.worker.lease_spec import version

logger = logging.getLogger(__name__)
DRAIN_POLL_SECONDS = 0.02
WORKER_CONNECT_SECONDS = 10
WORKER_JOIN_SECONDS = 30  # Dask would knock for ever at a scheduler that died after our first look at it


async def serve(scheduler: str, memory_bytes: int | None, name: str | None, security: Security) -> None:
    """Work for a scheduler until it is gone or a notice comes.

    Args:
        scheduler: Its `tcp://` or `tls://` address.
        memory_bytes: RAM this process may use; all that is free when None.
        name: A name for people; must be unique in the cluster.
        security: The cluster's certificates.

    Raises:
        RunError: the scheduler cannot be reached.
        RefusedError: it runs another version of idletrain.
        JobError: it asks for certificates that were not named.
    """
    dask_settings.apply()
    await _check_version(scheduler, security)
    worker = Worker(
        scheduler,
        nthreads=LEASES,
        name=name,
        memory_limit=0,
        security=security,
        dashboard=False,
        death_timeout=WORKER_JOIN_SECONDS,
    )
    node = WorkerNode.of(worker)
    node.memory_bytes = memory_bytes
    notice = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _on_sigterm, notice)
    loop.add_signal_handler(signal.SIGUSR1, warn, worker, node)
    async with worker:
        closed = asyncio.ensure_future(worker.finished())
        noticed = asyncio.ensure_future(notice.wait())
        await asyncio.wait((closed, noticed), return_when=asyncio.FIRST_COMPLETED)
        if notice.is_set():
            await drain(worker, node)
        noticed.cancel()


def warn(worker: Worker, node: WorkerNode) -> None:
    """The machine may be taken before long: bring the running subnet's state home, and tell the head."""
    worker.log_event("idletrain", {"action": "at-risk", "worker": worker.address})
    node.checkpoint_now.set()


async def drain(worker: Worker, node: WorkerNode) -> None:
    """Take no more work and wait until the running subnet is home."""
    worker.log_event("idletrain", {"action": "notice", "worker": worker.address})
    node.draining.set()
    while worker.state.executing_count:
        await asyncio.sleep(DRAIN_POLL_SECONDS)
    await asyncio.sleep(DRAIN_POLL_SECONDS)  # the stream to the scheduler is batched: let the task's end go out first


def _on_sigterm(notice: asyncio.Event) -> None:
    if notice.is_set():
        os._exit(143)  # asked twice: gone at once, as by SIGKILL
    notice.set()


async def _check_version(scheduler: str, security: Security) -> None:
    try:
        async with rpc(
            scheduler, connection_args=security.get_connection_args("worker"), timeout=WORKER_CONNECT_SECONDS
        ) as remote:
            head = await remote.get_metadata(keys=["idletrain"], default=None)
    except (TypeError, RuntimeError) as error:  # how Dask says that it has no certificates
        raise JobError(
            f"scheduler {scheduler} asks for TLS ({error}); name --tls-ca-file, --tls-cert and --tls-key"
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"scheduler {scheduler} cannot be reached ({error}); check the address and that it runs"
        ) from None
    if head and head["version"] != version():
        raise RefusedError(
            f"the head at {scheduler} runs idletrain {head['version']} and this worker {version()}; install the same"
        )


def security_from(ca_file: Path | None, cert: Path | None, key: Path | None) -> Security:
    """The cluster's certificates from files; Dask's own configuration where none are named."""
    if not (ca_file or cert or key):
        return Security()
    return Security(
        tls_ca_file=str(ca_file), tls_worker_cert=str(cert), tls_worker_key=str(key), require_encryption=True
    )
