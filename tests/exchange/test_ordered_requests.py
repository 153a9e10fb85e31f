"""Requests over one connection are answered in order, and one that was left in the middle is not used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from distributed.core import Server, rpc

from idletrain.exchange.ordered_requests import ordered_requests


def served(test: Callable[[rpc, list[int]], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a server that doubles numbers, the even ones slowly, and refuses those below 0."""
    seen: list[int] = []

    async def double(number: int) -> int:
        seen.append(number)
        if number < 0:
            raise ArithmeticError("below 0")
        await asyncio.sleep(0 if number % 2 else 0.02)
        return {"is": 2 * number}

    async def run() -> None:
        server = Server({"double": double})
        await server.listen("tcp://127.0.0.1:0")
        remote = rpc(server.address)
        try:
            await test(remote, seen)
        finally:
            await remote.close_rpc()
            await server.close()

    asyncio.run(run())


def test_answers_come_in_the_order_of_requests_and_the_connection_is_kept() -> None:
    async def test(remote: rpc, seen: list[int]) -> None:
        for _ in range(2):
            async with ordered_requests(remote) as requests:
                for number in (2, 3, 4):
                    await requests.send("double", number=number)
                assert requests.unanswered == 3
                assert [(await requests.answer())["is"] for _ in range(3)] == [4, 6, 8]
        assert seen == 2 * [2, 3, 4]
        assert len(remote.comms) == 1

    served(test)


def test_a_connection_with_answers_to_come_is_closed() -> None:
    async def test(remote: rpc, _: list[int]) -> None:
        async with ordered_requests(remote) as requests:
            await requests.send("double", number=2)
        (left,) = remote.comms
        assert left.closed()
        assert (await remote.double(number=3))["is"] == 6  # and not the answer that nobody took
        assert left not in remote.comms

    served(test)


def test_a_connection_that_comes_back_to_a_closed_client_is_closed() -> None:
    async def test(remote: rpc, _: list[int]) -> None:
        async with ordered_requests(remote):
            (lent,) = remote.comms
            remote.comms.clear()  # as a connection that opens while the client closes
            await remote.close_rpc()
            assert not lent.closed()
        assert lent.closed()
        assert not remote.comms

    served(test)


def test_what_a_handler_raises_is_raised_and_the_next_answer_is_the_next_request_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(remote: rpc, _: list[int]) -> None:
        async with ordered_requests(remote) as requests:
            await requests.send("double", number=-1)
            await requests.send("double", number=1)
            with pytest.raises(ArithmeticError, match="below 0"):
                await requests.answer()
            assert (await requests.answer())["is"] == 2

    served(test)
    assert "Exception while handling op double" in caplog.text
