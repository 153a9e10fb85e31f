"""Store and client over real connections, plain and with certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from distributed.security import Security
from numpy.typing import NDArray

from idletrain.errors import RefusedError
from idletrain.exchange.admission import HOLDER_SILENCE_SECONDS, MIN_HOLDERS, holder_of
from idletrain.exchange.client import StoreClient
from idletrain.exchange.datagram import session as session_module
from idletrain.exchange.datagram.packet import PAYLOAD
from idletrain.exchange.datagram.protocol import DatagramProtocol
from idletrain.exchange.messages import (
    AcceptanceRule,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    as_message,
    checksum,
    inspect,
    inspect_values,
)
from idletrain.exchange.parted_push import MAX_PART_BYTES, PART_BYTES, PARTS_AT_ONCE
from idletrain.exchange.parts import Parts
from idletrain.exchange.store import StoreServer

LEASE = LeaseId("run", 1, 2, 3, 4)
SIZE = 3_000_000  # 12 MB: more than one packet, less than one frame of the comm layer


class Memory:
    """A head that holds one subnet in memory."""

    def __init__(self) -> None:
        self.flat = torch.arange(float(SIZE))
        self.pushed: list[tuple[PushHeader, torch.Tensor]] = []
        self.beats: list[tuple[int, str]] = []
        self.parts = Parts()
        self.bound: tuple[int, float] = 4 * SIZE, 1.0
        self.arrived: NDArray[np.bool_] | None = None
        self.late_count: list[bytes] = []
        self.wanted, self.late = True, False
        self.answers = 0

    def program(self) -> bytes:
        return b"a program"

    async def pull(
        self, lease: LeaseId, start: int, stop: int | None, at: int | None
    ) -> tuple[int, torch.Tensor] | Reply:
        if at is not None:
            return at, -self.flat[start:stop]
        return (7, self.flat[start:stop]) if lease == LEASE else Reply.NOT_LEASED

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        frames = frames or self.parts.payload(header.lease.attempt, (header.steps, header.update))
        self.answers += 1
        if self.late:
            return Receipt(Reply.DUPLICATE, b"\x01")
        if self.arrived is not None and not frames:
            return Receipt(Reply.ACCEPTED, bytes(~np.packbits(self.arrived, bitorder="little")))
        fault = inspect(header, frames, 4 * SIZE) or inspect_values(frames)
        if fault is None:
            content = b"".join(frames)
            self.pushed.append((header, torch.frombuffer(bytearray(content), dtype=torch.float32)))
        return Receipt(fault or Reply.ACCEPTED)

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        if size != 4 * SIZE:
            return Reply.WRONG_SHAPE
        return AcceptanceRule(*self.bound) if header.lease == LEASE else Reply.NOT_LEASED

    def part_arrived(self, header: PushHeader, content: memoryview, pieces: NDArray[np.bool_], piece: int) -> bool:
        assert (header.lease, header.steps, header.train_seconds) == (LEASE, 9, 1.5)
        assert (len(content), piece) == (4 * SIZE, PAYLOAD)
        self.arrived = pieces
        return self.wanted

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        self.late_count.append(b"".join(frames))
        return Reply.ACCEPTED if lease == LEASE else Reply.NOT_LEASED

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        what, attempt = (header.steps, header.update), header.lease.attempt
        if self.late:
            return Reply.STALE_ROUND
        held = header.lease == LEASE and self.parts.hold(attempt, what, start, frames, 4 * SIZE, header.train_seconds)
        return Reply.ACCEPTED if held else Reply.NOT_LEASED

    def stream_position(self, lease: LeaseId) -> str | Reply:
        return "behind batch 9" if lease == LEASE else Reply.NOT_LEASED

    def beat(self, lease: LeaseId, steps: int, doing: str) -> Reply:
        self.beats.append((steps, doing))
        return Reply.ACCEPTED if lease == LEASE else Reply.STALE_ROUND

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        return LockstepGroup(3, max(steps), (address, why)) if lease == LEASE else Reply.DUPLICATE


@asynccontextmanager
async def serving(security: Security) -> AsyncIterator[tuple[Memory, StoreServer, str]]:
    head = Memory()
    store = StoreServer(head, security)
    address = await store.listen("127.0.0.1")
    try:
        yield head, store, address
    finally:
        await store.close()


@asynccontextmanager
async def connected(address: str, security: Security, datagrams: bool = False) -> AsyncIterator[StoreClient]:
    client = StoreClient(address, security.get_connection_args("worker"))
    try:
        if datagrams:
            await client.use_datagrams()
            assert client._session is not None
        yield client
        assert (client._session is not None) is datagrams
    finally:
        await client.close()


def both_kinds(test: Callable[[Security], Coroutine[Any, Any, None]]) -> Any:
    """Run a coroutine of a test over TCP and over TLS."""

    @pytest.mark.parametrize("make", [Security, Security.temporary], ids=["tcp", "tls"])
    def run(make: Callable[[], Security]) -> None:
        asyncio.run(test(make()))

    return run


def every_kind(test: Callable[[Security, bool], Coroutine[Any, Any, None]]) -> Any:
    """Run a coroutine of a test over TCP and TLS, and with payloads as datagrams beside either."""

    @pytest.mark.parametrize("datagrams", [False, True], ids=["stream", "datagrams"])
    @pytest.mark.parametrize("make", [Security, Security.temporary], ids=["tcp", "tls"])
    def run(make: Callable[[], Security], datagrams: bool) -> None:
        asyncio.run(test(make(), datagrams))

    return run


@every_kind
async def test_what_is_pulled_is_the_head_s_buffer_and_writable(security: Security, datagrams: bool) -> None:
    async with serving(security) as (head, store, address), connected(address, security, datagrams) as client:
        step, flat = await client.pull(LEASE)
        assert step == 7
        assert torch.equal(flat, head.flat)
        flat.zero_()
        assert head.flat[1] == 1
        assert store.bytes_down == 4 * SIZE


@every_kind
async def test_what_is_pushed_arrives_with_its_header(security: Security, datagrams: bool) -> None:
    async with serving(security) as (head, store, address), connected(address, security, datagrams) as client:
        flat = torch.randn(SIZE)
        header = PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")]))
        assert await client.push(header, flat) == Receipt(Reply.ACCEPTED)
        ((pushed, values),) = head.pushed
        assert pushed == header
        assert torch.equal(values, flat)
        assert store.bytes_up == 4 * SIZE


@both_kinds
async def test_parts_are_pulled_and_pushed_in_any_order(security: Security) -> None:
    async with serving(security) as (head, store, address), connected(address, security) as client:
        step, none = await client.pull(LEASE, 0, 0)
        assert (step, len(none)) == (7, 0)
        _, middle = await client.pull(LEASE, 10, 1_000_010)
        assert torch.equal(middle, head.flat[10:1_000_010])
        assert store.bytes_down == 4_000_000
        flat = torch.randn(SIZE)
        header = PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")]))
        assert await client.part(header, 8_000_000, flat[2_000_000:]) is Reply.ACCEPTED
        assert await client.push(header, None) == Receipt(Reply.WRONG_SHAPE)  # the rest is missing
        assert await client.part(header, 0, flat[:2_000_000]) is Reply.ACCEPTED
        assert await client.push(header, None) == Receipt(Reply.ACCEPTED)
        ((pushed, values),) = head.pushed
        assert pushed == header
        assert torch.equal(values, flat)
        other = PushHeader(LeaseId("run", 1, 2, 3, 5), 9, 1.5, 0)
        assert await client.part(other, 0, flat[:5]) is Reply.NOT_LEASED


@both_kinds
async def test_what_is_large_goes_in_parts_from_its_beginning_on(security: Security) -> None:
    async with serving(security) as (head, _, address), connected(address, security) as client:
        flat = torch.randn(SIZE)
        header = PushHeader(LEASE, 9, 1.5, 0)  # the checksum is wrong: it stays where it is
        assert await client.push(header, flat) == Receipt(Reply.CORRUPT)
        frames = head.parts.payload(LEASE.attempt, (9, True))
        assert {len(frame) for frame in frames[:PARTS_AT_ONCE]} == {PART_BYTES}  # no rate is known yet
        assert all(len(frame) <= MAX_PART_BYTES for frame in frames)
        assert b"".join(frames) == flat.numpy().tobytes()
        other = PushHeader(LeaseId("run", 1, 2, 3, 5), 9, 1.5, 0)
        assert await client.push(other, flat) == Receipt(Reply.NOT_LEASED)  # and that at the first part
        assert head.parts.payload(5, (9, True)) == []


@every_kind
async def test_pushes_that_are_damaged_on_the_way_are_refused(security: Security, datagrams: bool) -> None:
    async with serving(security) as (head, _, address), connected(address, security, datagrams) as client:
        flat = torch.zeros(SIZE)
        digest = checksum([flat.numpy().data.cast("B")])
        assert await client.push(PushHeader(LEASE, 9, 1.5, digest + 1), flat) == Receipt(Reply.CORRUPT)
        assert await client.push(PushHeader(LEASE, 8, 1.5, digest), flat[1:]) == Receipt(Reply.WRONG_SHAPE)
        flat[5] = np.nan
        digest = checksum([flat.numpy().data.cast("B")])
        assert await client.push(PushHeader(LEASE, 9, 1.5, digest), flat) == Receipt(Reply.NOT_FINITE)
        assert head.pushed == []


@both_kinds
async def test_an_acceptable_part_ends_a_push_and_missing_rows_are_reported_and_sent_later(security: Security) -> None:
    async with serving(security) as (head, _, address), connected(address, security, datagrams=True) as client:
        flat = torch.randn(SIZE)
        pieces = -(-4 * SIZE // PAYLOAD)
        head.bound = 40 * PAYLOAD, 0.8
        header = PushHeader(LEASE, 9, 1.5, 0)
        receipt = await client.push(header, flat, prompt=0)
        assert receipt.reply is Reply.ACCEPTED
        missing = np.unpackbits(np.frombuffer(receipt.missing, np.uint8), count=pieces, bitorder="little")
        assert 0 < missing.sum() <= 0.2 * pieces
        assert not missing[:40].any()
        assert await client.late_rows(LEASE, torch.full((256,), 5, dtype=torch.uint8)) is Reply.ACCEPTED
        assert head.late_count == [bytes([5]) * 256]


@both_kinds
async def test_a_push_in_datagrams_that_is_announced_again_is_answered_again(security: Security) -> None:
    async with serving(security) as (head, _, address), connected(address, security, datagrams=True) as client:
        flat = torch.randn(SIZE)
        header = PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")]))
        assert await client.push(header, flat) == Receipt(Reply.ACCEPTED)
        again = client._rpc.push_datagrams(header=as_message(header), size=4 * SIZE, transfer_id=(1, 1))
        answer = await asyncio.wait_for(again, 5)
        assert (answer["silent"], answer["reply"]) == ("", Reply.ACCEPTED)
        assert (len(head.pushed), head.answers) == (1, 1)


@both_kinds
async def test_a_push_in_datagrams_that_nobody_waits_for_any_more_ends_and_says_what_is_missing(
    security: Security,
) -> None:
    async with serving(security) as (head, _, address), connected(address, security, datagrams=True) as client:
        head.wanted = False
        flat = torch.randn(SIZE)
        header = PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")]))
        receipt = await asyncio.wait_for(client.push(header, flat), 60)
        missing = np.unpackbits(np.frombuffer(receipt.missing, np.uint8), bitorder="little")
        assert 0 < missing.sum() < -(-4 * SIZE // PAYLOAD)
        assert head.pushed == []


@both_kinds
async def test_rows_of_a_push_refused_as_late_may_still_be_wanted(security: Security) -> None:
    async with serving(security) as (head, _, address), connected(address, security) as client:
        head.late = True
        header = PushHeader(LEASE, 9, 1.5, 0)
        assert await client.push(header, torch.randn(SIZE)) == Receipt(Reply.DUPLICATE, b"\x01")


@both_kinds
async def test_a_worker_that_is_gone_frees_its_admission_slots(security: Security) -> None:
    async with serving(security) as (_, store, address), connected(address, security) as client:
        for attempt in range(MIN_HOLDERS):  # of workers that die before they send
            await client._rpc.admit_push(holder=holder_of(replace(LEASE, attempt=attempt)))
        flat = torch.randn(SIZE)
        pushing = asyncio.create_task(
            client.push(PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")])), flat)
        )
        await asyncio.sleep(0.2)
        assert not pushing.done()
        store.attempt_ended(replace(LEASE, attempt=0))
        assert await asyncio.wait_for(pushing, HOLDER_SILENCE_SECONDS - 1) == Receipt(Reply.ACCEPTED)


@both_kinds
async def test_a_refused_push_in_datagrams_keeps_nobody_waiting(security: Security) -> None:
    async with serving(security) as (_, _, address), connected(address, security, datagrams=True) as client:
        other = PushHeader(LeaseId("run", 1, 2, 3, 5), 9, 1.5, 0)
        answer = asyncio.wait_for(client.push(other, torch.randn(SIZE)), 5)
        assert await answer == Receipt(Reply.NOT_LEASED)
        assert client._session is not None


@both_kinds
async def test_a_client_that_receives_no_datagram_falls_back_to_tcp(security: Security) -> None:
    async with serving(security) as (head, store, address), connected(address, security, datagrams=True) as client:
        assert store._datagram_server._endpoint is not None
        assert client._session is not None
        flat = torch.randn(SIZE)
        store._datagram_server._endpoint.end(1)  # as if a firewall had forgotten the path
        header = PushHeader(LEASE, 9, 1.5, checksum([flat.numpy().data.cast("B")]))
        assert await client.push(header, flat) == Receipt(Reply.ACCEPTED)
        assert client._session is None
        ((_, values),) = head.pushed
        assert torch.equal(values, flat)
        _, pulled = await client.pull(LEASE)
        assert torch.equal(pulled, head.flat)
        await client.use_datagrams()  # the worker's next try is a session of its own


@both_kinds
async def test_heartbeats_the_program_and_refusals(security: Security) -> None:
    async with serving(security) as (head, _, address), connected(address, security) as client:
        other = LeaseId("run", 1, 2, 3, 5)
        assert await client.program() == b"a program"
        assert await client.beat(LEASE, 3, "train") is Reply.ACCEPTED
        assert await client.beat(other, 4, "move") is Reply.STALE_ROUND
        assert head.beats == [(3, "train"), (4, "move")]
        assert await client.stream_position(LEASE) == "behind batch 9"
        with pytest.raises(RefusedError, match="pull of subnet 3, round 2: not-leased"):
            await client.pull(other)
        with pytest.raises(RefusedError, match="stream of subnet 3, round 2: not-leased"):
            await client.stream_position(other)


@both_kinds
async def test_join_returns_the_lockstep_group_or_why_there_is_none(security: Security) -> None:
    async with serving(security) as (_, _, address), connected(address, security) as client:
        assert await client.join(LEASE, "tcp://me", {0, 20, 10}, "why") == LockstepGroup(3, 20, ("tcp://me", "why"))
        assert await client.join(LeaseId("run", 1, 2, 3, 5), "tcp://me", [1]) is Reply.DUPLICATE


def test_where_no_datagram_passes_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatagramProtocol, "_greet", lambda *_: None)
    monkeypatch.setattr(session_module, "SESSION_OPEN_SECONDS", 0.2)

    async def test() -> None:
        async with serving(Security()) as (head, _, address), connected(address, Security()) as client:
            await client.use_datagrams()
            assert client._session is None
            _, pulled = await client.pull(LEASE)
            assert torch.equal(pulled, head.flat)

    asyncio.run(test())


def test_a_store_listens_as_its_certificates_say() -> None:
    async def addresses() -> list[str]:
        result = []
        for security in (Security(), Security.temporary()):
            async with serving(security) as (_, _, address):
                result.append(address.split(":")[0])
        return result

    assert asyncio.run(addresses()) == ["tcp", "tls"]


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_without_the_cluster_s_certificates_there_is_no_talking_to_a_tls_store(scheme: str) -> None:
    """Neither in the clear nor with certificates of somebody else."""

    async def intrude() -> None:
        theirs = Security() if scheme == "tcp" else Security.temporary()
        async with serving(Security.temporary()) as (head, store, address):
            async with connected(address.replace("tls://", f"{scheme}://"), theirs) as client:
                with pytest.raises((OSError, RuntimeError, asyncio.TimeoutError)):
                    await asyncio.wait_for(client.beat(LEASE, 3, "train"), 3)
            assert head.beats == []
            assert store.bytes_down == store.bytes_up == 0

    asyncio.run(intrude())
