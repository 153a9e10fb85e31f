"""A worker's session with the store: opened if datagrams get through; else all payloads travel over TCP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from idletrain.exchange.datagram.endpoint import Endpoint
from idletrain.exchange.datagram.packet import SessionKeys
from idletrain.exchange.datagram.protocol import PATH_SOCKETS
from idletrain.exchange.datagram.transfer import PeerSilentError

SESSION_OPEN_SECONDS = 1.0
TRANSFER_SILENCE_SECONDS = 10.0  # of silence; the lease's heartbeats notice earlier that the head is gone
TransferId = tuple[int, int]  # session and transfer


class DatagramSession:
    """An open session; `open` makes one.

    Args:
        endpoint: This side's sockets.
        number: The session's number.
    """

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self._endpoint, self._number = endpoint, number
        self._transfers = itertools.count(1)

    @classmethod
    async def open(cls, request: Callable[[], Awaitable[dict[str, Any]]], host: str) -> DatagramSession | None:
        """Request a session from the store and open it; return None if datagrams do not get through.

        Args:
            request: Returns the store's `session`, `host`, `port`, and this side's `send_key` and `receive_key`; {} if
                it has no session to give.
            host: This side's address.
        """
        parameters = await request()
        if not parameters:
            return None
        keys = SessionKeys(parameters["session"], parameters["send_key"], parameters["receive_key"])
        try:
            endpoint = Endpoint(host, PATH_SOCKETS)
        except OSError:
            return None
        opened = endpoint.open(keys, (parameters["host"], parameters["port"]))
        try:
            await asyncio.wait_for(asyncio.wrap_future(opened), SESSION_OPEN_SECONDS)
        except BaseException as error:
            await asyncio.to_thread(endpoint.close)
            if isinstance(error, TimeoutError | PeerSilentError):
                return None
            raise
        return cls(endpoint, keys.session)

    def new_transfer(self) -> TransferId:
        """Return the identity of a new transfer."""
        return self._number, next(self._transfers)

    async def send(self, transfer: TransferId, content: memoryview, prompt: int) -> None:
        """Send a payload that the store expects, its first `prompt` bytes in the better traffic class."""
        sent = self._endpoint.send(*transfer, content, prompt=prompt, patience=TRANSFER_SILENCE_SECONDS)
        await asyncio.wrap_future(sent)

    def drop(self, transfer: TransferId) -> None:
        """Send no more of a payload: the store has answered."""
        self._endpoint.drop(*transfer)

    async def receive(self, transfer: TransferId, size: int) -> bytearray:
        """Receive a payload of `size` bytes from the store."""
        incoming = self._endpoint.receive(*transfer, size, patience=TRANSFER_SILENCE_SECONDS)
        return (await asyncio.wrap_future(incoming)).content

    async def close(self) -> None:
        """Close the sockets."""
        await asyncio.to_thread(self._endpoint.close)
