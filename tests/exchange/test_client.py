"""A push is sent again when the connection breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from distributed.core import Server

from idletrain.exchange import client as module
from idletrain.exchange.client import ALIGNMENT_BYTES, RESENDS, StoreClient, aligned
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


def test_a_pulled_buffer_begins_where_torch_s_own_would() -> None:
    async def pull(values: int) -> torch.Tensor:
        answer = {"reply": Reply.ACCEPTED, "step": 0, "flat": np.arange(values, dtype=np.float32)}
        server = Server({"pull": lambda **_: answer})
        await server.listen("tcp://127.0.0.1:0")
        client = StoreClient(server.address, {})
        try:
            return (await client.pull(HEADER.lease))[1]
        finally:
            await client.close()
            await server.close()

    for size in (1, 7, 1000, 26388, 300_001):
        flat = asyncio.run(pull(size))
        assert flat.data_ptr() % ALIGNMENT_BYTES == 0
        assert torch.equal(flat, torch.arange(size, dtype=torch.float32))


def test_a_product_is_the_same_bits_wherever_its_matrix_was_received() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(64, 64, generator=generator), torch.randn(64, generator=generator)
    room = torch.empty(64 * 64 + 32)
    first = -room.data_ptr() % ALIGNMENT_BYTES // 4
    for offset in range(ALIGNMENT_BYTES // 4):
        received = room[first + offset : first + offset + 64 * 64].view(64, 64)
        received.copy_(matrix)
        assert (aligned(received) is received) == (offset == 0)
        assert torch.equal(aligned(received) @ vector, matrix @ vector)
