"""The store's datagram sessions with its workers."""

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
from idletrain.exchange.datagram.packet import PAYLOAD, SESSION_KEY_BYTES, SessionKeys
from idletrain.exchange.datagram.session import TRANSFER_SILENCE_SECONDS
from idletrain.exchange.datagram.transfer import PeerSilentError, ReceivedPayload
from idletrain.exchange.datagram.window import ReceivedMask
from idletrain.exchange.messages import AcceptanceRule, Receipt

PiecesArrived = Callable[[ReceivedPayload], bool]
logger = logging.getLogger(__name__)
PROGRESS_POLL_SECONDS = 0.1  # between two checks of what has arrived of a transfer
RECEIPTS_KEPT = 64  # of pushes whose answer a worker may not have received


class DatagramServer:
    """The store's side of all sessions; opens its socket with the first session."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[str, int] = {}
        # Pushes by session and transfer: under way, or how they were answered.
        self._pushes: dict[int, dict[int, asyncio.Future[ReceivedPayload] | Receipt]] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def open(self, worker: str, host: str) -> dict[str, Any]:
        """Open a session, replacing any earlier one; return its parameters, or {} if UDP is unavailable."""
        self.worker_left(worker)
        try:
            if self._endpoint is None or self._endpoint.is_closed:
                self._endpoint = Endpoint(host)
        except OSError as error:
            logger.warning("no UDP socket (%s): payloads travel over TCP", error)
            return {}
        session = self._sessions[worker] = next(self._numbers)
        self._pushes[session] = {}
        keys = SessionKeys(session, os.urandom(SESSION_KEY_BYTES), os.urandom(SESSION_KEY_BYTES))
        await asyncio.wrap_future(self._endpoint.open(keys))
        host, port = self._endpoint.address
        return {"session": session, "host": host, "port": port, "send_key": keys.receive, "receive_key": keys.send}

    def worker_left(self, worker: str) -> None:
        """End a worker's session, if it has one."""
        session = self._sessions.pop(worker, None)
        if session is not None and self._endpoint:
            self._endpoint.end(session)
            self._pushes.pop(session, None)

    def send(self, transfer_id: Sequence[int], part: Tensor) -> None:
        """Send a part of a buffer; a worker that receives nothing pulls again over TCP."""
        session, transfer = transfer_id
        content = part.numpy().data.cast("B")
        assert self._endpoint
        sent = self._endpoint.send(session, transfer, content, prompt=len(content), patience=TRANSFER_SILENCE_SECONDS)
        sent.add_done_callback(_log_failure)

    def receipt(self, transfer_id: Sequence[int]) -> Receipt | None:
        """Return how a push was answered; None if it was not."""
        session, transfer = transfer_id
        push = self._pushes.get(session, {}).get(transfer)
        return push if isinstance(push, Receipt) else None

    async def receive(
        self, transfer_id: Sequence[int], size: int, rule: AcceptanceRule, on_pieces: PiecesArrived
    ) -> ReceivedPayload:
        """Receive a payload of `size` bytes; return it as soon as it is complete enough.

        Args:
            transfer_id: Session and transfer.
            size: Bytes.
            rule: When it is complete enough.
            on_pieces: Called every `PROGRESS_POLL_SECONDS` in which pieces arrived, and in the end if some are missing;
                returns whether more are wanted.

        Raises:
            PeerSilentError: too little arrived, or the worker is gone.
        """
        session, transfer = transfer_id
        pushes = self._pushes.get(session)
        if pushes is None:
            raise PeerSilentError("the session is closed")
        incoming = pushes.get(transfer)
        if not isinstance(incoming, asyncio.Future):  # else requested again, because the answer was lost
            incoming = pushes[transfer] = self._expect(transfer_id, size, rule)
            watcher = asyncio.create_task(self._watch(transfer_id, incoming, on_pieces))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
        received = await asyncio.shield(incoming)
        if not received.received.all():
            on_pieces(received)
        return received

    def _expect(self, transfer_id: Sequence[int], size: int, rule: AcceptanceRule) -> asyncio.Future[ReceivedPayload]:
        assert self._endpoint
        (session, transfer), check = transfer_id, rule.is_acceptable
        incoming = self._endpoint.receive(
            session,
            transfer,
            size,
            patience=TRANSFER_SILENCE_SECONDS,
            required_pieces=-(-rule.required_bytes // PAYLOAD),
            min_pieces=math.ceil(rule.min_fraction * -(-size // PAYLOAD)),
            is_acceptable=(lambda content, received: check(content, received, PAYLOAD)) if check else None,
        )
        return asyncio.wrap_future(incoming)

    def keep_receipt(self, transfer_id: Sequence[int], receipt: Receipt) -> None:
        """Keep the answer to a push, in case the worker requests it again."""
        session, transfer = transfer_id
        if pushes := self._pushes.get(session):
            pushes[transfer] = receipt
            if len(pushes) > RECEIPTS_KEPT:
                del pushes[min(pushes)]

    async def close(self) -> None:
        """Close the sockets; transfers under way fail."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.close)

    async def _watch(
        self, transfer_id: Sequence[int], incoming: asyncio.Future[ReceivedPayload], on_pieces: PiecesArrived
    ) -> None:
        assert self._endpoint
        pieces = 0
        while not incoming.done():
            await asyncio.wait((incoming,), timeout=PROGRESS_POLL_SECONDS)
            session, transfer = transfer_id
            progress = await asyncio.wrap_future(self._endpoint.progress(session, transfer))
            if progress is not None and progress.received.sum() > pieces:
                pieces = int(progress.received.sum())
                if not on_pieces(progress):
                    self._endpoint.stop(session, transfer)
        if not incoming.cancelled():
            incoming.exception()  # mark it as retrieved: the waiting push raises it


def _log_failure(sent: Future[ReceivedMask]) -> None:
    if error := sent.exception():
        logger.info("a pull over UDP failed: %s", error)
