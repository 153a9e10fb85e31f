"""Run `idletrain worker`: a Dask worker in this very process (no nanny), with a drain of its own.

Dask's own SIGTERM, retirement and lifetime all throw the running task away. Here a first SIGTERM is a notice: the
worker takes no new leases, stops the running subnet after at most one step, pushes it to the store and exits. A second
SIGTERM ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

from distributed import Worker
from distributed.security import Security

from idletrain.cluster import contact, dask_settings, prompt_thread
from idletrain.errors import JobError, RefusedError, RunError
from idletrain.worker.lease_spec import version
from idletrain.worker.node import LEASES, WorkerNode

logger = logging.getLogger(__name__)
DRAIN_POLL_SECONDS = 0.02
HUNG_EXIT = 75  # EX_TEMPFAIL of sysexits.h: try again
WORKER_JOIN_SECONDS = 30  # Dask would retry for ever if the scheduler died after our version check


async def serve(scheduler: str, memory_bytes: int | None, name: str | None, security: Security) -> None:
    """Work for a scheduler until the scheduler is gone or this node is about to be taken.

    Args:
        scheduler: Its `tcp://` or `tls://` address.
        memory_bytes: RAM this process may use; all that is free when None.
        name: A readable name, unique in the cluster; Dask makes one when None.
        security: The cluster's certificates.

    Raises:
        RunError: the scheduler cannot be reached.
        RefusedError: the head runs another version of idletrain.
        JobError: the scheduler requires certificates and none were given.
    """
    dask_settings.apply()
    prompt_thread.wake_soon()
    if not contact.is_address(scheduler):
        raise JobError(f"scheduler {contact.shown(repr(scheduler))}: should be tcp://HOST:PORT or tls://HOST:PORT")
    await _check_version(scheduler, security)
    worker = Worker(
        scheduler,
        nthreads=LEASES,
        name=name,
        memory_limit=0,
        security=security,
        dashboard=False,
        death_timeout=WORKER_JOIN_SECONDS,
        host=_listens_at(scheduler),
    )
    node = WorkerNode.of(worker)
    node.memory_bytes = memory_bytes
    node.restarts, node.on_hang = True, _end_hung
    notice = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _on_sigterm, notice)
    loop.add_signal_handler(signal.SIGUSR1, warn, worker, node)
    async with worker:
        worker.http_server.stop()  # it would show its figures to any user of this machine
        closed = asyncio.ensure_future(worker.finished())
        noticed = asyncio.ensure_future(notice.wait())
        await asyncio.wait((closed, noticed), return_when=asyncio.FIRST_COMPLETED)
        if notice.is_set():
            await drain(worker, node)
        noticed.cancel()


def _listens_at(scheduler: str) -> str | None:
    """Return the host to listen at: loopback if all the cluster is on this machine; None for any."""
    host = urlsplit(scheduler).hostname or ""
    if not contact.is_loopback(scheduler):
        return None
    return f"[{host}]" if ":" in host else host


def warn(worker: Worker, node: WorkerNode) -> None:
    """Report to the head that this machine may be taken soon, and have the running subnet send a checkpoint."""
    worker.log_event("idletrain", {"action": "at-risk", "worker": worker.address})
    node.checkpoint_now.set()


async def drain(worker: Worker, node: WorkerNode) -> None:
    """Take no more leases and wait until the running subnet is pushed."""
    worker.log_event("idletrain", {"action": "notice", "worker": worker.address})
    node.draining.set()
    while worker.state.executing_count:
        await asyncio.sleep(DRAIN_POLL_SECONDS)
    await asyncio.sleep(DRAIN_POLL_SECONDS)  # messages to the scheduler are batched: let the task's end go out first


def _end_hung() -> None:
    """End the process at once: a thread that hangs cannot be stopped. Whoever started the worker starts another."""
    logger.error("the head got no step from this worker for too long: its process ends, to be started again")
    os._exit(HUNG_EXIT)


def _on_sigterm(notice: asyncio.Event) -> None:
    if notice.is_set():
        os._exit(143)  # a second signal: exit at once, as by SIGKILL
    notice.set()


async def _check_version(scheduler: str, security: Security) -> None:
    try:
        head = await contact.ask(
            scheduler, security, "worker", lambda remote: remote.get_metadata(keys=["idletrain"], default=None)
        )
    except contact.CertificatesError as error:
        raise JobError(
            f"scheduler {scheduler} asks for TLS ({error}); name --tls-ca-file, --tls-cert and --tls-key"
        ) from None
    except contact.UnreachableError as error:
        raise RunError(
            f"scheduler {scheduler} cannot be reached ({error}); check the address and that it runs"
        ) from None
    if head and head["version"] != version():
        raise RefusedError(
            f"the head at {scheduler} runs idletrain {head['version']} and this worker {version()}; install the same"
        )


def security_from(ca_file: Path | None, cert: Path | None, key: Path | None) -> Security:
    """Return the cluster's certificates from files, or Dask's own configuration when none are given.

    Raises:
        JobError: only some of them are given.
    """
    files = {"--tls-ca-file": ca_file, "--tls-cert": cert, "--tls-key": key}
    missing = [option for option, file in files.items() if file is None]
    if len(missing) == len(files):
        return Security()
    if missing:
        raise JobError([f"{option}: is missing; TLS needs all of {', '.join(files)}" for option in missing])
    return Security(
        tls_ca_file=str(ca_file), tls_worker_cert=str(cert), tls_worker_key=str(key), require_encryption=True
    )
