"""A worker's side of the exchange."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import torch
from distributed.core import rpc
from distributed.protocol import to_serialize
from distributed.utils import get_ip
from torch import Tensor

from idletrain.errors import RefusedError
from idletrain.exchange.admission import ADMISSION_BYTES, holder_of
from idletrain.exchange.datagram.session import DatagramSession
from idletrain.exchange.datagram.transfer import PeerSilentError
from idletrain.exchange.messages import (
    Activity,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    as_message,
)
from idletrain.exchange.ordered_requests import ordered_requests
from idletrain.exchange.parted_push import PartedPush, PushRate

logger = logging.getLogger(__name__)
RESENDS = 3  # sends from one byte on; a connection that breaks three times in a row is the lease's business
RESEND_PAUSE_SECONDS = 0.5
DATAGRAM_BYTES = 1 << 13  # a smaller payload travels in the call itself
STORE_CONNECT_SECONDS = 5.0  # workers of a dead head must not wait Dask's 30 s a try: the next head needs them


class StoreClient:
    """Exchanges payloads with one store, over connections that stay open.

    Args:
        address: The store's `tcp://` or `tls://` address.
        connection_args: The cluster's TLS arguments, from `Security.get_connection_args("worker")`.
        worker: This worker's own address, by which the store ends its session when it is gone.
    """

    def __init__(self, address: str, connection_args: dict[str, Any], worker: str = "") -> None:
        self._rpc = rpc(address, timeout=STORE_CONNECT_SECONDS, connection_args=connection_args)
        self._worker = worker or uuid.uuid4().hex
        self._session: DatagramSession | None = None
        self._push_rate = PushRate()

    async def program(self) -> bytes:
        """Return the pickled program of the run.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        with _link():
            content: bytes = (await self._rpc.program())["program"]
        return content

    async def pull(
        self, lease: LeaseId, start: int = 0, stop: int | None = None, *, at: int | None = None
    ) -> tuple[int, Tensor]:
        """Return the step to continue from, and the subnet's flat buffer or a part of it, writable.

        Args:
            lease: The lease of the subnet.
            start: First value of the part.
            stop: End of the part; None for the buffer's end.
            at: The step whose values to return, 0 for the round's initial values; the latest if None.

        Raises:
            RefusedError: the lease is no longer valid.
            ConnectionError: the store cannot be reached.
        """
        session = self._session
        transfer_id = session.new_transfer() if session else None
        with _link():
            answer = await self._rpc.pull(
                lease=as_message(lease), start=start, stop=stop, at=at, transfer_id=transfer_id
            )
        if answer.get("admitted"):
            await self._release_pull(holder_of(lease), answer["flat"].nbytes)
        if answer["reply"] != Reply.ACCEPTED:
            raise RefusedError(f"pull of subnet {lease.subnet}, round {lease.round}: {answer['reply']}")
        if session is None or transfer_id is None:
            return answer["step"], torch.from_numpy(answer["flat"])
        try:
            content = await session.receive(transfer_id, answer["size"])
        except PeerSilentError as silence:
            await self._fall_back_to_tcp(silence)
            return await self.pull(lease, start, stop, at=at)
        dtype = torch.uint8 if answer["coded"] else torch.float32
        return answer["step"], torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)

    async def _release_pull(self, holder: str, size: int) -> None:
        """Free a pull's slot, without an answer; one that is not freed is lost after a while (`pull` there)."""
        with contextlib.suppress(OSError):
            await self._rpc.release_pull(holder=holder, size=size, reply=False)

    @property
    def transport(self) -> str:
        """The transport of large payloads: `tcp` or `udp`."""
        return "tcp" if self._session is None else "udp"

    async def use_datagrams(self) -> None:
        """Send payloads over UDP from now on, if datagrams get through.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        host = get_ip(self._rpc.address.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]"))
        with _link():
            self._session = await DatagramSession.open(lambda: self._rpc.open_datagrams(worker=self._worker), host)
        if self._session is None:
            logger.warning("no datagram from the store at %s got through: payloads travel over TCP", self._rpc.address)

    async def _fall_back_to_tcp(self, silence: PeerSilentError) -> None:
        logger.warning("datagrams no longer get through (%s): payloads travel over TCP", silence)
        session, self._session = self._session, None
        if session:
            await session.close()

    async def push(
        self, header: PushHeader, payload: Tensor | None, prompt: int = 0, *, urgent: bool = False
    ) -> Receipt:
        """Send an update or a progress checkpoint; send it again, with the same header, when the connection breaks.

        A large payload goes in parts, from its beginning on: the store can use the first parts of an update as whole
        numbers (`Codec`) even if the worker dies before the rest.

        Args:
            header: Describes the payload.
            payload: The values or bytes; None if they were sent in parts.
            prompt: How many bytes, from the first on, go in the better traffic class.
            urgent: Skip the queue of pushes, because the worker is about to be taken.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        content = (torch.empty(0) if payload is None else payload).view(torch.uint8)
        if self._session and len(content) > DATAGRAM_BYTES:
            receipt = await self._push_datagrams(self._session, header, content, prompt)
            if receipt:
                return receipt
        if len(content) > ADMISSION_BYTES:
            coded = payload is not None and payload.dtype == torch.uint8
            pushed = PartedPush(header, content, None if coded else self._push_rate, urgent=urgent)
            answer = await self._send_with_retries(lambda: self._send_parts(pushed), lambda: pushed.arrived)
        else:
            frames = to_serialize(content.numpy())
            answer = await self._send_with_retries(lambda: self._rpc.push(header=as_message(header), flat=frames))
        return Receipt(Reply(answer["reply"]), answer["missing"])

    async def late_rows(self, lease: LeaseId, rows: Tensor) -> Reply:
        """Send the rows that were missing of an update, one behind the other.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        if len(rows) > ADMISSION_BYTES:
            await self._send_with_retries(lambda: self._rpc.admit_push(holder=holder_of(lease)))
        frames, fields = to_serialize(rows.numpy()), as_message(lease)
        answer = await self._send_with_retries(lambda: self._rpc.late_rows(lease=fields, flat=frames))
        return Reply(answer["reply"])

    async def _push_datagrams(
        self, session: DatagramSession, header: PushHeader, content: Tensor, prompt: int
    ) -> Receipt | None:
        """Send over UDP while the store waits for the payload; return None if datagrams do not get through."""
        transfer_id, fields = session.new_transfer(), as_message(header)
        sending = asyncio.create_task(session.send(transfer_id, content.numpy().data, prompt))
        answering = asyncio.create_task(
            self._send_with_retries(
                lambda: self._rpc.push_datagrams(header=fields, size=len(content), transfer_id=transfer_id)
            )
        )
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await sending
            answer = await answering
            if not answer["silent"]:
                return Receipt(Reply(answer["reply"]), answer["missing"])
            silence = PeerSilentError(answer["silent"])
        except PeerSilentError as error:
            silence = error
        finally:
            for task in (sending, answering):
                task.cancel()
            session.drop(transfer_id)
        await self._fall_back_to_tcp(silence)
        return None

    async def part(self, header: PushHeader, start: int, content: Tensor) -> Reply:
        """Send a part, from byte `start` on, of a payload that will be pushed with this header (but for its checksum);
        send it again when the connection breaks.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        part = to_serialize(content.view(torch.uint8).numpy())
        answer = await self._send_with_retries(
            lambda: self._rpc.part(header=as_message(header), start=start, flat=part)
        )
        return Reply(answer["reply"])

    async def _send_parts(self, pushed: PartedPush) -> dict[str, Any]:
        async with ordered_requests(self._rpc) as requests:
            return await pushed.send(requests)

    async def _send_with_retries(
        self, send: Callable[[], Awaitable[dict[str, Any]]], arrived: Callable[[], int] = lambda: 0
    ) -> dict[str, Any]:
        """Return the answer to what is sent, again if the connection breaks: until it has broken three times without
        that more has arrived.
        """
        before, broken = arrived(), 0
        while True:
            try:
                with _link():
                    return await send()
            except ConnectionError:
                broken = 1 if arrived() > before else broken + 1
                before = arrived()
                if broken == RESENDS:
                    raise
                await asyncio.sleep(RESEND_PAUSE_SECONDS)

    async def stream_position(self, lease: LeaseId) -> str:
        """Return how far the subnet's part of a stream was read, as text; "" where that is not known.

        Raises:
            RefusedError: the lease is no longer valid.
            ConnectionError: the store cannot be reached.
        """
        with _link():
            answer = await self._rpc.stream_position(lease=as_message(lease))
        if answer["reply"] != Reply.ACCEPTED:
            raise RefusedError(f"stream of subnet {lease.subnet}, round {lease.round}: {answer['reply']}")
        position: str = answer["position"]
        return position

    async def beat(self, lease: LeaseId, steps: int, doing: Activity) -> Reply:
        """Report that the lease's subnet is being trained, how many steps it has and what is done now.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        with _link():
            answer = await self._rpc.beat(lease=as_message(lease), steps=steps, doing=doing)
        return Reply(answer["reply"])

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str = "") -> LockstepGroup | Reply:
        """Wait for the other members of a lockstep group; return the group, or why there is none.

        Args:
            lease: This member's.
            address: Where other members reach this worker.
            steps: Steps that this member can continue from.
            why: Why the last group failed, if it did.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        with _link():
            answer = await self._rpc.join(lease=as_message(lease), address=address, steps=list(steps), why=why)
        reply = Reply(answer.pop("reply"))
        return (
            reply if reply is not Reply.ACCEPTED else LockstepGroup(**{**answer, "members": tuple(answer["members"])})
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session:
            await self._session.close()
        for connection, is_idle in self._rpc.comms.items():
            if not is_idle:  # else its unsent bytes are waited for
                connection.abort()
        await self._rpc.close_rpc()


@contextlib.contextmanager
def _link() -> Iterator[None]:
    """Raise Dask's comm errors as ConnectionError: plain OSErrors might as well come from a user's data set."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"the parameter store: {error}") from error
