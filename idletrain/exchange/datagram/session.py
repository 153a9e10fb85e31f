"""A worker's session with a store: opened if datagrams pass, else there is none and everything goes over TCP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from idletrain.exchange.datagram.endpoint import PATH_SOCKETS, Endpoint, PeerSilentError, SessionKeys, keys_of

SESSION_OPEN_SECONDS = 1.0
TRANSFER_SILENCE_SECONDS = 10.0  # of silence; the lease's beats tell earlier whether the head is there
TransferId = tuple[int, int]  # session and transfer


class DatagramSession:
    """One.

    Args:
        endpoint: This side's sockets.
        number: The session's.
    """

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self._endpoint, self._number = endpoint, number
        self._transfers = itertools.count(1)

    @classmethod
    async def open(cls, ask: Callable[[], Awaitable[dict[str, Any]]], host: str) -> DatagramSession | None:
        """Ask the store for a session and see whether datagrams pass.

        Args:
            ask: The store's answer: `session`, `host`, `port`, and this side's keys `out` and `back`.
            host: This side's address.
        """
        told = await ask()
        if not told:
            return None
        keys: SessionKeys = keys_of(told["session"], (told["out"], told["back"]))
        try:
            endpoint = Endpoint(host, PATH_SOCKETS)
        except OSError:
            return None
        opened = endpoint.open(keys, (told["host"], told["port"]))
        try:
            await asyncio.wait_for(asyncio.wrap_future(opened), SESSION_OPEN_SECONDS)
        except BaseException as error:
            await asyncio.to_thread(endpoint.close)
            if isinstance(error, TimeoutError | PeerSilentError):
                return None
            raise
        return cls(endpoint, keys.session)

    def new_transfer(self) -> TransferId:
        """A new transfer's name."""
        return self._number, next(self._transfers)

    async def send(self, transfer: TransferId, content: memoryview, prompt: int) -> None:
        """Send what the store expects; see `Endpoint.send`."""
        sent = self._endpoint.send(*transfer, content, prompt=prompt, patience=TRANSFER_SILENCE_SECONDS)
        await asyncio.wrap_future(sent)

    def drop(self, transfer: TransferId) -> None:
        """Send no more of it: the store has answered."""
        self._endpoint.drop(*transfer)

    async def receive(self, transfer: TransferId, size: int) -> bytearray:
        """Receive what the store sends."""
        coming = self._endpoint.receive(*transfer, size, patience=TRANSFER_SILENCE_SECONDS)
        return (await asyncio.wrap_future(coming)).content

    async def close(self) -> None:
        """Close the sockets."""
        await asyncio.to_thread(self._endpoint.close)
