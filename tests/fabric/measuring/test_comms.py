"""Transfers over Dask's comm layer and the exchange on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from distributed.security import Security

from idletrain.fabric.measuring import comms
from idletrain.fabric.measuring.sockets import Stream

TOKEN = "t" * 32
SIZE = 1_000_000


async def moved(transport: str, token: str = TOKEN, nodes: int = 1) -> list[Stream]:
    temporary, cluster = Security.temporary(), Security()
    servers = comms.ProbeServers(TOKEN)
    await servers.open("127.0.0.1", cluster, temporary, plain=True)

    def by_one() -> Awaitable[Stream]:
        if transport in ("pull", "push"):
            move = comms.pulled if transport == "pull" else comms.pushed
            return move(servers.addresses["store"], cluster, token, SIZE, 3)
        return comms.sent(servers.addresses[transport], temporary if transport == "dask tls" else None, token, SIZE, 3)

    try:
        return await asyncio.gather(*(by_one() for _ in range(nodes)))
    finally:
        await servers.close()


@pytest.mark.parametrize("transport", ["dask", "dask tls", "pull", "push"])
def test_every_transport_moves_all_bytes(transport: str) -> None:
    (streams,) = asyncio.run(moved(transport))
    assert len(streams.rates) == 3
    assert min(streams.rates) > 1e6
    assert streams.moved_bytes == 4 * SIZE


@pytest.mark.parametrize("transport", ["dask", "pull", "push"])
def test_another_measurement_s_token_is_refused(transport: str) -> None:
    with pytest.raises(Exception, match=r"token|not-leased"):
        asyncio.run(moved(transport, "another"))


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_concurrent_transfers_do_not_disturb_each_other(transport: str) -> None:
    streams = asyncio.run(moved(transport, nodes=4))
    assert [stream.moved_bytes for stream in streams] == [4 * SIZE] * 4
