"""Dask's comm layer and the exchange, over loopback."""

from __future__ import annotations

import asyncio

import pytest
from distributed.security import Security

from idletrain.fabric import comms
from idletrain.fabric.sockets import Stream

TOKEN = "t" * 32
SIZE = 1_000_000


async def moved(over: str, token: str = TOKEN) -> Stream:
    temporary, cluster = Security.temporary(), Security()
    posts = comms.Posts(TOKEN)
    await posts.open("127.0.0.1", temporary, cluster)
    try:
        if over in ("pull", "push"):
            move = comms.pulled if over == "pull" else comms.pushed
            return await move(posts.addresses["store"], cluster, token, SIZE, 3)
        security = temporary if over == "dask tls" else None
        return await comms.sent(posts.addresses[over], security, token, SIZE, 3)
    finally:
        await posts.close()


@pytest.mark.parametrize("over", ["dask", "dask tls", "pull", "push"])
def test_every_way_moves_what_it_is_asked_to(over: str) -> None:
    found = asyncio.run(moved(over))
    assert len(found.rates) == 3
    assert min(found.rates) > 1e6
    assert found.moved_bytes == 4 * SIZE


@pytest.mark.parametrize("over", ["dask", "pull", "push"])
def test_another_measurement_s_token_is_refused(over: str) -> None:
    with pytest.raises(Exception, match=r"token|not-leased"):
        asyncio.run(moved(over, "another"))
