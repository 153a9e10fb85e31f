"""What the head sends to its scheduler's page."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest
from distributed import Client, Scheduler
from test_status import stamped
from test_summary import CHURN

from idletrain.observe import dashboard_feed
from idletrain.observe.dashboard_feed import page_of, publishing, whole_link
from idletrain.observe.page import PAGE_KEY, VIEW_KEY
from idletrain.observe.summary import Summary

Shown = dict[str, Any]


async def until(scheduler: Scheduler, what: Any) -> Shown:
    for _ in range(200):
        view: Shown = json.loads(scheduler.get_metadata([VIEW_KEY], "{}"))
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
            view = json.loads(scheduler.get_metadata([VIEW_KEY]))
            assert view["status"] == "completed"
            assert not view["allow_control"]

    asyncio.run(check())


def test_views_that_take_long_to_make_are_sent_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of 20 ms may be made once a second, not twice."""
    made: list[float] = []

    def slow(*_: Any, **__: Any) -> Shown:
        made.append(time.monotonic())
        started = time.thread_time()
        while time.thread_time() - started < 0.02:
            pass
        return {"run": "demo"}

    async def check() -> None:
        monkeypatch.setattr(dashboard_feed, "view_of", slow)
        summary = Summary()
        for event in stamped(CHURN[:5]):
            summary.add(event)
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
            publishing(client, summary, allow_control=True),
        ):
            while len(made) < 3:
                await asyncio.sleep(0.02)

    asyncio.run(check())
    assert all(after - before > 0.9 for before, after in itertools.pairwise(made[:3]))


def test_the_page_is_where_the_scheduler_has_it_and_a_scheduler_without_is_told_how_to_get_it() -> None:
    async def check() -> None:
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            at = f"http://127.0.0.1:{scheduler.http_server.port}"
            stock = await page_of(client, first_port=None)
            assert stock.url == f"{at}/status"
            assert "--preload idletrain.observe.page" in stock.note
            scheduler.set_metadata([PAGE_KEY], True)
            assert await page_of(client, first_port=None) == (f"{at}/idletrain", "")

    asyncio.run(check())


def test_our_own_page_is_on_loopback_wherever_the_scheduler_is_and_a_port_that_was_taken_is_reported() -> None:
    async def check() -> None:
        async with (
            Scheduler(host="127.0.0.9", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
            Client(scheduler.address, asynchronous=True, set_as_default=False) as client,
        ):
            url = f"http://127.0.0.1:{scheduler.http_server.port}/idletrain"
            assert await page_of(client, first_port=8787) == (url, "port 8787 is in use")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("link", "scheduler", "right"),
    [
        ("http://[:8787/status", "tcp://[::1]:8786", "http://[::1]:8787/status"),
        ("http://127.0.0.1:8787/status", "tcp://127.0.0.1:8786", "http://127.0.0.1:8787/status"),
        ("https://hub.example/proxy/8787/status", "tls://[fd00::2]:8786", "https://hub.example/proxy/8787/status"),
    ],
)
def test_a_link_has_the_schedulers_whole_address(link: str, scheduler: str, right: str) -> None:
    assert whole_link(link, scheduler) == right
