"""Dask's comm layer and the exchange, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from distributed.security import Security

from idletrain.fabric.measuring import comms
from idletrain.fabric.measuring.sockets import Stream

TOKEN = "t" * 32
SIZE = 1_000_000


async def moved(over: str, token: str = TOKEN, nodes: int = 1) -> list[Stream]:
    temporary, cluster = Security.temporary(), Security()
    posts = comms.ProbeServers(TOKEN)
    await posts.open("127.0.0.1", cluster, temporary, plain=True)

    def by_one() -> Awaitable[Stream]:
        if over in ("pull", "push"):
            move = comms.pulled if over == "pull" else comms.pushed
            return move(posts.addresses["store"], cluster, token, SIZE, 3)
        return comms.sent(posts.addresses[over], temporary if over == "dask tls" else None, token, SIZE, 3)

    try:
        return await asyncio.gather(*(by_one() for _ in range(nodes)))
    finally:
        await posts.close()


@pytest.mark.parametrize("over", ["dask", "dask tls", "pull", "push"])
def test_every_way_moves_what_it_is_asked_to(over: str) -> None:
    (found,) = asyncio.run(moved(over))
    assert len(found.rates) == 3
    assert min(found.rates) > 1e6
    assert found.moved_bytes == 4 * SIZE


@pytest.mark.parametrize("over", ["dask", "pull", "push"])
def test_another_measurement_s_token_is_refused(over: str) -> None:
    with pytest.raises(Exception, match=r"token|not-leased"):
        asyncio.run(moved(over, "another"))


@pytest.mark.parametrize("over", ["pull", "push"])
def test_several_at_once_do_not_get_in_each_other_s_way(over: str) -> None:
    found = asyncio.run(moved(over, nodes=4))
    assert [stream.moved_bytes for stream in found] == [4 * SIZE] * 4
