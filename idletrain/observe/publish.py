"""Sends what there is to show of a run from its head to its scheduler's page, as long as the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from distributed import Client

from idletrain.observe.page import PAGE, VIEW
from idletrain.observe.summary import Summary
from idletrain.observe.view import view_of

EVERY_SECONDS = 0.5  # a person sees no more, and it costs the scheduler one message of some 30 KB with 100 workers
LAST_SECONDS = 2.0


async def page_of(client: Client, *, ours: bool) -> str:
    """Where a cluster's dashboard shows the run: idletrain's page, or Dask's own where its scheduler does not have it.

    Args:
        client: An asynchronous client.
        ours: Whether the scheduler is idletrain's, which adds the page a moment after its first worker.
    """
    link: str = client.dashboard_link
    if ours:  # on its machine's loopback, whatever address workers reach it at
        return f"http://127.0.0.1:{urlsplit(link).port}/idletrain"
    return link.replace("/status", "/idletrain") if await client.get_metadata([PAGE], False) else link


@contextlib.asynccontextmanager
async def publishing(client: Client, summary: Summary, *, allow_control: bool) -> AsyncIterator[None]:
    """Keep the page up to date while the context lasts, and leave it as the run ended."""

    async def send() -> None:
        view = view_of(summary, time.time(), allow_control=allow_control and summary.status == "running")
        await client.set_metadata([VIEW], json.dumps(view))

    async def keep() -> None:
        while True:
            if summary.status != "starting":
                with contextlib.suppress(OSError):  # a scheduler that is gone is noticed elsewhere
                    await send()
            await asyncio.sleep(EVERY_SECONDS)

    keeping = asyncio.ensure_future(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if client.status == "running":
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(send(), LAST_SECONDS)
