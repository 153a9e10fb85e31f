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


@pytest.mark.parametrize(("seconds", "growth"), [(0.001, 16), (0.15, 1)])
def test_parts_grow_with_the_rate_of_the_link(seconds: float, growth: int) -> None:
    """Over a quick link a part takes as long as a small one over a slow link, and covers the wait for the answers."""
    starts, sizes = [], []

    async def take(header: dict[str, Any], start: int, flat: Any) -> Any:
        starts.append(start)
        sizes.append(sum(map(len, flat.frames)))
        await asyncio.sleep(seconds * sizes[-1] / PART_BYTES)
        return {"reply": "accepted"}

    async def test() -> None:
        handlers = {"part": take, "admit_push": lambda holder, urgent: {}, "push": lambda header, flat: accepted}  # noqa: ARG005
        server = Server(handlers, deserialize=False)
        await server.listen("tcp://127.0.0.1:0")
        client = StoreClient(server.address, {})
        try:
            for _ in range(2 if growth > 1 else 1):
                sizes.clear()
                starts.clear()
                await client.push(HEADER, torch.zeros(size // 4))
        finally:
            await client.close()
            await server.close()

    accepted, size = {"reply": "accepted", "missing": b""}, PART_BYTES * (40 if growth > 1 else 4) + 100
    asyncio.run(test())
    sizes = [part for _, part in sorted(zip(starts, sizes, strict=True))]  # two at a time may overtake each other
    assert sum(sizes) == size
    assert sorted(starts) == [sum(sizes[:k]) for k in range(len(sizes))]  # one behind the other
    assert all(part % PART_BYTES == 0 for part in sizes[:-1])  # and so whole values
    assert (max(sizes) > PART_BYTES) == (growth > 1)
    assert max(sizes) <= MAX_PART_BYTES
