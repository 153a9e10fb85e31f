"""The parameter store's server: Dask's comm layer, with the cluster's own certificates.

Payloads are numpy frames that are never unpickled; what may be written, the round manager decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from distributed.core import Server
from distributed.protocol import Serialized, to_serialize
from distributed.security import Security
from numpy.typing import NDArray
from torch import Tensor

from idletrain.exchange.admission import ADMISSION_BYTES, HOLDER_SILENCE_SECONDS, MIN_RATE, AdmissionQueue, holder_of
from idletrain.exchange.datagram.packet import PAYLOAD
from idletrain.exchange.datagram.transfer import PeerSilentError, ReceivedPayload
from idletrain.exchange.datagram_server import DatagramServer
from idletrain.exchange.messages import (
    LATE_ROWS_REPLIES,
    AcceptanceRule,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
)


class StoreBackend(Protocol):
    """What the store asks of whoever owns the network."""

    def program(self) -> bytes:
        """The pickled program, for workers."""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """The step to go on from and `[start:stop]` of the flat buffer (of step `at`, all); or why not."""

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """Take an update or a mark, of the parts that are held if there are no frames; returns once it is durable (a
        mark, or an update in lockstep before all have theirs: once it is held).
        """

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """What of a payload of so many bytes that comes in any order is enough; or why it may not come."""

    def part_arrived(self, header: PushHeader, content: memoryview, pieces: NDArray[np.bool_], piece: int) -> bool:
        """Which pieces, of so many bytes each, have come of a payload; its bytes in their places. False if no more of
        it needs to come, as the round went on without.
        """

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        """Take the rows that an update of an earlier round lacked (`Receipt.missing`), one behind the other, and make
        them durable.
        """

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """Hold a part of a payload, from its byte number `start` on, until the push that counts; ENOUGH if no more of
        it needs to come now. The header's checksum is not the payload's.
        """

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """Prolong a lease."""

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        """The gang of those that train in lockstep, once all have asked, each with the steps that it can go on from and
        why the last gang failed, if it did; or why it is not to go on.
        """


class StoreServer:
    """Serves a head's network on one address.

    Args:
        head: Whose.
        security: The cluster's.
        turns: Makes what says who may send, a way each.

    Attributes:
        bytes_down: Payload bytes sent to workers.
        bytes_up: Payload bytes received.
    """

    def __init__(
        self, backend: StoreBackend, security: Security, admission: Callable[[], AdmissionQueue] = AdmissionQueue
    ) -> None:
        self._backend, self._security = backend, security
        self.bytes_down = self.bytes_up = 0
        self._host = ""
        self._datagram_server = DatagramServer()
        self._pulls, self._pushes = admission(), admission()
        handlers = {
            "turn": self._admit,
            "turned": self._release_turn,
            "datagrams": self._datagrams,
            "late_rows": self._late_rows_arrived,
            "program": self._program,
            "pull": self._pull,
            "part": self._part,
            "push": self._push,
            "scattered": self._scattered,
            "beat": self._beat,
            "join": self._join,
        }
        # deserialize=False: payloads stay frames. Of a message's other words Dask may unpickle some, so beyond a
        # machine it takes the certificates of the cluster to send one.
        self._server = Server(handlers, deserialize=False)

    async def listen(self, host: str) -> str:
        """Start to serve on a free port of `host`; returns the address."""
        scheme = "tls" if self._security.require_encryption or self._security.tls_scheduler_cert else "tcp"
        await self._server.listen(f"{scheme}://{host}:0", **self._security.get_listen_args("scheduler"))
        self._host = host
        address: str = self._server.address
        return address

    def worker_left(self, worker: str) -> None:
        """A worker is gone: what was under way with it ends."""
        self._datagram_server.worker_left(worker)

    def attempt_ended(self, lease: LeaseId) -> None:
        """An attempt has ended: nobody waits for its turns, or for the end of them."""
        for turns in (self._pulls, self._pushes):
            turns.cancel(holder_of(lease))

    async def close(self) -> None:
        """Stop to serve."""
        await self._server.close()
        await self._datagram_server.close()

    def _program(self) -> Any:
        return {"program": self._backend.program()}

    async def _admit(self, holder: str, urgent: bool = False) -> Any:
        """A push may begin; its turn is over when its last byte is here."""
        await self._pushes.acquire(holder, urgent=urgent)
        return {}

    def _release_turn(self, holder: str, size: int) -> Any:
        """A pull has come."""
        self._pulls.transferred(holder, size)
        self._pulls.release(holder)
        return {}

    async def _datagrams(self, worker: str) -> Any:
        return await self._datagram_server.open(worker, self._host)

    async def _pull(
        self,
        lease: dict[str, Any],
        start: int,
        stop: int | None,
        at: int | None,
        transfer_id: Sequence[int] | None = None,
    ) -> Any:
        whose = LeaseId(**lease)
        answer = await self._backend.pull(whose, start, stop, at)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        step, part = answer
        self.bytes_down += part.nbytes
        told = {"reply": Reply.ACCEPTED.value, "step": step}
        if transfer_id is None:
            large = part.nbytes > ADMISSION_BYTES
            if large:
                await self._pulls.acquire(holder_of(whose), HOLDER_SILENCE_SECONDS + part.nbytes / MIN_RATE)
            return {**told, "flat": to_serialize(part.numpy()), "turn": large}
        self._datagram_server.send(transfer_id, part)
        return {**told, "size": part.nbytes, "coded": part.dtype == torch.uint8}

    async def _late_rows_arrived(self, lease: dict[str, Any], flat: Serialized) -> Any:
        whose = LeaseId(**lease)
        self._pushes.release(holder_of(whose))  # its bytes are here
        return {"reply": (await self._backend.late_rows(whose, self._received(flat))).value}

    def _part(self, header: dict[str, Any], start: int, flat: Serialized) -> Any:
        told, frames = _header(header), self._received(flat)
        self._pushes.transferred(holder_of(told.lease), sum(map(len, frames)))
        reply = self._backend.part(told, start, frames)
        if reply not in (Reply.ACCEPTED, Reply.ENOUGH):
            self._pushes.release(holder_of(told.lease))
        return {"reply": reply.value}

    async def _push(self, header: dict[str, Any], flat: Serialized) -> Any:
        told, frames = _header(header), self._received(flat)
        self._pushes.release(holder_of(told.lease))  # its bytes are here
        return _answer(await self._backend.push(told, frames))

    async def _scattered(self, header: dict[str, Any], size: int, transfer_id: Sequence[int]) -> Any:
        """A push whose payload comes in datagrams: all of it, or what is enough."""
        told = _header(header)
        if receipt := self._datagram_server.receipt(transfer_id):  # told again, as the answer did not come
            return _answer(receipt)
        bound = self._backend.expect(told, size)
        if bound in LATE_ROWS_REPLIES:
            return _answer(await self._backend.push(told, []))
        if isinstance(bound, Reply):
            return _answer(Receipt(bound))

        def came(received: ReceivedPayload) -> bool:
            return self._backend.part_arrived(told, memoryview(received.content), received.received, PAYLOAD)

        try:
            received = await self._datagram_server.receive(transfer_id, size, bound, came)
        except PeerSilentError as silence:
            return {**_answer(Receipt(Reply.ACCEPTED)), "silent": str(silence)}
        self.bytes_up += min(len(received.content), PAYLOAD * int(received.received.sum()))
        whole = [memoryview(received.content)] if received.received.all() else []
        receipt = await self._backend.push(told, whole)
        self._datagram_server.keep_receipt(transfer_id, receipt)
        return _answer(receipt)

    def _received(self, flat: Serialized) -> list[memoryview]:
        frames = [memoryview(frame).cast("B") for frame in flat.frames if len(frame)]
        self.bytes_up += sum(len(frame) for frame in frames)
        return frames

    def _beat(self, lease: dict[str, Any], steps: int) -> Any:
        return {"reply": self._backend.beat(LeaseId(**lease), steps).value}

    async def _join(self, lease: dict[str, Any], address: str, steps: Sequence[int], why: str) -> Any:
        answer = await self._backend.join(LeaseId(**lease), address, steps, why)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        return {"reply": Reply.ACCEPTED.value, **asdict(answer)}


def _answer(receipt: Receipt) -> dict[str, Any]:
    return {"reply": receipt.reply.value, "missing": receipt.missing, "silent": ""}


def _header(fields: dict[str, Any]) -> PushHeader:
    return PushHeader(LeaseId(**fields.pop("lease")), **fields)
