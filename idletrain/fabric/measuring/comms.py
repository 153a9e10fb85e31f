"""Time Dask's comm layer between two nodes, with and without TLS, and idletrain's own exchange on top of it.

Pulls and pushes go through the `StoreServer` and `StoreClient` of a run, checksum and inspection included. A run also
writes each push to disk, which is left out here: that is the head's disk and not the network.
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
    Activity,
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
    """A store backend that serves as many random values as a lease asks for, and accepts every whole push."""

    def __init__(self, token: str) -> None:
        self._token, self._flat, self._parts = token, torch.empty(0), Parts()

    def program(self) -> bytes:
        """See `StoreBackend`."""
        return b""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """See `StoreBackend`; the lease's round number is the number of values."""
        if lease.run != self._token:
            return Reply.NOT_LEASED
        if len(self._flat) != lease.round:
            self._flat = torch.rand(lease.round)
        return at or 0, self._flat[start:stop]

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """See `StoreBackend`."""
        attempt, size = header.lease.attempt, 4 * header.lease.round
        held = header.lease.run == self._token and self._parts.hold(attempt, (1, True), start, frames, size)
        return Reply.ACCEPTED if held else Reply.NOT_LEASED

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `StoreBackend`."""
        if header.lease.run != self._token:
            return Receipt(Reply.NOT_LEASED)
        frames = frames or self._parts.payload(header.lease.attempt, (1, True))
        self._parts.drop(header.lease.attempt)
        fault = await asyncio.to_thread(inspect, header, frames, 4 * header.lease.round)
        return Receipt(fault or await asyncio.to_thread(inspect_values, frames) or Reply.ACCEPTED)

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """See `StoreBackend`."""
        return AcceptanceRule(size, 1.0) if header.lease.run == self._token else Reply.NOT_LEASED

    def part_arrived(self, *_: object) -> bool:
        """See `StoreBackend`; only whole payloads are of use here."""
        return True

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:  # noqa: ARG002
        """See `StoreBackend`; no row is ever late here."""
        return Reply.NOT_LEASED

    def stream_position(self, lease: LeaseId) -> str | Reply:  # noqa: ARG002
        """See `StoreBackend`; no stream is read here."""
        return ""

    def beat(self, lease: LeaseId, steps: int, doing: Activity) -> Reply:  # noqa: ARG002
        """See `StoreBackend`."""
        return Reply.ACCEPTED

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:  # noqa: ARG002
        """See `StoreBackend`; nothing here trains in lockstep."""
        return Reply.STALE_ROUND


class Sink:
    """A Dask server that receives arrays and returns their bytes."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._server = Server({"take": self._take})

    async def listen(self, host: str, security: Security, *, secure: bool) -> str:
        """Start to serve on a free port; return the address."""
        scheme, args = ("tls", security.get_listen_args("worker")) if secure else ("tcp", {})
        await self._server.listen(f"{scheme}://{host}:0", **args)
        return str(self._server.address)

    async def close(self) -> None:
        """Stop serving."""
        await self._server.close()

    def _take(self, token: str, content: Any) -> int:
        if token != self._token:
            raise PermissionError("another measurement's token")
        return int(np.asarray(content).nbytes)


async def sent(address: str, security: Security | None, token: str, size: int, repeats: int) -> Stream:
    """Send `repeats` arrays of `size` bytes over Dask's comm layer.

    Raises:
        OSError: The node cannot be reached.
    """
    args = security.get_connection_args("worker") if security else {}
    content = np.random.default_rng(0).random(size // 8)
    async with rpc(address, timeout=SOCKET_CONNECT_SECONDS, connection_args=args) as sink:

        async def send() -> None:
            await sink.take(token=token, content=to_serialize(content))

        return await _repeated(send, content.nbytes, repeats)


async def pulled(address: str, security: Security, token: str, size: int, repeats: int) -> Stream:
    """Pull `size` bytes `repeats` times, as a run's worker does.

    Raises:
        OSError: The node cannot be reached.
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
    """Push `size` bytes `repeats` times as a run's worker does, from the checksum to the reply.

    Raises:
        OSError: The node cannot be reached.
    """
    client = StoreClient(address, security.get_connection_args("worker"))
    lease, flat = _own_lease(token, size), torch.rand(size // 4)

    async def push() -> None:
        digest = await asyncio.to_thread(checksum, [flat.numpy().data.cast("B")])
        receipt = await client.push(PushHeader(lease, 1, 0.0, digest), flat)
        if receipt.reply is not Reply.ACCEPTED:
            raise ConnectionError(f"the store refused a push ({receipt.reply.value})")

    try:
        return await _repeated(push, size, repeats)
    finally:
        await client.close()


def _own_lease(token: str, size: int) -> LeaseId:
    """Return a lease with a random attempt number: the store keys large pushes and its queue by attempt."""
    return LeaseId(token, 1, size // 4, 0, secrets.randbits(31))


async def _repeated(move: Callable[[], Awaitable[None]], size: int, repeats: int) -> Stream:
    """Move `size` bytes again and again; the first time opens the connection and is not counted."""
    rates = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        await move()
        rates.append(size / (time.perf_counter() - started))
    return Stream(tuple(rates[1:]), size * len(rates))


def _listening(security: Security) -> Security:
    """Return security for a server like a head's: a worker has only a worker's certificate, so listen with that."""
    if security.tls_scheduler_cert or not security.tls_worker_cert:
        return security
    return Security(
        require_encryption=security.require_encryption,
        tls_ca_file=security.tls_ca_file,
        tls_scheduler_cert=security.tls_worker_cert,
        tls_scheduler_key=security.tls_worker_key,
    )


class ProbeServers:
    """A node's servers: sinks of Dask's comm layer, and a store.

    Attributes:
        addresses: Their addresses, by purpose (`dask`, `dask tls`, `store`).
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
            host: IP address to listen on.
            cluster: The cluster's own security, which the store listens with as a run's does.
            temporary: Certificates of this measurement alone, for a sink over TLS; None for no such sink.
            plain: Whether to open a sink without TLS, too. Dask unpickles what it receives, so only where none but
                the cluster's nodes can connect.
        """
        for transport in (*(("dask",) if plain else ()), *(("dask tls",) if temporary else ())):
            sink = Sink(self._token)  # a server belongs to the event loop that it is created on
            self._sinks.append(sink)
            self.addresses[transport] = await sink.listen(host, temporary or cluster, secure=transport == "dask tls")
        self._store = StoreServer(FixedBackend(self._token), _listening(cluster))
        self.addresses["store"] = await self._store.listen(host)

    async def close(self) -> None:
        """Stop serving."""
        for sink in self._sinks:
            await sink.close()
        if self._store:
            await self._store.close()
