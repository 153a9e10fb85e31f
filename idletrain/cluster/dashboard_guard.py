"""Let only its owner see and use a dashboard: by a token in its link, then in a cookie, and from no other page.

All users of a machine can reach its loopback, and so can the pages of any site in the owner's browser. So the guard
stands before all pages, Dask's own too.
"""

from __future__ import annotations

import hmac
import urllib.parse
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.routing import Router
from tornado.web import Application, RequestHandler

from idletrain.observe.provenance import url_parts

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
READING = ("GET", "HEAD")
REQUEST_SECONDS = 10.0  # for a request's headers and body to arrive
REQUEST_BYTES = 1 << 16  # the longest body: the buttons send an address
MAX_CONNECTIONS = 100  # at once: a browser opens six a page


@dataclass(frozen=True)
class Visit:
    """The parts of a request that decide whether it is answered.

    Attributes:
        method: GET, POST, ...
        host: The host and port of the address that the browser opened.
        origin: The page that sent it, as browsers say for all but plain reading; "" if they do not.
        link: The token in the link; "" if there is none.
        cookie: The token in the cookie; "" if there is none.
        bearer: The token in the header `Authorization`; "" if there is none.
    """

    method: str
    host: str
    origin: str = ""
    link: str = ""
    cookie: str = ""
    bearer: str = ""


def why_refused(visit: Visit, token: str) -> str | None:
    """Return why a request is refused; None if it is its owner's."""
    if url_parts(f"//{visit.host}").hostname not in LOOPBACK_NAMES:
        return "open the page as 127.0.0.1 or localhost, not by another name"
    if visit.origin and url_parts(visit.origin).netloc != visit.host:
        return "another page sent this request; use this one's own links and buttons"
    reading = visit.method in READING
    if _same(visit.bearer, token) or (reading and _same(visit.link, token)):
        return None
    if not _same(visit.cookie, token):
        return "open the link with the token that `idletrain launch` and `idletrain status RUN` print"
    if not reading and not visit.origin:
        return "no page sent this request; use the page's buttons"
    return None


def guard(server: HTTPServer, token: str) -> None:
    """Put the guard before all that a server serves, and limit what strangers' connections can hold of its memory."""
    assert isinstance(server.request_callback, Application)
    server.request_callback = _Guard(server.request_callback, token)
    limits = server.conn_params
    limits.header_timeout = limits.body_timeout = REQUEST_SECONDS
    limits.max_body_size = REQUEST_BYTES
    accept, streams = server.handle_stream, set[Any]()

    def limited(stream: Any, address: Any) -> None:
        streams.difference_update([known for known in streams if known.closed()])
        if len(streams) >= MAX_CONNECTIONS:
            stream.close()
            return
        streams.add(stream)
        accept(stream, address)

    server.handle_stream = limited  # type: ignore[method-assign]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())  # in constant time


class _Guard(Router):
    def __init__(self, pages: Application, token: str) -> None:
        self._pages, self._token = pages, token
        self._gate = Application(log_function=lambda _handler: None)  # a link in a log would hold the token

    def find_handler(self, request: HTTPServerRequest, **_: Any) -> HTTPMessageDelegate | None:
        visit = _visit(request)
        if reason := why_refused(visit, self._token):
            return self._gate.get_handler_delegate(request, _Refusal, {"reason": reason})
        if visit.link and visit.method in READING:
            return self._gate.get_handler_delegate(request, _Entrance, {"token": self._token})
        return self._pages.find_handler(request)


def _visit(request: HTTPServerRequest) -> Visit:
    kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
    cookie = request.cookies.get(_cookie_name(request))
    return Visit(
        request.method or "",
        request.headers.get("Host", ""),
        request.headers.get("Origin", ""),
        link=request.query_arguments.get("token", [b""])[-1].decode(errors="replace"),
        cookie=cookie.value if cookie else "",
        bearer=bearer if kind.lower() == "bearer" else "",
    )


def _cookie_name(request: HTTPServerRequest) -> str:
    """Return the cookie's name for this port: browsers send a host's cookies to all its ports."""
    return f"idletrain-{url_parts('//' + request.headers.get('Host', '')).port or 80}"


class _Entrance(RequestHandler):
    """Keep the link's token in a cookie that no script reads and no other site sends; open the page without it."""

    def initialize(self, token: str) -> None:
        self._token = token

    def get(self) -> None:
        self.set_cookie(_cookie_name(self.request), self._token, httponly=True, samesite="Strict")
        self.set_header("Referrer-Policy", "no-referrer")
        rest = [(name, value) for name, value in urllib.parse.parse_qsl(self.request.query) if name != "token"]
        query = f"?{urllib.parse.urlencode(rest)}" if rest else ""
        self.redirect("/" + self.request.path.lstrip("/") + query)

    head = get


class _Refusal(RequestHandler):
    def initialize(self, reason: str) -> None:
        self._why = reason

    def prepare(self) -> None:
        self.set_status(HTTPStatus.FORBIDDEN)
        self.set_header("Content-Type", "text/plain")
        self.finish(f"403: {self._why}\n")
