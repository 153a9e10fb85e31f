"""The parameter store's server: Dask's comm layer, with the cluster's own certificates.

Payloads are numpy frames that are never unpickled; the backend decides what may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from distributed.comm.addressing import unparse_host_port
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
    Activity,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    push_header,
)


class StoreBackend(Protocol):
    """The owner of the network: answers workers' requests."""

    def program(self) -> bytes:
        """Return the pickled program, for workers."""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """Return the step to continue from and `[start:stop]` of the flat buffer, of step `at` if given; or why not."""

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """Accept an update or a progress checkpoint, from the parts held if there are no frames; return once it is
        durable (a checkpoint, or an update in lockstep before all members have theirs: once it is held).
        """

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """Return when a payload of `size` bytes in any order may be accepted; or why it may not be sent."""

    def part_arrived(self, header: PushHeader, content: memoryview, pieces: NDArray[np.bool_], piece: int) -> bool:
        """Note which pieces, of `piece` bytes each, have arrived of a payload whose bytes are in their places; return
        False if the rest is no longer needed, because the round continued without it.
        """

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        """Accept the rows that were missing of an earlier round's update (`Receipt.missing`), one behind the other, and
        make them durable.
        """

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """Hold a part of a payload, from byte `start` on, until its push; return ENOUGH if the rest is not needed now.
        The header's checksum is not the payload's.
        """

    def stream_position(self, lease: LeaseId) -> str | Reply:
        """Return how far the subnet's part of a stream was read when an attempt at it began, as text, or "" where that
        is not known; or why not.
        """

    def beat(self, lease: LeaseId, steps: int, doing: Activity) -> Reply:
        """Extend a lease; return HUNG if its worker is to restart."""

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        """Return the lockstep group once all members have joined, each with the steps that it can continue from and why
        the last group failed, if it did; or why this member may not continue.
        """


