"""The parameter store's server: Dask's comm layer, with the cluster's own certificates.

Payloads are numpy frames that are never unpickled; what may be written, the round manager decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from distributed.core import Server
from distributed.protocol import Serialized, to_serialize
from distributed.security import Security
from torch import Tensor

from idletrain.exchange.wire import Gang, LeaseId, PushHeader, Reply


class Head(Protocol):
    """What the store asks of whoever owns the network."""

    def program(self) -> bytes:
        """The pickled program, for workers."""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """The step to go on from and `[start:stop]` of the flat buffer (of step `at`, all); or why not."""

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Reply:
        """Take an update or a mark, of the parts that are held if there are no frames; returns once it is durable (a
        mark, or an update in lockstep before all have theirs: once it is held).
        """

    def part(self, lease: LeaseId, steps: int, train_seconds: float, start: int, frames: Sequence[memoryview]) -> Reply:
        """Hold a part of a payload, from its byte number `start` on, until the push that counts."""

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """Prolong a lease."""

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> Gang | Reply:
        """The gang of those that train in lockstep, once all have asked, each with the steps that it can go on from and
        why the last gang failed, if it did; or why it is not to go on.
        """


class Store:
    """Serves a head's network on one address.

    Attributes:
        bytes_down: Payload bytes sent to workers.
        bytes_up: Payload bytes received.
    """

    def __init__(self, head: Head, security: Security) -> None:
        self._head, self._security = head, security
        self.bytes_down = self.bytes_up = 0
        handlers = {
            "program": self._program,
            "pull": self._pull,
            "part": self._part,
            "push": self._push,
            "beat": self._beat,
            "join": self._join,
        }
        # deserialize=False: payloads stay frames; nothing that a peer sends is ever unpickled here.
        self._server = Server(handlers, deserialize=False)

    async def listen(self, host: str) -> str:
        """Start to serve on a free port of `host`; returns the address."""
        scheme = "tls" if self._security.require_encryption or self._security.tls_scheduler_cert else "tcp"
        await self._server.listen(f"{scheme}://{host}:0", **self._security.get_listen_args("scheduler"))
        address: str = self._server.address
        return address

    async def close(self) -> None:
        """Stop to serve."""
        await self._server.close()

    def _program(self) -> Any:
        return {"program": self._head.program()}

    async def _pull(self, lease: dict[str, Any], start: int, stop: int | None, at: int | None) -> Any:
        answer = await self._head.pull(LeaseId(**lease), start, stop, at)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        step, part = answer
        self.bytes_down += part.nbytes
        return {"reply": Reply.ACCEPTED.value, "step": step, "flat": to_serialize(part.numpy())}

    def _part(self, lease: dict[str, Any], steps: int, train_seconds: float, start: int, flat: Serialized) -> Any:
        reply = self._head.part(LeaseId(**lease), steps, train_seconds, start, self._received(flat))
        return {"reply": reply.value}

    async def _push(self, header: dict[str, Any], flat: Serialized) -> Any:
        lease = LeaseId(**header.pop("lease"))
        return {"reply": (await self._head.push(PushHeader(lease, **header), self._received(flat))).value}

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
