"""Send a run's view from its head to its scheduler's page for as long as the run lasts."""

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

PUBLISH_SECONDS = 0.5  # often enough for people; costs the scheduler a message of some 30 KB with 100 workers
PUBLISH_SHARE = 0.02  # of the head's time that views may take: those of thousands of workers are sent less often
MOST_PUBLISH_SECONDS = 2.0  # or the page says that the head is silent
LAST_PUBLISH_SECONDS = 2.0


class DashboardAddress(NamedTuple):
    """The URL of a run's dashboard, and a note for the user about it ("" if there is nothing to say)."""

    url: str
    note: str


async def page_of(client: Client, *, first_port: int | None) -> DashboardAddress:
    """Return where a dashboard shows the run: idletrain's page, or Dask's own if the scheduler does not serve that.

    Args:
        client: An asynchronous client.
        first_port: The port that idletrain's own scheduler tries first, or None for another scheduler. The dashboard
            of idletrain's own listens on loopback alone and adds the page on the first request.
    """
    link = urllib.parse.urlsplit(whole_link(client.dashboard_link, client.scheduler.address))
    if first_port is not None:
        note = "" if link.port == first_port else f"port {first_port} is in use"
        return DashboardAddress(f"http://127.0.0.1:{link.port}/idletrain", note)
    if await client.get_metadata([PAGE_KEY], False):
        return DashboardAddress(link.geturl().replace("/status", "/idletrain"), "")
    return DashboardAddress(
        link.geturl(), "for idletrain's own page, start `dask scheduler --preload idletrain.observe.page`"
    )


def whole_link(link: str, scheduler: str) -> str:
    """Return Dask's link to a dashboard with the whole host: of an IPv6 address Dask keeps one bracket alone."""
    host = scheduler.partition("://")[2].rpartition(":")[0]
    return link.replace("://[:", f"://{host}:")


@contextlib.asynccontextmanager
async def publishing(client: Client, summary: Summary, *, allow_control: bool) -> AsyncIterator[None]:
    """Keep the page up to date within the context, and send the final view at its end."""

    async def send() -> float:
        """Send the view; return the seconds that it took to make."""
        started = time.thread_time()
        view = json.dumps(view_of(summary, time.time(), allow_control=allow_control and summary.status == "running"))
        seconds = time.thread_time() - started
        await client.set_metadata([VIEW_KEY], view)
        return seconds

    async def repeat() -> None:
        while True:
            seconds = 0.0
            if summary.status != "starting":
                with contextlib.suppress(OSError):  # a lost scheduler is handled elsewhere
                    seconds = await send()
            await asyncio.sleep(min(max(PUBLISH_SECONDS, seconds / PUBLISH_SHARE), MOST_PUBLISH_SECONDS))

    sending = asyncio.ensure_future(repeat())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        if client.status == "running":
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(send(), LAST_PUBLISH_SECONDS)