class StoreServer:
    """Serves the network of a backend on one address.

    Args:
        backend: Answers the requests.
        security: The cluster's certificates.
        admission: Returns a new queue that limits concurrent payloads; called once a direction.

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
            "program": self._program,
            "pull": self._pull,
            "release_pull": self._release_pull,
            "admit_push": self._admit_push,
            "push": self._push,
            "part": self._part,
            "open_datagrams": self._open_datagrams,
            "push_datagrams": self._push_datagrams,
            "late_rows": self._late_rows,
            "stream_position": self._stream_position,
            "beat": self._beat,
            "join": self._join,
        }
        # deserialize=False: payloads stay frames. Dask may unpickle other fields of a message, so beyond one machine
        # only holders of the cluster's certificates can send one.
        self._server = Server(handlers, deserialize=False)

    async def listen(self, host: str) -> str:
        """Start to serve on a free port of `host`; return the address."""
        scheme = "tls" if self._security.require_encryption or self._security.tls_scheduler_cert else "tcp"
        await self._server.listen(
            f"{scheme}://{unparse_host_port(host, 0)}", **self._security.get_listen_args("scheduler")
        )
        self._host = host
        address: str = self._server.address
        return address

    def worker_left(self, worker: str) -> None:
        """End the datagram session of a worker that is gone."""
        self._datagram_server.worker_left(worker)

    def attempt_ended(self, lease: LeaseId) -> None:
        """Free the admission slots of an attempt that has ended."""
        for queue in (self._pulls, self._pushes):
            queue.cancel(holder_of(lease))

    async def close(self) -> None:
        """Stop serving."""
        await self._server.close()
        await self._datagram_server.close()

    def _program(self) -> Any:
        return {"program": self._backend.program()}

    async def _admit_push(self, holder: str, urgent: bool = False) -> Any:
        """Wait until a push may begin; its slot is freed when its last byte is here."""
        await self._pushes.acquire(holder, urgent=urgent)
        return {}

    def _release_pull(self, holder: str, size: int) -> Any:
        """Free the slot of a pull that has arrived at the worker."""
        self._pulls.transferred(holder, size)
        self._pulls.release(holder)
        return {}

    async def _open_datagrams(self, worker: str) -> Any:
        return await self._datagram_server.open(worker, self._host)

    async def _pull(
        self,
        lease: dict[str, Any],
        start: int,
        stop: int | None,
        at: int | None,
        transfer_id: Sequence[int] | None = None,
    ) -> Any:
        lease_id = LeaseId(**lease)
        answer = await self._backend.pull(lease_id, start, stop, at)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        step, part = answer
        self.bytes_down += part.nbytes
        fields = {"reply": Reply.ACCEPTED.value, "step": step}
        if transfer_id is None:
            large = part.nbytes > ADMISSION_BYTES
            if large:
                await self._pulls.acquire(holder_of(lease_id), HOLDER_SILENCE_SECONDS + part.nbytes / MIN_RATE)
            return {**fields, "flat": to_serialize(part.numpy()), "admitted": large}
        self._datagram_server.send(transfer_id, part)
        return {**fields, "size": part.nbytes, "coded": part.dtype == torch.uint8}

    async def _late_rows(self, lease: dict[str, Any], flat: Serialized) -> Any:
        lease_id = LeaseId(**lease)
        self._pushes.release(holder_of(lease_id))  # its bytes are here
        return {"reply": (await self._backend.late_rows(lease_id, self._received(flat))).value}

    def _part(self, header: dict[str, Any], start: int, flat: Serialized) -> Any:
        pushed, frames = push_header(header), self._received(flat)
        self._pushes.transferred(holder_of(pushed.lease), sum(map(len, frames)))
        reply = self._backend.part(pushed, start, frames)
        if reply not in (Reply.ACCEPTED, Reply.ENOUGH):
            self._pushes.release(holder_of(pushed.lease))
        return {"reply": reply.value}

    async def _push(self, header: dict[str, Any], flat: Serialized) -> Any:
        pushed, frames = push_header(header), self._received(flat)
        self._pushes.release(holder_of(pushed.lease))  # its bytes are here
        return _answer(await self._backend.push(pushed, frames))

    async def _push_datagrams(self, header: dict[str, Any], size: int, transfer_id: Sequence[int]) -> Any:
        """Accept a push whose payload arrives in datagrams, once it is complete or complete enough."""
        pushed = push_header(header)
        if receipt := self._datagram_server.receipt(transfer_id):  # requested again, because the answer was lost
            return _answer(receipt)
        rule = self._backend.expect(pushed, size)
        if rule in LATE_ROWS_REPLIES:
            return _answer(await self._backend.push(pushed, []))
        if isinstance(rule, Reply):
            return _answer(Receipt(rule))

        def on_pieces(received: ReceivedPayload) -> bool:
            return self._backend.part_arrived(pushed, memoryview(received.content), received.received, PAYLOAD)

        try:
            received = await self._datagram_server.receive(transfer_id, size, rule, on_pieces)
        except PeerSilentError as silence:
            return {**_answer(Receipt(Reply.ACCEPTED)), "silent": str(silence)}
        self.bytes_up += min(len(received.content), PAYLOAD * int(received.received.sum()))
        whole = [memoryview(received.content)] if received.received.all() else []
        receipt = await self._backend.push(pushed, whole)
        self._datagram_server.keep_receipt(transfer_id, receipt)
        return _answer(receipt)

    def _received(self, flat: Serialized) -> list[memoryview]:
        frames = [memoryview(frame).cast("B") for frame in flat.frames if len(frame)]
        self.bytes_up += sum(len(frame) for frame in frames)
        return frames

    def _stream_position(self, lease: dict[str, Any]) -> Any:
        answer = self._backend.stream_position(LeaseId(**lease))
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        return {"reply": Reply.ACCEPTED.value, "position": answer}

    def _beat(self, lease: dict[str, Any], steps: int, doing: Activity) -> Any:
        return {"reply": self._backend.beat(LeaseId(**lease), steps, doing).value}

    async def _join(self, lease: dict[str, Any], address: str, steps: Sequence[int], why: str) -> Any:
        answer = await self._backend.join(LeaseId(**lease), address, steps, why)
        if isinstance(answer, Reply):
            return {"reply": answer.value}
        return {"reply": Reply.ACCEPTED.value, **asdict(answer)}


def _answer(receipt: Receipt) -> dict[str, Any]:
    return {"reply": receipt.reply.value, "missing": receipt.missing, "silent": ""}
