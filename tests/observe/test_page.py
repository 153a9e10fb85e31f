"""The page on a scheduler's dashboard, its metrics, and its buttons' answers. (A browser sees it in tests/chaos.)"""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from distributed import Scheduler
from prometheus_client.parser import text_string_to_metric_families
from test_status import evaluated, stamped
from test_summary import CHURN, event, summary_of

from idletrain.observe import page as page_module
from idletrain.observe.page import VIEW_KEY, request_refusal
from idletrain.observe.status import view_of

Get = Callable[..., Awaitable[tuple[int, str]]]


def view(**changes: Any) -> dict[str, Any]:
    begun = {**CHURN[0], "better": {"f1": "higher"}}
    running = [begun, *CHURN[1:-2], evaluated(8.6, 1, f1=0.75), event("waiting", 9.0, reason="<b>why</b>")]
    return view_of(summary_of(stamped(running)), 1009.0, **changes)


def on_a_scheduler(check: Callable[[Any, Get], Awaitable[None]]) -> None:
    """Run a check with a scheduler that has the page as a preload, as `dask scheduler --preload` adds it."""

    async def run() -> None:
        async with Scheduler(
            host="127.0.0.1",
            port=0,
            dashboard=True,
            dashboard_address="127.0.0.1:0",
            preload=["idletrain.observe.page"],
        ) as scheduler:
            base = f"http://127.0.0.1:{scheduler.http_server.port}"

            def ask(path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
                request = urllib.request.Request(base + path, body, headers or {})
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    with error:
                        return error.code, error.read().decode()

            await check(scheduler, lambda *arguments: asyncio.to_thread(ask, *arguments))

    asyncio.run(run())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # bokeh's own
def test_the_page_stands_in_dask_s_dashboard_with_a_link_and_stock_pages_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(scheduler: Any, get: Get) -> None:
        code, empty = await get("/idletrain")
        assert code == 200
        assert "No run has started" in empty
        scheduler.set_metadata([VIEW_KEY], json.dumps(view()))
        _, page = await get("/idletrain")
        assert '<a href="idletrain">Idletrain</a>' in page
        assert '<a href="status">Status</a>' in page
        assert 'data-key="accuracy">0.1000' in page
        assert 'data-key="metrics.f1">0.7500<small>higher is better' in page
        assert "<figcaption>f1 <span>over rounds; higher is better" in page
        assert "&lt;b&gt;why&lt;/b&gt;" in page
        assert "data-ask" not in page.partition("<script>")[0]
        assert json.loads((await get("/idletrain/view.json"))[1])["accuracy"] == 0.1
        _, now = await get("/idletrain/now")
        assert now in page
        for stock in ("/status", "/workers", "/tasks", "/groups", "/info/main/workers.html", "/health"):
            code, content = await get(stock)
            assert code == 200, stock
            if stock in ("/status", "/workers", "/tasks", "/groups"):
                assert '<a href="idletrain">Idletrain</a>' in content, stock
        families = {family.name: family for family in text_string_to_metric_families((await get("/metrics"))[1])}
        assert families["idletrain_rounds"].samples[0].value == 1
        assert "dask_scheduler_clients" in families
        code, answer = await get("/idletrain/kill", b"{}", {"X-Idletrain": "kill"})
        assert (code, answer) == (403, "403: the run was not started with --allow-control")
        scheduler.set_metadata([VIEW_KEY], json.dumps(view(allow_control=True)))
        assert "data-ask" in (await get("/idletrain/now"))[1]
        assert (await get("/idletrain/kill", b"{}"))[0] == 403  # no header: another site's form could send that
        for body in (b"{}", b'{"worker": "tcp://10.0.0.1:1"}'):
            assert await get("/idletrain/drain", body, {"X-Idletrain": "drain"}) == (404, "404: that worker is gone")
        assert (await get("/idletrain/drain", b"[", {"X-Idletrain": "drain"}))[0] == 400
        assert (await get("/idletrain/explode", b"{}", {"X-Idletrain": "explode"}))[0] == 404
        assert "head is silent" not in (await get("/idletrain/now"))[1]
        monkeypatch.setattr(page_module, "PAGE_SILENCE_SECONDS", 0.0)
        await asyncio.sleep(1.1)
        assert "head is silent for 1 s" in (await get("/idletrain/now"))[1]

    on_a_scheduler(check)


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "[::1]:8787", "10.0.0.5", "localhost:1", socket.gethostname()])
def test_this_machine_s_names_may_control(host: str) -> None:
    assert request_refusal("kill", {"X-Idletrain": "kill", "Host": host}, {"allow_control": True}) is None


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"X-Idletrain": "kill", "Host": "evil.example:8787"}, "open the page by this machine's address"),
        ({"X-Idletrain": "drain", "Host": "127.0.0.1"}, "another page sent this request"),
        ({"Host": "127.0.0.1"}, "another page sent this request"),
    ],
)
def test_other_pages_and_names_may_not(headers: dict[str, str], reason: str) -> None:
    assert reason in (request_refusal("kill", headers, {"allow_control": True}) or "")


def test_nobody_may_without_the_run_s_consent() -> None:
    headers = {"X-Idletrain": "kill", "Host": "127.0.0.1"}
    assert request_refusal("kill", headers, {"allow_control": False}) == "the run was not started with --allow-control"
    assert request_refusal("kill", headers, {}) is not None
