"""Dask's comm layer between two nodes, with and without TLS, and idletrain's own exchange on top of it.

Pulls and pushes go through the `Store` and `StoreClient` of rounds, checksum and inspection included; what rounds do
besides, the durable write of a push, is the head's disk and not the network.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from distributed.core import Server, rpc
from distributed.protocol import to_serialize
from distributed.security import Security
from torch import Tensor

from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import (
    AcceptanceRule,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    checksum,
    inspect,
    inspect_values,
)
from idletrain.exchange.parts import Parts
from idletrain.exchange.store import StoreServer
from idletrain.fabric.measuring.sockets import SOCKET_CONNECT_SECONDS, Stream


class FixedBackend:
    """A head that has as many random values as asked for, and takes what it is sent, whole."""

    def __init__(self, token: str) -> None:
        self._token, self._flat, self._parts = token, torch.empty(0), Parts()

    def program(self) -> bytes:
        """See `Head`."""
        return b""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """See `Head`; the lease's round says how many values."""
        if lease.run != self._token:
            return Reply.NOT_LEASED
        if len(self._flat) != lease.round:
            self._flat = torch.rand(lease.round)
        return at or 0, self._flat[start:stop]

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """See `Head`."""
        attempt, size = header.lease.attempt, 4 * header.lease.round
        held = header.lease.run == self._token and self._parts.hold(attempt, (1, True), start, frames, size)
        return Reply.ACCEPTED if held else Reply.NOT_LEASED

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `Head`."""
        if header.lease.run != self._token:
            return Receipt(Reply.NOT_LEASED)
        frames = frames or self._parts.payload(header.lease.attempt, (1, True))
        self._parts.drop(header.lease.attempt)
        fault = await asyncio.to_thread(inspect, header, frames, 4 * header.lease.round)
        return Receipt(fault or await asyncio.to_thread(inspect_values, frames) or Reply.ACCEPTED)

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """See `Head`."""
        return AcceptanceRule(size, 1.0) if header.lease.run == self._token else Reply.NOT_LEASED

    def part_arrived(self, *_: object) -> bool:
        """See `Head`; nothing is of use here before it is whole."""
        return True

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:  # noqa: ARG002
        """See `Head`; nothing here is ever lacking."""
        return Reply.NOT_LEASED

    def beat(self, lease: LeaseId, steps: int) -> Reply:  # noqa: ARG002
        """See `Head`."""
        return Reply.ACCEPTED

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:  # noqa: ARG002
        """See `Head`; nothing here trains in lockstep."""
        return Reply.STALE_ROUND


class Sink:
    """A Dask server that takes arrays."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._server = Server({"take": self._acquire})

    async def listen(self, host: str, security: Security, *, secure: bool) -> str:
        """Start to serve on a free port; returns the address."""
        scheme, args = ("tls", security.get_listen_args("worker")) if secure else ("tcp", {})
        await self._server.listen(f"{scheme}://{host}:0", **args)
        return str(self._server.address)

    async def close(self) -> None:
        """Serve no more."""
        await self._server.close()

    def _acquire(self, token: str, content: Any) -> int:
        if token != self._token:
            raise PermissionError("another measurement's token")
        return int(np.asarray(content).nbytes)


async def sent(address: str, security: Security | None, token: str, size: int, repeats: int) -> Stream:
    """Arrays over Dask's comm layer.

    Raises:
        OSError: there is no way to the sink.
    """
    args = security.get_connection_args("worker") if security else {}
    content = np.random.default_rng(0).random(size // 8)
    async with rpc(address, timeout=SOCKET_CONNECT_SECONDS, connection_args=args) as sink:

        async def send() -> None:
            await sink.take(token=token, content=to_serialize(content))

        return await _repeated(send, content.nbytes, repeats)


async def pulled(address: str, security: Security, token: str, size: int, repeats: int) -> Stream:
    """Pulls as a round's worker does them.

    Raises:
        OSError: there is no way to the store.
    """
    client = StoreClient(address, security.get_connection_args("worker"))
    lease = _own_lease(token, size)

    async def pull() -> None:
        await client.pull(lease)

    try:
        return await _repeated(pull, size, repeats)
    finally:
        await client.close()


async def pushed(address: str, security: Security, token: str, size: int, repeats: int) -> Stream:
    """Pushes as a round's worker does them, from the checksum to the answer.

    Raises:
        OSError: there is no way to the store.
    """
    client = StoreClient(address, security.get_connection_args("worker"))
    lease, flat = _own_lease(token, size), torch.rand(size // 4)

    async def push() -> None:
        digest = await asyncio.to_thread(checksum, [flat.numpy().data.cast("B")])
        receipt = await client.push(PushHeader(lease, 1, 0.0, digest), flat)
        if receipt.reply is not Reply.ACCEPTED:
            raise ConnectionError(f"a push came as {receipt.reply.value}")

    try:
        return await _repeated(push, size, repeats)
    finally:
        await client.close()


def _own_lease(token: str, size: int) -> LeaseId:
    """No two nodes may have the same: by attempt large pushes are put together, and turns are given out."""
    return LeaseId(token, 1, size // 4, 0, secrets.randbits(31))


async def _repeated(move: Callable[[], Awaitable[None]], size: int, repeats: int) -> Stream:
    """Move so many bytes again and again; the first time opens the connection."""
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        await move()
        rates.append(size / (time.perf_counter() - started))
    return Stream(tuple(rates[1:]), size * len(rates))


def _listening(security: Security) -> Security:
    """The same for who listens as a head does: a worker's certificates are a worker's alone."""
    if security.tls_scheduler_cert or not security.tls_worker_cert:
        return security
    return Security(
        require_encryption=security.require_encryption,
        tls_ca_file=security.tls_ca_file,
        tls_scheduler_cert=security.tls_worker_cert,
        tls_scheduler_key=security.tls_worker_key,
    )


class ProbeServers:
    """A node's servers: sinks and a store.

    Attributes:
        addresses: By what they are for.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._sinks: list[Sink] = []
        self._store: StoreServer | None = None
        self.addresses: dict[str, str] = {}

    async def open(
        self, host: str, cluster: Security, temporary: Security | None = None, *, plain: bool = False
    ) -> None:
        """Listen on free ports.

        Args:
            host: Where.
            cluster: The cluster's own security, which the store listens with as a run's does.
            temporary: Certificates of this measurement alone, for a sink over TLS; there is none without.
            plain: Whether there is a sink without TLS, too: Dask unpickles what comes, so not where others may call.
        """
        for over in (*(("dask",) if plain else ()), *(("dask tls",) if temporary else ())):
            sink = Sink(self._token)  # a server belongs to the event loop that it is made on
            self._sinks.append(sink)
            self.addresses[over] = await sink.listen(host, temporary or cluster, secure=over == "dask tls")
        self._store = StoreServer(FixedBackend(self._token), _listening(cluster))
        self.addresses["store"] = await self._store.listen(host)

    async def close(self) -> None:
        """Serve no more."""
        for sink in self._sinks:
            await sink.close()
        if self._store:
            await self._store.close()
