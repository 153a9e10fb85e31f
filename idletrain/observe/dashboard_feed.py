"""Sends what there is to show of a run from its head to its scheduler's page, as long as the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import NamedTuple

from distributed import Client

from idletrain.observe.page import PAGE_KEY, VIEW_KEY
from idletrain.observe.status import view_of
from idletrain.observe.summary import Summary

PUBLISH_SECONDS = 0.5  # a person sees no more, and it costs the scheduler one message of some 30 KB with 100 workers
LAST_PUBLISH_SECONDS = 2.0


class DashboardAddress(NamedTuple):
    """A page's URL, and what there is to say of it."""

    url: str
    note: str


async def page_of(client: Client, *, first_port: int | None) -> DashboardAddress:
    """Where a cluster's dashboard shows the run: idletrain's page, or Dask's own where its scheduler does not have it.

    Args:
        client: An asynchronous client.
        first_port: The port that idletrain's own scheduler tries first, None for another's. Its dashboard listens on
            loopback alone, whatever address it has itself, and adds the page when it is asked for.
    """
    link = urllib.parse.urlsplit(client.dashboard_link)
    if first_port is not None:
        note = "" if link.port == first_port else f"port {first_port} is in use"
        return DashboardAddress(f"http://127.0.0.1:{link.port}/idletrain", note)
    if await client.get_metadata([PAGE_KEY], False):
        return DashboardAddress(link.geturl().replace("/status", "/idletrain"), "")
    return DashboardAddress(
        link.geturl(), "idletrain's own page comes with `dask scheduler --preload idletrain.observe.page`"
    )


@contextlib.asynccontextmanager
async def publishing(client: Client, summary: Summary, *, allow_control: bool) -> AsyncIterator[None]:
    """Keep the page up to date while the context lasts, and leave it as the run ended."""

    async def send() -> None:
        view = view_of(summary, time.time(), allow_control=allow_control and summary.status == "running")
        await client.set_metadata([VIEW_KEY], json.dumps(view))

    async def keep() -> None:
        while True:
            if summary.status != "starting":
                with contextlib.suppress(OSError):  # a scheduler that is gone is noticed elsewhere
                    await send()
            await asyncio.sleep(PUBLISH_SECONDS)

    keeping = asyncio.ensure_future(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if client.status == "running":
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(send(), LAST_PUBLISH_SECONDS)
