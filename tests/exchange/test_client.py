"""A push is sent again when the connection breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
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


def test_a_part_takes_as_long_over_a_quick_link_as_over_a_slow_one() -> None:
    """It so covers the wait for the answers, which does not grow with the link."""
    parts: dict[int, int] = {}

    async def take(header: dict[str, Any], start: int, flat: Any) -> Any:
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
            for rate, first in ((0.0, 1), (12.5e6, 1), (50e6, 3), (1e12, MAX_PART_BYTES // PART_BYTES)):
                parts.clear()
                client._push_rate = rate
                await client.push(HEADER, torch.zeros(size // 4))
                assert parts[0] == first * PART_BYTES
                sizes = [parts[start] for start in sorted(parts)]
                assert sorted(parts) == [sum(sizes[:k]) for k in range(len(sizes))]  # one behind the other
                assert sum(sizes) == size
                assert all(part % PART_BYTES == 0 for part in sizes[:-1])  # and so whole values
                assert client._push_rate not in (0.0, rate)  # it is measured
            parts.clear()
            client._push_rate = 1e12
            await client.push(HEADER, torch.zeros(size, dtype=torch.uint8))
            assert max(parts.values()) == PART_BYTES  # the store may have enough of what is coded before the end
        finally:
            await client.close()
            await server.close()

    asyncio.run(test())
