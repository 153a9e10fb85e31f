"""A push is sent again when the connection breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from distributed.core import Server

from idletrain.exchange import client as module
from idletrain.exchange.client import RESENDS, StoreClient
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
