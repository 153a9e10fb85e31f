"""A push is sent again when the connection breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from distributed.comm import CommClosedError
from distributed.core import Server

from idletrain.exchange import client as module
from idletrain.exchange.client import MAX_PART_BYTES, PART_BYTES, RESENDS, StoreClient
from idletrain.exchange.messages import LeaseId, PushHeader, Receipt, Reply

HEADER = PushHeader(LeaseId("run", 1, 2, 3, 4), 9, 1.5, 0)


async def push(breaks: int) -> tuple[list[Any], Receipt]:
    """Push to a server that hangs up on the first so many pushes; returns what it was sent and the answer."""
    sent: list[Any] = []

    def take(comm: Any, header: dict[str, Any], flat: Any) -> Any:
        sent.append((header, len(flat)))
        if len(sent) <= breaks:
            comm.abort()
            raise OSError("hung up")
        return {"reply": "duplicate", "missing": b""}

    server = Server({"push": take})
    await server.listen("tcp://127.0.0.1:0")
    client = StoreClient(server.address, {})
    try:
        return sent, await client.push(HEADER, torch.zeros(3))
    finally:
        await client.close()
        await server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESEND_PAUSE_SECONDS", 0.01)


def test_a_push_is_sent_again_with_the_same_header_and_its_duplicate_is_an_answer() -> None:
    sent, reply = asyncio.run(push(RESENDS - 1))
    assert len(sent) == RESENDS
    assert all(message == sent[0] for message in sent)
    assert reply == Receipt(Reply.DUPLICATE)


def test_a_push_gives_up_after_three_sends() -> None:
    with pytest.raises(ConnectionError, match="the parameter store"):
        asyncio.run(push(RESENDS))


def test_over_a_quick_link_parts_are_larger_and_more_is_sent_before_an_answer() -> None:
    """It so covers the wait for the answers, which does not grow with the link."""
    parts: dict[int, int] = {}

    def take(header: dict[str, Any], start: int, flat: Any) -> Any:
        parts[start] = sum(map(len, flat.frames))
        return {"reply": "accepted"}

    async def test() -> None:
        accepted = {"reply": "accepted", "missing": b""}
        handlers = {"part": take, "admit_push": lambda holder, urgent: {}, "push": lambda header, flat: accepted}  # noqa: ARG005
        server = Server(handlers, deserialize=False)
        await server.listen("tcp://127.0.0.1:0")
        client = StoreClient(server.address, {})
        size = MAX_PART_BYTES + 2 * PART_BYTES + 100
        try:
            for rate, first in ((0.0, 1), (12.5e6, 1), (200e6, 3), (1e12, MAX_PART_BYTES // PART_BYTES)):
                parts.clear()
                client._push_rate = rate
                assert client._bytes_ahead(grow=True) == max(2 * first * PART_BYTES, 0.04 * rate)
                await client.push(HEADER, torch.zeros(size // 4))
                assert parts[0] == first * PART_BYTES
                sizes = [parts[start] for start in sorted(parts)]
                assert sorted(parts) == [sum(sizes[:k]) for k in range(len(sizes))]  # one behind the other
                assert sum(sizes) == size
                assert all(part % PART_BYTES == 0 for part in sizes[:-1])  # and so whole values
                assert client._push_rate not in (0.0, rate)  # it is measured
            parts.clear()
            client._push_rate = 1e12
            assert client._bytes_ahead(grow=False) == 2 * PART_BYTES
            await client.push(HEADER, torch.zeros(size, dtype=torch.uint8))
            assert max(parts.values()) == PART_BYTES  # the store may have enough of what is coded before the end
        finally:
            await client.close()
            await server.close()

    asyncio.run(test())


def test_a_push_in_parts_whose_connection_breaks_is_sent_again_from_its_beginning() -> None:
    sent: list[tuple[int, int]] = []

    def take(comm: Any, header: dict[str, Any], start: int, flat: Any) -> Any:
        sent.append((start, sum(map(len, flat.frames))))
        if len(sent) == 2:
            comm.abort()
            raise CommClosedError
        return {"reply": "accepted"}

    async def test() -> Receipt:
        accepted = {"reply": "accepted", "missing": b""}
        handlers = {"part": take, "admit_push": lambda holder, urgent: {}, "push": lambda header, flat: accepted}  # noqa: ARG005
        server = Server(handlers, deserialize=False)
        await server.listen("tcp://127.0.0.1:0")
        client = StoreClient(server.address, {})
        try:
            return await client.push(HEADER, torch.zeros(3 * PART_BYTES // 4))
        finally:
            await client.close()
            await server.close()

    assert asyncio.run(test()) == Receipt(Reply.ACCEPTED)
    assert sent[:2] == [(0, PART_BYTES), (PART_BYTES, PART_BYTES)]
    again = sent[2:]
    assert [start for start, _ in again] == [sum(size for _, size in again[:k]) for k in range(len(again))]
    assert sum(size for _, size in again) == 3 * PART_BYTES
