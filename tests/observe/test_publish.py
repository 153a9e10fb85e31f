"""What the head sends to its scheduler's page."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from distributed import Client, Scheduler
from test_summary import CHURN
from test_view import stamped

from idletrain.observe.page import PAGE, VIEW
from idletrain.observe.publish import page_of, publishing
from idletrain.observe.summary import Summary

Shown = dict[str, Any]


async def until(scheduler: Scheduler, what: Any) -> Shown:
    for _ in range(200):
        view: Shown = json.loads(scheduler.get_metadata([VIEW], "{}"))
        if view and what(view):
            return view
        await asyncio.sleep(0.02)
    raise AssertionError("the view did not come")


def test_a_scheduler_has_the_newest_view_and_in_the_end_the_last() -> None:
    async def check() -> None:
        summary = Summary()
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            async with publishing(client, summary, allow_control=True):
                for event in stamped(CHURN[:5]):
                    summary.add(event)
                view = await until(scheduler, lambda view: view["run"] == "demo")
                assert view["allow_control"]
                for event in stamped(CHURN[5:-2]):
                    summary.add(event)
                view = await until(scheduler, lambda view: view["rounds"] == 1)
                assert view["accuracy"] == 0.8
                for event in stamped(CHURN[-2:]):
                    summary.add(event)
            view = json.loads(scheduler.get_metadata([VIEW]))
            assert view["status"] == "completed"
            assert not view["allow_control"]

    asyncio.run(check())


def test_the_page_is_where_the_scheduler_has_it() -> None:
    async def check() -> None:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            assert (await page_of(client, ours=False)).endswith("/status")
            assert (await page_of(client, ours=True)).endswith("/idletrain")
            scheduler.set_metadata([PAGE], True)
            assert await page_of(client, ours=False) == f"http://127.0.0.1:{scheduler.http_server.port}/idletrain"

    asyncio.run(check())
