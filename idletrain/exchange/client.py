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
    LATE_ROWS_REPLIES,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    as_message,
)

logger = logging.getLogger(__name__)
RESENDS = 3  # sends of one push; a connection that breaks three times in a row is the lease's business
RESEND_PAUSE_SECONDS = 0.5
PART_BYTES = 1 << 18  # 20 ms of a link of 100 Mbit/s
DATAGRAM_BYTES = 1 << 13  # below, a call is all it takes
PARTS_AT_ONCE = 2  # the link does not wait for answers
STORE_CONNECT_SECONDS = 5.0  # a dead head must not hold its zombies for Dask's 30 s a try: the next head needs them


class StoreClient:
    """Talks to one store over connections that are kept open.

    Args:
        address: The store's `tcp://` or `tls://` address.
        connection_args: The cluster's TLS arguments, from `Security.get_connection_args("worker")`.
        worker: This worker's own address, by which the store knows when it is gone.
    """

    def __init__(self, address: str, connection_args: dict[str, Any], worker: str = "") -> None:
        self._rpc = rpc(address, timeout=STORE_CONNECT_SECONDS, connection_args=connection_args)
        self._worker = worker or uuid.uuid4().hex
        self._session: DatagramSession | None = None

    async def program(self) -> bytes:
        """The pickled program of the run.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        with _link():
            content: bytes = (await self._rpc.program())["program"]
        return content

    async def pull(
        self, lease: LeaseId, start: int = 0, stop: int | None = None, *, at: int | None = None
    ) -> tuple[int, Tensor]:
        """The step to go on from, and the flat buffer or a part of it, writable.

        Args:
            lease: Whose.
            start: Of the part.
            stop: Of the part, None for the buffer's end.
            at: Not the latest step but this one, 0 for what the round began with.

        Raises:
            RefusedError: the lease is not ours any more.
            ConnectionError: the store cannot be reached.
        """
        session = self._session
        way = session.new_transfer() if session else None
        with _link():
            answer = await self._rpc.pull(lease=as_message(lease), start=start, stop=stop, at=at, transfer_id=way)
            if answer.get("turn"):
                await self._rpc.turned(holder=holder_of(lease), size=answer["flat"].nbytes)
        if answer["reply"] != Reply.ACCEPTED:
            raise RefusedError(f"pull of subnet {lease.subnet}, round {lease.round}: {answer['reply']}")
        if session is None or way is None:
            return answer["step"], torch.from_numpy(answer["flat"])
        try:
            content = await session.receive(way, answer["size"])
        except PeerSilentError as silence:
            await self._give_up_datagrams(silence)
            return await self.pull(lease, start, stop, at=at)
        kind = torch.uint8 if answer["coded"] else torch.float32
        return answer["step"], torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)

    @property
    def transport(self) -> str:
        """How large payloads travel."""
        return "tcp" if self._session is None else "udp"

    async def use_datagrams(self) -> None:
        """Let payloads travel over UDP from now on, if datagrams pass.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        host = get_ip(self._rpc.address.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]"))
        with _link():
            self._session = await DatagramSession.open(lambda: self._rpc.datagrams(worker=self._worker), host)
        if self._session is None:
            logger.warning("no datagram from the store at %s came through: payloads go over TCP", self._rpc.address)

    async def _give_up_datagrams(self, silence: PeerSilentError) -> None:
        logger.warning("datagrams stopped to come through (%s): payloads go over TCP", silence)
        session, self._session = self._session, None
        if session:
            await session.close()

    async def push(
        self, header: PushHeader, payload: Tensor | None, prompt: int = 0, *, urgent: bool = False
    ) -> Receipt:
        """Send an update or a mark; sent again, with the same header, when the connection breaks.

        What is large goes in parts, from its beginning on: of an update as whole numbers, what was there when its
        worker died is of use (`Codec`).

        Args:
            header: What it is.
            payload: It, or None if it was sent in parts.
            prompt: How many of its bytes, from the first on, count most.
            urgent: Whether it goes before all that wait for their turn: its worker will be gone.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        content = (torch.empty(0) if payload is None else payload).view(torch.uint8)
        if self._session and len(content) > DATAGRAM_BYTES:
            receipt = await self._scattered(self._session, header, content, prompt)
            if receipt:
                return receipt
        if len(content) > ADMISSION_BYTES:
            await self._send_with_retries(lambda: self._rpc.turn(holder=holder_of(header.lease), urgent=urgent))
        if len(content) > PART_BYTES:
            reply = await self._in_parts(header, content)
            if reply is not Reply.ACCEPTED and reply not in LATE_ROWS_REPLIES:
                return Receipt(reply)
            content = content[:0]
        frames = to_serialize(content.numpy())
        answer = await self._send_with_retries(lambda: self._rpc.push(header=as_message(header), flat=frames))
        return Receipt(Reply(answer["reply"]), answer["missing"])

    async def late_rows(self, lease: LeaseId, rows: Tensor) -> Reply:
        """Send the rows that an update lacked, one behind the other.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        if len(rows) > ADMISSION_BYTES:
            await self._send_with_retries(lambda: self._rpc.turn(holder=holder_of(lease)))
        frames, whose = to_serialize(rows.numpy()), as_message(lease)
        return Reply((await self._send_with_retries(lambda: self._rpc.late_rows(lease=whose, flat=frames)))["reply"])

    async def _scattered(
        self, session: DatagramSession, header: PushHeader, content: Tensor, prompt: int
    ) -> Receipt | None:
        """Send over UDP while the store waits for it; no receipt if that came to nothing."""
        way, told = session.new_transfer(), as_message(header)
        sending = asyncio.create_task(session.send(way, content.numpy().data, prompt))
        answering = asyncio.create_task(
            self._send_with_retries(lambda: self._rpc.scattered(header=told, size=len(content), transfer_id=way))
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
            session.drop(way)
        await self._give_up_datagrams(silence)
        return None

    async def part(self, header: PushHeader, start: int, content: Tensor) -> Reply:
        """Send a part of what will be pushed with this header (but for its checksum), from byte `start` on; again when
        the connection breaks.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        part = to_serialize(content.view(torch.uint8).numpy())
        answer = await self._send_with_retries(
            lambda: self._rpc.part(header=as_message(header), start=start, flat=part)
        )
        return Reply(answer["reply"])

    async def _in_parts(self, header: PushHeader, content: Tensor) -> Reply:
        """Send parts in order, the next one while the store answers to the last."""
        sending: set[asyncio.Task[Reply]] = set()
        starts = [*range(0, len(content), PART_BYTES)]
        try:
            while starts or sending:
                while starts and len(sending) < PARTS_AT_ONCE:
                    start = starts.pop(0)
                    part = content[start : start + PART_BYTES]
                    sending.add(asyncio.create_task(self.part(header, start, part)))
                done, sending = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                replies = {one.result() for one in done}
                if Reply.ENOUGH in replies:  # what is on its way is let arrive: the store counts it
                    starts.clear()
                    replies.discard(Reply.ENOUGH)
                if refusals := replies - {Reply.ACCEPTED}:
                    return refusals.pop()
        finally:
            for one in sending:
                one.cancel()
        return Reply.ACCEPTED

    async def _send_with_retries(self, send: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        for last in (False,) * (RESENDS - 1) + (True,):
            try:
                with _link():
                    answer = await send()
            except ConnectionError:
                if last:
                    raise
                await asyncio.sleep(RESEND_PAUSE_SECONDS)
            else:
                break
        return answer

    async def beat(self, lease: LeaseId, steps: int) -> Reply:
        """Say that the lease's subnet is alive and how far it is.

        Raises:
            ConnectionError: the store cannot be reached.
        """
        with _link():
            answer = await self._rpc.beat(lease=as_message(lease), steps=steps)
        return Reply(answer["reply"])

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str = "") -> LockstepGroup | Reply:
        """Wait for the others of a lockstep, as `Head.join`.

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
        await self._rpc.close_rpc()


@contextlib.contextmanager
def _link() -> Iterator[None]:
    """Dask's comm errors are plain OSErrors, as are those of a user's data set: tell the two apart by type."""
    try:
        yield
    except OSError as error:
        raise ConnectionError(f"the parameter store: {error}") from error
