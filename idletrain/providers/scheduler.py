"""Provide the workers of a Dask cluster that runs already."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from distributed.security import Security

from idletrain.cluster import contact
from idletrain.cluster.dask_scheduler import DASHBOARD_PORT
from idletrain.errors import JobError
from idletrain.job import Job
from idletrain.providers.protocol import LaunchRequest


class RunningCluster:
    """A cluster that belongs to the caller, such as a head node's own; see `WorkerProvider`.

    Args:
        address: Its scheduler's address.
        security: How to connect to it.
    """

    scheduler: str | None = None
    measurable = False
    dashboard_port: int | None = DASHBOARD_PORT

    def __init__(self, address: str, security: Security) -> None:
        self._address, self._security = address, security

    def faults(self, _job: Job) -> list[str]:
        return []

    async def check(self) -> None:
        """Do nothing: the caller started it."""

    @contextlib.asynccontextmanager
    async def cluster(self, _job: Job, _record: Callable[..., None]) -> AsyncIterator[tuple[str, Security]]:
        """Yield the address and the security; leave the cluster as it is."""
        yield self._address, self._security


class ExistingScheduler(RunningCluster):
    """A Dask cluster of the user's, with the certificates that Dask's configuration names; see `WorkerProvider`."""

    measurable = True
    dashboard_port: int | None = None

    def __init__(self, request: LaunchRequest) -> None:
        super().__init__(request.scheduler or "", Security())
        self.scheduler = request.scheduler or ""
        self._request = request

    def faults(self, _job: Job) -> list[str]:
        faults = [*address_faults(self._address), *self._request.cloud_faults]
        if self._request.churn_seconds:
            faults.append("--churn: takes workers on this machine; leave it out with --scheduler")
        return faults

    async def check(self) -> None:
        await check_reachable(self._address)


async def check_reachable(address: str) -> dict[str, Any]:
    """Connect to a scheduler once; return its identity as Dask reports it.

    Raises:
        JobError: it is not there, or asks for certificates.
    """
    if faults := address_faults(address):
        raise JobError(faults)
    try:
        identity: dict[str, Any] = await contact.ask(address, Security(), "client", lambda remote: remote.identity())
    except contact.CertificatesError as error:
        raise JobError(
            f"--scheduler: {address} asks for TLS ({error}); name the client's certificates in Dask's configuration, "
            "distributed.comm.tls"
        ) from None
    except contact.UnreachableError as error:
        raise JobError(
            f"--scheduler: {address} cannot be reached ({error}); check the address and that the scheduler runs"
        ) from None
    return identity


def address_faults(address: str) -> list[str]:
    """Return a sentence if an address is malformed, or on another machine without TLS."""
    if not contact.is_address(address):
        text = contact.shown(repr(address))
        return [f"--scheduler: {text} should be tcp://HOST:PORT on this machine or tls://HOST:PORT"]
    if address.startswith("tcp://") and not contact.is_loopback(address):
        text = f"{contact.shown(address)} is on another machine without TLS"
        return [f"--scheduler: {text}; use a tls:// address and Dask's certificates"]
    return []
