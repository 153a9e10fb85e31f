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

from idletrain.exchange.admission import LEAST_RATE, SILENT_SECONDS, TURN_BYTES, Turns, holder_of
from idletrain.exchange.datagram.endpoint import Received, SilentError
from idletrain.exchange.datagram.packet import PAYLOAD
from idletrain.exchange.datagram_server import Ways
from idletrain.exchange.messages import MAY_LACK, Bound, Gang, LeaseId, PushHeader, Receipt, Reply


class Head(Protocol):
    """What the store asks of whoever owns the network."""

    def program(self) -> bytes:
        """The pickled program, for workers."""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """The step to go on from and `[start:stop]` of the flat buffer (of step `at`, all); or why not."""

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """Take an update or a mark, of the parts that are held if there are no frames; returns once it is durable (a
        mark, or an update in lockstep before all have theirs: once it is held).
        """

    def expect(self, header: PushHeader, size: int) -> Bound | Reply:
        """What of a payload of so many bytes that comes in any order is enough; or why it may not come."""

    def came(self, header: PushHeader, content: memoryview, pieces: NDArray[np.bool_], piece: int) -> bool:
        """Which pieces, of so many bytes each, have come of a payload; its bytes in their places. False if no more of
        it needs to come, as the round went on without.
        """

    async def repair(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        """Take the rows that an update of an earlier round lacked (`Receipt.missing`), one behind the other, and make
        them durable.
        """

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """Hold a part of a payload, from its byte number `start` on, until the push that counts; ENOUGH if no more of
        it needs to come now. The header's checksum is not the payload's.
        """

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """Prolong a lease."""

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> Gang | Reply:
        """The gang of those that train in lockstep, once all have asked, each with the steps that it can go on from and
        why the last gang failed, if it did; or why it is not to go on.
        """


class Store:
    """Serves a head's network on one address.

    Args:
        head: Whose.
        security: The cluster's.
        turns: Makes what says who may send, a way each.

    Attributes:
        bytes_down: Payload bytes sent to workers.
        bytes_up: Payload bytes received.
    """

    def __init__(self, head: Head, security: Security, turns: Callable[[], Turns] = Turns) -> None:
        self._head, self._security = head, security
        self.bytes_down = self.bytes_up = 0
        self._host = ""
        self._ways = Ways()
        self._pulls, self._pushes = turns(), turns()
        handlers = {
            "turn": self._turn,
            "turned": self._turned,
            "datagrams": self._datagrams,
            "repair": self._repair,
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

    def left(self, worker: str) -> None:
        """A worker is gone: what was under way with it ends."""
        self._ways.left(worker)

    def over(self, lease: LeaseId) -> None:
        """An attempt has ended: nobody waits for its turns, or for the end of them."""
        for turns in (self._pulls, self._pushes):
            turns.leave(holder_of(lease))

    async def close(self) -> None:
        """Stop to serve."""
        await self._server.close()
        await self._ways.close()

    def _program(self) -> Any:
        return {"program": self._head.program()}

    async def _turn(self, holder: str, urgent: bool = False) -> Any:
        """A push may begin; its turn is over when its last byte is here."""
        await self._pushes.take(holder, urgent=urgent)
        return {}

    def _turned(self, holder: str, size: int) -> Any:
        """A pull has come."""
        self._pulls.moved(holder, size)
        self._pulls.give(holder)
        return {}

    async def _datagrams(self, worker: str) -> Any:
        return await self._ways.open(worker, self._host)

    async def _pull(
        self, lease: dict[str, Any], start: int, stop: int | None, at: int | None, way: Sequence[int] | None = None
    ) -> Any:
        whose = LeaseId(**lease)
        answer = await self._head.pull(whose, start, stop, at)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        step, part = answer
        self.bytes_down += part.nbytes
        told = {"reply": Reply.ACCEPTED.value, "step": step}
        if way is None:
            large = part.nbytes > TURN_BYTES
            if large:
                await self._pulls.take(holder_of(whose), SILENT_SECONDS + part.nbytes / LEAST_RATE)
            return {**told, "flat": to_serialize(part.numpy()), "turn": large}
        self._ways.send(way, part)
        return {**told, "size": part.nbytes, "coded": part.dtype == torch.uint8}

    async def _repair(self, lease: dict[str, Any], flat: Serialized) -> Any:
        whose = LeaseId(**lease)
        self._pushes.give(holder_of(whose))  # its bytes are here
        return {"reply": (await self._head.repair(whose, self._received(flat))).value}

    def _part(self, header: dict[str, Any], start: int, flat: Serialized) -> Any:
        told, frames = _header(header), self._received(flat)
        self._pushes.moved(holder_of(told.lease), sum(map(len, frames)))
        reply = self._head.part(told, start, frames)
        if reply not in (Reply.ACCEPTED, Reply.ENOUGH):
            self._pushes.give(holder_of(told.lease))
        return {"reply": reply.value}

    async def _push(self, header: dict[str, Any], flat: Serialized) -> Any:
        told, frames = _header(header), self._received(flat)
        self._pushes.give(holder_of(told.lease))  # its bytes are here
        return _answer(await self._head.push(told, frames))

    async def _scattered(self, header: dict[str, Any], size: int, way: Sequence[int]) -> Any:
        """A push whose payload comes in datagrams: all of it, or what is enough."""
        told = _header(header)
        if receipt := self._ways.answer(way):  # told again, as the answer did not come
            return _answer(receipt)
        bound = self._head.expect(told, size)
        if bound in MAY_LACK:
            return _answer(await self._head.push(told, []))
        if isinstance(bound, Reply):
            return _answer(Receipt(bound))

        def came(received: Received) -> bool:
            return self._head.came(told, memoryview(received.content), received.got, PAYLOAD)

        try:
            received = await self._ways.receive(way, size, bound, came)
        except SilentError as silence:
            return {**_answer(Receipt(Reply.ACCEPTED)), "silent": str(silence)}
        self.bytes_up += min(len(received.content), PAYLOAD * int(received.got.sum()))
        whole = [memoryview(received.content)] if received.got.all() else []
        receipt = await self._head.push(told, whole)
        self._ways.answered(way, receipt)
        return _answer(receipt)

    def _received(self, flat: Serialized) -> list[memoryview]:
        frames = [memoryview(frame).cast("B") for frame in flat.frames if len(frame)]
        self.bytes_up += sum(len(frame) for frame in frames)
        return frames

    def _beat(self, lease: dict[str, Any], steps: int) -> Any:
        return {"reply": self._head.beat(LeaseId(**lease), steps).value}

    async def _join(self, lease: dict[str, Any], address: str, steps: Sequence[int], why: str) -> Any:
        answer = await self._head.join(LeaseId(**lease), address, steps, why)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        return {"reply": Reply.ACCEPTED.value, **asdict(answer)}


def _answer(receipt: Receipt) -> dict[str, Any]:
    return {"reply": receipt.reply.value, "missing": receipt.missing, "silent": ""}


def _header(told: dict[str, Any]) -> PushHeader:
    return PushHeader(LeaseId(**told.pop("lease")), **told)
