"""Letters between workers: over real connections, to peers that go or fall silent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from distributed.core import Server
from distributed.security import Security

from idletrain.exchange.peers import OPERATION, TOPICS_KEPT, CutOffError, Mailbox, PeerLinks

TO = ("run", 1, 2, 3)


@asynccontextmanager
async def group(members: int, security: Security, patience: float = 5.0) -> AsyncIterator[list[PeerLinks]]:
    boxes = [Mailbox() for _ in range(members)]
    servers = [Server({OPERATION: box.put}, deserialize=False) for box in boxes]
    scheme = "tls" if security.require_encryption or security.tls_worker_cert else "tcp"
    for server in servers:
        await server.listen(f"{scheme}://127.0.0.1:0", **security.get_listen_args("worker"))
    addresses = [server.address for server in servers]
    args = security.get_connection_args("worker")
    links = [await PeerLinks.open(box, TO, k, addresses, patience, args) for k, box in enumerate(boxes)]
    try:
        yield links
    finally:
        for link in links:
            await link.close()
        for server in servers:
            await server.close()


def both_kinds(test: Callable[[Security], Coroutine[Any, Any, None]]) -> Any:
    @pytest.mark.parametrize("make", [Security, Security.temporary], ids=["tcp", "tls"])
    def run(make: Callable[[], Security]) -> None:
        asyncio.run(asyncio.wait_for(test(make()), 30))

    return run


@both_kinds
async def test_every_member_gets_what_the_others_sent_to_it(security: Security) -> None:
    async with group(3, security) as links:
        for turn in range(20):  # also where one is ahead by a message
            messages = [[f"{turn}:{i}>{k}".encode() * 5000 for k in range(3)] for i in range(3)]
            received = await asyncio.gather(*(link.swap(messages[i]) for i, link in enumerate(links)))
            assert received == [[messages[i][k] for i in range(3)] for k in range(3)]
        assert links[0].sent_bytes == sum(2 * 5000 * len(f"{turn}:0>1") for turn in range(20))


@both_kinds
async def test_a_member_that_waits_for_one_that_leaves_fails(security: Security) -> None:
    async with group(3, security, patience=60.0) as links:
        waiting = [asyncio.ensure_future(link.swap([b"x"] * 3)) for link in links[:2]]
        await asyncio.sleep(0.1)
        await links[2].close()
        for who in waiting:
            with pytest.raises(CutOffError):
                await who
        assert not [link for link in links[:2] if link.sent_bytes != 2]


@both_kinds
async def test_who_waits_for_a_silent_member_gives_up(security: Security) -> None:
    async with group(2, security, patience=0.5) as links:
        with pytest.raises(CutOffError, match="no message in"):
            await links[0].swap([b"x"] * 2)


def test_a_member_that_cannot_be_reached_is_named() -> None:
    async def scene() -> None:
        nobody = "tcp://127.0.0.1:1"
        with pytest.raises(CutOffError, match=nobody):
            await PeerLinks.open(Mailbox(), TO, 0, ["tcp://127.0.0.1:2", nobody], 0.5, {})

    asyncio.run(scene())


def test_messages_of_other_groups_are_not_taken_and_do_not_pile_up() -> None:
    async def scene() -> None:
        box = Mailbox()
        box.put(["run", 1, 2, 4], 0, 1, b"of the next group")
        assert box.take(TO, 0, 1) is None
        assert box.take(("run", 1, 2, 4), 0, 1) == b"of the next group"
        box.put(list(TO), 0, 1, b"too late")
        box.forget(TO)
        assert box.take(TO, 0, 1) is None
        for group in range(100):
            box.put(["run", 1, 2, group], 0, 1, b"of who has left")
        remaining = [group for group in range(100) if box.take(("run", 1, 2, group), 0, 1)]
        assert remaining == list(range(100 - TOPICS_KEPT, 100))

    asyncio.run(scene())


def test_a_peer_that_accepts_and_says_nothing_is_given_up() -> None:
    """Dask bounds the connection, not its own handshake: a stopped process's kernel accepts."""

    async def scene() -> None:
        silent = socket.create_server(("127.0.0.1", 0))
        try:
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(CutOffError, match="cannot be reached"):
                await PeerLinks.open(Mailbox(), TO, 1, [address, "tcp://127.0.0.1:1"], 0.5, {})
        finally:
            silent.close()

    asyncio.run(asyncio.wait_for(scene(), 10))
