"""A store's sessions with its workers: what it sends them, what it expects, and what of that has come so far."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import KEY_BYTES, PAYLOAD, SessionKeys
from idletrain.exchange.datagram.session import TRANSFER_SILENCE_SECONDS
from idletrain.exchange.datagram.transfer import PeerSilentError, ReceivedPayload
from idletrain.exchange.datagram.window import ReceivedMask
from idletrain.exchange.messages import AcceptanceRule, Receipt

PiecesArrived = Callable[[ReceivedPayload], bool]
logger = logging.getLogger(__name__)
PROGRESS_POLL_SECONDS = 0.1  # between two looks at what has come of a transfer
RECEIPTS_KEPT = 64  # pushes that were answered, which a worker may not have heard


class DatagramServer:
    """The store's side of all sessions; has no socket before somebody asks for one."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[str, int] = {}
        self._incoming: dict[
            int, dict[int, asyncio.Future[ReceivedPayload] | Receipt]
        ] = {}  # by session; how it was answered
        self._looking: set[asyncio.Task[None]] = set()

    async def open(self, worker: str, host: str) -> dict[str, Any]:
        """A session for a worker, in the place of its last one: what it has to know; nothing if there can be none."""
        self.worker_left(worker)
        try:
            if self._endpoint is None or self._endpoint.is_closed:
                self._endpoint = Endpoint(host)
        except OSError as error:
            logger.warning("no datagrams: %s", error)
            return {}
        session = self._sessions[worker] = next(self._numbers)
        self._incoming[session] = {}
        keys = SessionKeys(session, os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))
        await asyncio.wrap_future(self._endpoint.open(keys))
        host, port = self._endpoint.address
        return {"session": session, "host": host, "port": port, "send_key": keys.receive, "receive_key": keys.send}

    def worker_left(self, worker: str) -> None:
        """End a worker's session, if it has one."""
        session = self._sessions.pop(worker, None)
        if session is not None and self._endpoint:
            self._endpoint.end(session)
            self._incoming.pop(session, None)

    def send(self, transfer_id: Sequence[int], part: Tensor) -> None:
        """Send; a worker that hears nothing asks again over TCP."""
        session, transfer = transfer_id
        content = part.numpy().data.cast("B")
        assert self._endpoint
        sent = self._endpoint.send(session, transfer, content, prompt=len(content), patience=TRANSFER_SILENCE_SECONDS)
        sent.add_done_callback(_tell)

    def receipt(self, transfer_id: Sequence[int]) -> Receipt | None:
        """How a push was answered, if it was."""
        session, transfer = transfer_id
        found = self._incoming.get(session, {}).get(transfer)
        return found if isinstance(found, Receipt) else None

    async def receive(
        self, transfer_id: Sequence[int], size: int, rule: AcceptanceRule, on_pieces: PiecesArrived
    ) -> ReceivedPayload:
        """A payload, as soon as enough of it is there; `came` is told now and then what is, and in the end if that is
        not all, and says whether more is wanted.

        Raises:
            SilentError: not enough came, or the worker is gone.
        """
        session, transfer = transfer_id
        mine = self._incoming.get(session)
        if mine is None:
            raise PeerSilentError("the session is closed")
        coming = mine.get(transfer)
        if not isinstance(coming, asyncio.Future):  # else told again, as the answer did not come
            coming = mine[transfer] = self._expect(transfer_id, size, rule)
            looking = asyncio.create_task(self._watch(transfer_id, coming, on_pieces))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
        received = await asyncio.shield(coming)
        if not received.received.all():
            on_pieces(received)
        return received

    def _expect(self, transfer_id: Sequence[int], size: int, rule: AcceptanceRule) -> asyncio.Future[ReceivedPayload]:
        assert self._endpoint
        (session, transfer), enough = transfer_id, rule.is_acceptable
        coming = self._endpoint.receive(
            session,
            transfer,
            size,
            patience=TRANSFER_SILENCE_SECONDS,
            required_pieces=-(-rule.required_bytes // PAYLOAD),
            min_pieces=math.ceil(rule.min_fraction * -(-size // PAYLOAD)),
            is_acceptable=(lambda content, received: enough(content, received, PAYLOAD)) if enough else None,
        )
        return asyncio.wrap_future(coming)

    def keep_receipt(self, transfer_id: Sequence[int], receipt: Receipt) -> None:
        """What came was taken, or refused."""
        session, transfer = transfer_id
        if mine := self._incoming.get(session):
            mine[transfer] = receipt
            if len(mine) > RECEIPTS_KEPT:
                del mine[min(mine)]

    async def close(self) -> None:
        """Close the sockets; what is under way fails."""
        for one in self._looking:
            one.cancel()
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.close)

    async def _watch(
        self, transfer_id: Sequence[int], coming: asyncio.Future[ReceivedPayload], on_pieces: PiecesArrived
    ) -> None:
        assert self._endpoint
        pieces = 0
        while not coming.done():
            await asyncio.wait((coming,), timeout=PROGRESS_POLL_SECONDS)
            session, transfer = transfer_id
            found = await asyncio.wrap_future(self._endpoint.progress(session, transfer))
            if found is not None and found.received.sum() > pieces:
                pieces = int(found.received.sum())
                if not on_pieces(found):
                    self._endpoint.stop(session, transfer)
        if not coming.cancelled():
            coming.exception()  # told where the push waits for it


def _tell(sent: Future[ReceivedMask]) -> None:
    if error := sent.exception():
        logger.info("a pull over UDP was given up: %s", error)
