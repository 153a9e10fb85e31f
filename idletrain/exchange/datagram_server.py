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

from idletrain.exchange.datagram.endpoint import Endpoint, Keys, Received, SilentError
from idletrain.exchange.datagram.packet import KEY_BYTES, PAYLOAD
from idletrain.exchange.datagram.session import PATIENCE_SECONDS
from idletrain.exchange.datagram.window import Got
from idletrain.exchange.messages import Bound, Receipt

Came = Callable[[Received], bool]
logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.1  # between two looks at what has come of a transfer
ANSWERED_KEPT = 64  # pushes that were answered, which a worker may not have heard


class Ways:
    """The store's side of all sessions; has no socket before somebody asks for one."""

    def __init__(self) -> None:
        self._endpoint: Endpoint | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[str, int] = {}
        self._coming: dict[int, dict[int, asyncio.Future[Received] | Receipt]] = {}  # by session; how it was answered
        self._looking: set[asyncio.Task[None]] = set()

    async def open(self, worker: str, host: str) -> dict[str, Any]:
        """A session for a worker, in the place of its last one: what it has to know; nothing if there can be none."""
        self.left(worker)
        try:
            if self._endpoint is None or self._endpoint.over:
                self._endpoint = Endpoint(host)
        except OSError as error:
            logger.warning("no datagrams: %s", error)
            return {}
        session = self._sessions[worker] = next(self._numbers)
        self._coming[session] = {}
        keys = Keys(session, os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))
        await asyncio.wrap_future(self._endpoint.open(keys))
        host, port = self._endpoint.address
        return {"session": session, "host": host, "port": port, "out": keys.back, "back": keys.out}

    def left(self, worker: str) -> None:
        """End a worker's session, if it has one."""
        session = self._sessions.pop(worker, None)
        if session is not None and self._endpoint:
            self._endpoint.end(session)
            self._coming.pop(session, None)

    def send(self, way: Sequence[int], part: Tensor) -> None:
        """Send; a worker that hears nothing asks again over TCP."""
        session, transfer = way
        content = part.numpy().data.cast("B")
        assert self._endpoint
        sent = self._endpoint.send(session, transfer, content, prompt=len(content), patience=PATIENCE_SECONDS)
        sent.add_done_callback(_tell)

    def answer(self, way: Sequence[int]) -> Receipt | None:
        """How a push was answered, if it was."""
        session, transfer = way
        found = self._coming.get(session, {}).get(transfer)
        return found if isinstance(found, Receipt) else None

    async def receive(self, way: Sequence[int], size: int, bound: Bound, came: Came) -> Received:
        """A payload, as soon as enough of it is there; `came` is told now and then what is, and in the end if that is
        not all, and says whether more is wanted.

        Raises:
            SilentError: not enough came, or the worker is gone.
        """
        session, transfer = way
        mine = self._coming.get(session)
        if mine is None:
            raise SilentError("the session is closed")
        coming = mine.get(transfer)
        if not isinstance(coming, asyncio.Future):  # else told again, as the answer did not come
            coming = mine[transfer] = self._expect(way, size, bound)
            looking = asyncio.create_task(self._look(way, coming, came))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
        received = await asyncio.shield(coming)
        if not received.got.all():
            came(received)
        return received

    def _expect(self, way: Sequence[int], size: int, bound: Bound) -> asyncio.Future[Received]:
        assert self._endpoint
        (session, transfer), enough = way, bound.enough
        coming = self._endpoint.receive(
            session,
            transfer,
            size,
            patience=PATIENCE_SECONDS,
            needed=-(-bound.needed // PAYLOAD),
            least=math.ceil(bound.least * -(-size // PAYLOAD)),
            enough=(lambda content, got: enough(content, got, PAYLOAD)) if enough else None,
        )
        return asyncio.wrap_future(coming)

    def answered(self, way: Sequence[int], receipt: Receipt) -> None:
        """What came was taken, or refused."""
        session, transfer = way
        if mine := self._coming.get(session):
            mine[transfer] = receipt
            if len(mine) > ANSWERED_KEPT:
                del mine[min(mine)]

    async def close(self) -> None:
        """Close the sockets; what is under way fails."""
        for one in self._looking:
            one.cancel()
        if self._endpoint:
            await asyncio.to_thread(self._endpoint.close)

    async def _look(self, way: Sequence[int], coming: asyncio.Future[Received], came: Came) -> None:
        assert self._endpoint
        pieces = 0
        while not coming.done():
            await asyncio.wait((coming,), timeout=LOOK_SECONDS)
            session, transfer = way
            found = await asyncio.wrap_future(self._endpoint.so_far(session, transfer))
            if found is not None and found.got.sum() > pieces:
                pieces = int(found.got.sum())
                if not came(found):
                    self._endpoint.stop(session, transfer)
        if not coming.cancelled():
            coming.exception()  # told where the push waits for it


def _tell(sent: Future[Got]) -> None:
    if error := sent.exception():
        logger.info("a pull over UDP was given up: %s", error)
