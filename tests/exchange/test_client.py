"""A push is sent again when the connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed.comm import Comm, CommClosedError
from distributed.core import Server

from idletrain.exchange import client as module
from idletrain.exchange.client import RESENDS, StoreClient
from idletrain.exchange.messages import LeaseId, PushHeader, Receipt, Reply
from idletrain.exchange.parted_push import MAX_PART_BYTES, PART_BYTES, PushRate

HEADER = PushHeader(LeaseId("run", 1, 2, 3, 4), 9, 1.5, 0)
NEXT = replace(HEADER, steps=10)


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


class Store:
    """Takes pushes in parts, as a store does, but answers as it is told.

    Attributes:
        parts: Every part that came: its first byte, and its bytes.
        held: The bytes at hand of each push, by place; pushes are told apart by their steps.
        pushes: How many pushes came.
    """

    def __init__(self, answer: Callable[[Store, Comm], Reply] | None = None) -> None:
        self._answer = answer or (lambda *_: Reply.ACCEPTED)
        self.parts: list[tuple[int, int]] = []
        self.held: dict[int, dict[int, bytes]] = {}
        self.pushes = 0
        self.answering = asyncio.Event()  # parts wait for it
        self.answering.set()

    async def _part(self, comm: Comm, header: dict[str, Any], start: int, flat: Any) -> Any:
        content = b"".join(flat.frames)
        self.parts.append((start, len(content)))
        reply = self._answer(self, comm)
        self.held.setdefault(header["steps"], {})[start] = content
        await self.answering.wait()
        return {"reply": reply.value}

    def _push(self, header: dict[str, Any], flat: Any) -> Any:  # noqa: ARG002
        self.pushes += 1
        return {"reply": "accepted", "missing": b""}

    def content(self, header: PushHeader = HEADER) -> bytes:
        """The payload of a push, from its beginning on without a gap."""
        whole, parts = bytearray(), self.held[header.steps]
        for start in sorted(parts):
            assert start <= len(whole)
            whole[start : start + len(parts[start])] = parts[start]
        return bytes(whole)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[StoreClient]:
        server = Server(
            {"part": self._part, "admit_push": lambda holder, urgent: {}, "push": self._push},  # noqa: ARG005
            deserialize=False,
        )
        await server.listen("tcp://127.0.0.1:0")
        client = StoreClient(server.address, {})
        try:
            yield client
        finally:
            await client.close()
            await server.close()


def test_parts_are_larger_over_a_quicker_link_but_for_what_is_coded() -> None:
    async def sizes(rate: float, payload: torch.Tensor) -> list[int]:
        store = Store()
        async with store.client() as client:
            client._push_rate = PushRate(rate)
            assert await client.push(HEADER, payload) == Receipt(Reply.ACCEPTED)
            assert store.content() == payload.numpy().tobytes()
            assert (client._push_rate.bytes_per_second == rate) == (payload.dtype == torch.uint8)  # else measured
        return [size for _, size in store.parts]

    values = torch.arange(4 * MAX_PART_BYTES // 4, dtype=torch.float32)
    assert asyncio.run(sizes(0.0, values))[0] == PART_BYTES  # no rate is known yet
    assert asyncio.run(sizes(1e12, values))[0] == MAX_PART_BYTES
    coded = torch.arange(3 * PART_BYTES).to(torch.uint8)
    assert asyncio.run(sizes(1e12, coded)) == 3 * [PART_BYTES]  # the store may have enough of it before the end


def test_a_push_whose_connection_breaks_goes_on_with_what_was_not_answered() -> None:
    """However often it breaks, as long as more has arrived each time."""
    breaks = 2 * RESENDS

    def answer(store: Store, comm: Comm) -> Reply:
        if len(store.parts) % 3 == 2 and len(store.parts) < 3 * breaks:
            comm.abort()
            raise CommClosedError
        return Reply.ACCEPTED

    async def test() -> tuple[Store, Receipt]:
        store = Store(answer)
        async with store.client() as client:
            return store, await client.push(HEADER, values)

    values = torch.arange(4 * breaks * PART_BYTES // 4, dtype=torch.float32)
    store, receipt = asyncio.run(test())
    assert receipt == Receipt(Reply.ACCEPTED)
    assert store.content() == values.numpy().tobytes()
    assert store.pushes == 1
    assert len(store.parts) < 2 * 4 * breaks  # from its beginning each time it would be many more
    assert sum(start == 0 for start, _ in store.parts) <= 2


def test_a_push_that_breaks_three_times_at_one_byte_is_given_up() -> None:
    def answer(store: Store, comm: Comm) -> Reply:
        if len(store.parts) == 1:
            return Reply.ACCEPTED
        comm.abort()
        raise CommClosedError

    async def test() -> Store:
        store = Store(answer)
        async with store.client() as client:
            with pytest.raises(ConnectionError, match="the parameter store"):
                await client.push(HEADER, torch.zeros(4 * PART_BYTES // 4))
        return store

    store = asyncio.run(test())
    assert store.pushes == 0
    assert 1 + RESENDS <= len(store.parts) <= 2 + RESENDS  # the first may have been sent again with the second


def test_a_refusal_in_the_middle_ends_a_push_and_the_client_goes_on() -> None:
    async def test() -> None:
        store = Store(lambda store, _: Reply.NOT_LEASED if len(store.parts) == 2 else Reply.ACCEPTED)
        async with store.client() as client:
            assert await client.push(HEADER, torch.zeros(6 * PART_BYTES // 4)) == Receipt(Reply.NOT_LEASED)
            values = torch.arange(6 * PART_BYTES // 4, dtype=torch.float32)
            assert await client.push(NEXT, values) == Receipt(Reply.ACCEPTED)
            assert store.content(NEXT) == values.numpy().tobytes()

    asyncio.run(test())


def test_a_push_that_is_cancelled_in_the_middle_leaves_no_answer_to_the_next() -> None:
    async def test() -> None:
        store = Store()
        store.answering.clear()
        async with store.client() as client:
            pushing = asyncio.create_task(client.push(HEADER, torch.zeros(6 * PART_BYTES // 4)))
            while not store.parts:
                await asyncio.sleep(0.01)
            pushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pushing
            store.answering.set()
            values = torch.arange(3 * PART_BYTES // 4, dtype=torch.float32)
            assert await client.push(NEXT, values) == Receipt(Reply.ACCEPTED)
            assert store.content(NEXT) == values.numpy().tobytes()

    asyncio.run(test())
