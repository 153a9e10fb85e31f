"""Requests over one connection, several of them on their way at once, answered in their order.

Dask's own calls wait for each answer, or take a connection each. A server handles a connection's requests one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from distributed.comm import Comm
from distributed.core import Status, clean_exception, rpc


class OrderedRequests:
    """The requests over one connection.

    Attributes:
        unanswered: How many are on their way.
    """

    def __init__(self, connection: Comm) -> None:
        self._connection = connection
        self.unanswered = 0

    async def send(self, operation: str, **fields: Any) -> None:
        """Send a request without waiting for its answer.

        Raises:
            OSError: the connection is broken.
        """
        self.unanswered += 1
        await self._connection.write({"op": operation, **fields}, on_error="raise")

    async def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest request that has none.

        Raises:
            OSError: the connection is broken.
            Exception: whatever the server's handler raised.
        """
        answer: dict[str, Any] = await self._connection.read()
        self.unanswered -= 1
        if answer.get("status") == "uncaught-error":
            _, error, traceback = clean_exception(**answer)
            assert error
            raise error.with_traceback(traceback)
        return answer


@contextlib.asynccontextmanager
async def ordered_requests(remote: rpc) -> AsyncIterator[OrderedRequests]:
    """Lend a connection to a server; behind it, the connection is kept if all answers came and `remote` is open, else
    closed.

    Raises:
        OSError: the server cannot be reached.
    """
    connection = await remote.live_comm()
    requests = OrderedRequests(connection)
    try:
        yield requests
    finally:
        if requests.unanswered or remote.status is Status.closed:
            connection.abort()
        else:
            remote.comms[connection] = True
