"""A peer that shows no certificate is let go soon, and few of them at once take memory."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from distributed.core import Server, rpc

from idletrain.cluster import certificates, dask_settings, handshakes
from idletrain.cluster.identity import Identity

IDENTITIES = certificates.issue(
    "night", ("head", "worker"), datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
)
Streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


@contextlib.asynccontextmanager
async def strangers(server: Server, count: int) -> AsyncIterator[Streams]:
    """Connections that say nothing."""
    host, port = server.address.removeprefix("tls://").split(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


async def was_closed(reader: asyncio.StreamReader, seconds: float = 5.0) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await reader.read()  # with an alert of TLS, or nothing
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


async def who(server: Server, identity: Identity) -> str:
    arguments = identity.security().get_connection_args("worker")
    async with rpc(server.address, connection_args=arguments, timeout=10) as remote:
        answer: str = await remote.who()
        return answer


def with_server(check: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        dask_settings.apply()
        server = Server({"who": lambda: "head"})
        await server.listen("tls://127.0.0.1:0", **IDENTITIES["head"].security().get_listen_args("scheduler"))
        try:
            await check(server)
        finally:
            await server.close()

    asyncio.run(run())


def test_who_says_nothing_is_let_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", 0.3)

    async def check(server: Server) -> None:
        async with strangers(server, 3) as streams:
            for reader, _ in streams:
                assert await was_closed(reader)
        assert await who(server, IDENTITIES["worker"]) == "head"

    with_server(check)


def test_the_oldest_of_too_many_is_let_go_and_a_peer_still_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 4)

    async def check(server: Server) -> None:
        async with strangers(server, 6) as streams:
            for reader, _ in streams[:2]:
                assert await was_closed(reader)
            assert await who(server, IDENTITIES["worker"]) == "head"
            for reader, _ in streams[3:]:
                assert not await was_closed(reader, 0.2)

    with_server(check)


def test_refusals_are_logged_so_often_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshakes, "LOGGED_HANDSHAKES", 2)

    async def check(server: Server) -> None:
        async with strangers(server, 5) as streams:
            for reader, writer in streams:
                writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                assert await was_closed(reader)

    with_server(check)
    assert len([record for record in caplog.records if "no TLS handshake with" in record.message]) == 2
