"""A dashboard opens for who has its token, and does nothing for other pages, names and users."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from idletrain.cluster import dashboard_guard
from idletrain.cluster.dashboard_guard import Visit, guard, why_refused

TOKEN = "0123456789abcdef"
HERE = "127.0.0.1:8787"
OWN = f"http://{HERE}"


@pytest.mark.parametrize(
    "visit",
    [
        Visit("GET", HERE, link=TOKEN),
        Visit("GET", HERE, cookie=TOKEN),
        Visit("GET", HERE, origin=OWN, cookie=TOKEN),
        Visit("GET", "localhost:9", cookie=TOKEN),
        Visit("GET", "[::1]:9", cookie=TOKEN),
        Visit("POST", HERE, origin=OWN, cookie=TOKEN),
        Visit("POST", HERE, bearer=TOKEN),
        Visit("GET", HERE, link="old", cookie=TOKEN),
    ],
)
def test_its_owner_is_let_in(visit: Visit) -> None:
    assert why_refused(visit, TOKEN) is None


@pytest.mark.parametrize(
    ("visit", "reason"),
    [
        (Visit("GET", HERE), "open the link with the token"),
        (Visit("GET", HERE, link="wrong", cookie="wrong", bearer="wrong"), "open the link with the token"),
        (Visit("GET", HERE, link="ünicode"), "open the link with the token"),
        (Visit("GET", "evil.example:8787", link=TOKEN, cookie=TOKEN), "not by another name"),
        (Visit("GET", "", cookie=TOKEN), "not by another name"),
        (Visit("GET", "127.0.0.1.evil.example", cookie=TOKEN), "not by another name"),
        (Visit("GET", HERE, origin="http://127.0.0.1:9999", cookie=TOKEN), "another page sent this"),
        (Visit("POST", HERE, origin="null", cookie=TOKEN), "another page sent this"),
        (Visit("POST", HERE, origin="https://evil.example", cookie=TOKEN, bearer=TOKEN), "another page sent this"),
        (Visit("POST", HERE, cookie=TOKEN), "no page sent this request"),
        (Visit("POST", HERE, origin=OWN, link=TOKEN), "open the link with the token"),
        (Visit("DELETE", HERE, cookie=TOKEN), "no page sent this request"),
    ],
)
def test_others_are_not(visit: Visit, reason: str) -> None:
    assert reason in (why_refused(visit, TOKEN) or "let in")


class Page(RequestHandler):
    def check_xsrf_cookie(self) -> None:
        pass

    def get(self, name: str) -> None:
        self.write(f"page {name}")

    def post(self, name: str) -> None:
        self.write(f"done {name}")


Ask = Callable[..., Awaitable[tuple[int, dict[str, str], str]]]


def guarded(check: Callable[[int, Ask], Awaitable[None]]) -> None:
    async def run() -> None:
        server = HTTPServer(Application([(r"/(.*)", Page)]))
        guard(server, TOKEN)
        server.listen(0, "127.0.0.1")
        port: int = next(iter(server._sockets.values())).getsockname()[1]

        def ask(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read().decode()
            finally:
                connection.close()

        try:
            await check(port, lambda *words, **headers: asyncio.to_thread(ask, *words, **headers))
        finally:
            server.stop()
            await server.close_all_connections()

    asyncio.run(run())


def test_the_link_leads_to_a_cookie_and_the_cookie_to_all_pages() -> None:
    async def check(port: int, ask: Ask) -> None:
        status, headers, _ = await ask("GET", f"/status?tab=1&token={TOKEN}")
        assert (status, headers["Location"]) == (302, "/status?tab=1")
        cookie, *rules = (part.strip() for part in headers["Set-Cookie"].split(";"))
        assert cookie == f"idletrain-{port}={TOKEN}"
        assert {rule.lower() for rule in rules} >= {"httponly", "samesite=strict"}
        assert (await ask("GET", "/status?tab=1", Cookie=cookie))[::2] == (200, "page status")
        own = f"http://127.0.0.1:{port}"
        assert (await ask("POST", "/kill", b"{}", Cookie=cookie, Origin=own))[::2] == (200, "done kill")
        assert (await ask("GET", "/metrics", Authorization=f"Bearer {TOKEN}"))[::2] == (200, "page metrics")
        for refused in (
            await ask("GET", "/status"),
            await ask("GET", "/nowhere?token=wrong"),
            await ask("GET", "/status", Cookie=cookie, Host="evil.example"),
            await ask("GET", f"/status?token={TOKEN}", Host="evil.example"),
            await ask("POST", "/kill", b"{}"),
            await ask("POST", "/kill", b"{}", Cookie=cookie),
            await ask("POST", "/kill", b"{}", Cookie=cookie, Origin="http://127.0.0.1:1"),
        ):
            assert refused[0] == 403
            assert refused[2].startswith("403: ")
            assert "Set-Cookie" not in refused[1]
            assert TOKEN not in refused[2]

    guarded(check)


def test_a_link_with_two_slashes_leads_to_no_other_host() -> None:
    async def check(_port: int, ask: Ask) -> None:
        _, headers, _ = await ask("GET", f"//evil.example/?token={TOKEN}")
        assert headers["Location"] == "/evil.example/"

    guarded(check)


def test_a_stranger_s_long_body_is_not_read() -> None:
    async def check(_port: int, ask: Ask) -> None:
        answer: Any = None
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            answer = await ask("POST", "/kill", b"x" * (dashboard_guard.REQUEST_BYTES + 1))
        assert answer is None or answer[0] == 400

    guarded(check)


def test_connections_that_ask_nothing_end_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_guard, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(dashboard_guard, "MAX_CONNECTIONS", 3)

    def closed(stranger: socket.socket, seconds: float) -> bool:
        stranger.settimeout(seconds)
        try:
            return stranger.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async def check(port: int, ask: Ask) -> None:
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
            ends = await asyncio.gather(*(asyncio.to_thread(closed, stranger, 0.5) for stranger in silent))
            assert ends == [False, False, False, True, True]
            assert all(await asyncio.gather(*(asyncio.to_thread(closed, stranger, 5.0) for stranger in silent)))
        assert (await ask("GET", "/status", Authorization=f"Bearer {TOKEN}"))[0] == 200

    guarded(check)
