"""Serve `/idletrain` on a Dask scheduler's dashboard, with metrics next to Dask's and a link in Dask's navigation.

A run's head puts the view (see `observe.status`) as one JSON text into the scheduler's metadata; the page shows that.
The module is also a Dask preload, for a scheduler that is not idletrain's own:

    dask scheduler --preload idletrain.observe.page
"""

from __future__ import annotations

import ipaddress
import json
import signal
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import distributed
import prometheus_client
from distributed import Scheduler
from distributed.protocol.pickle import dumps
from jinja2 import ChoiceLoader, FileSystemLoader
from tornado.web import HTTPError, RequestHandler

from idletrain.observe import charts
from idletrain.observe.metrics import RunCollector

VIEW_KEY = "idletrain-view"  # of the scheduler's metadata: the view as JSON
PAGE_KEY = "idletrain-page"  # of the scheduler's metadata: whether the scheduler serves the page
SIGNALS = {"drain": signal.SIGTERM, "kill": signal.SIGKILL}
DASK_TEMPLATES = Path(distributed.__file__).parent / "http" / "templates"
CURVES = ("curve", "metric_curves", "preempted", "target")  # fields of a view from which its charts are drawn
PAGE_SILENCE_SECONDS = 5.0  # without a new view; a head sends ten in that time, of many workers two
WAITING = "<p>No run has started on this scheduler yet.</p>"
_collectors: dict[str, RunCollector] = {}  # by scheduler; a global, as Prometheus' registry is one


def dask_setup(scheduler: Scheduler) -> None:
    """Add the page, its metrics and its link to a scheduler's dashboard."""
    add_metrics(scheduler)
    page = DashboardPage(scheduler)
    routes = [
        (r"(?:/.+)?/idletrain", _PageHandler, {"page": page}),
        (r"(?:/.+)?/idletrain/now", _ContentHandler, {"page": page}),
        (r"(?:/.+)?/idletrain/view\.json", _ViewHandler, {"page": page}),
        (r"(?:/.+)?/idletrain/(drain|kill)", _ControlHandler, {"page": page}),
    ]
    scheduler.http_application.add_handlers(r".*", routes)
    if "idletrain" not in page.navigation["pages"]:
        page.navigation["pages"].insert(0, "idletrain")
    scheduler.set_metadata([PAGE_KEY], True)


def add_metrics(scheduler: Scheduler) -> None:
    """Add the run's metrics to Dask's; this does not import bokeh."""
    if scheduler.id not in _collectors:
        _collectors[scheduler.id] = RunCollector(lambda: json.loads(scheduler.get_metadata([VIEW_KEY], "") or "{}"))
        prometheus_client.REGISTRY.register(_collectors[scheduler.id])


def dask_teardown(scheduler: Scheduler) -> None:
    """Remove the metrics of a scheduler that ends."""
    if collector := _collectors.pop(scheduler.id, None):
        prometheus_client.REGISTRY.unregister(collector)


class DashboardPage:
    """The page of one scheduler, shared by its request handlers.

    Args:
        scheduler: The Dask scheduler whose metadata holds the view.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        from distributed.dashboard.scheduler import template_variables  # bokeh: two seconds

        self.scheduler = scheduler
        self.navigation = template_variables(scheduler)  # shared with Dask's own pages
        self._templates = charts.templates()
        assert self._templates.loader is not None
        self._templates.loader = ChoiceLoader([self._templates.loader, FileSystemLoader(DASK_TEMPLATES)])
        self._raw, self._since = "", time.monotonic()
        self._drawn: tuple[tuple[str, int], str] = (("", 0), WAITING)
        self._curves: tuple[dict[str, Any], str] = ({}, "")

    @property
    def raw(self) -> str:
        """The view's JSON text as the head sent it; "" before there is one."""
        raw: str = self.scheduler.get_metadata([VIEW_KEY], "")
        return raw

    def view(self) -> dict[str, Any]:
        """Return the view; empty before there is one."""
        view: dict[str, Any] = json.loads(self.raw or "{}")
        return view

    def now(self) -> str:
        """Return the content's HTML, rendered once for all readers; it says if the head is silent and for how long."""
        raw, now = self.raw, time.monotonic()
        if raw != self._raw:
            self._raw, self._since = raw, now
        silent = int(now - self._since) if now - self._since > PAGE_SILENCE_SECONDS else 0
        if raw and (raw, silent) != self._drawn[0]:
            view = json.loads(raw)
            parts = (self._draw("now", view, silent), self._draw_curves(view), self._draw("live", view, silent))
            self._drawn = (raw, silent), "".join(parts)
        return self._drawn[1]

    def _draw_curves(self, view: dict[str, Any]) -> str:
        """Render the charts if they changed: they take most of the time and change least often."""
        shown = {key: view[key] for key in CURVES}
        if shown != self._curves[0]:
            self._curves = shown, self._draw("curves", view)
        return self._curves[1]

    def _draw(self, name: str, view: dict[str, Any], silent: int = 0) -> str:
        return self._templates.get_template(f"{name}.html").render(v=view, silent=silent)

    def whole(self) -> str:
        """Return the HTML of the whole page, within Dask's layout."""
        return self._templates.get_template("page.html").render(now=self.now(), **self.navigation)

    async def request(self, what: str, worker: str) -> None:
        """Signal a worker's process: SIGTERM (`drain`) lets it push its work first, SIGKILL (`kill`) does not."""
        message = {"op": "run", "function": dumps(signal.raise_signal), "args": dumps((SIGNALS[what],)), "wait": True}
        await self.scheduler.broadcast(
            msg=message, workers=[worker], on_error="ignore"
        )  # a killed worker does not answer


class _Handler(RequestHandler):
    def initialize(self, page: DashboardPage) -> None:
        self.page = page

    def set_default_headers(self) -> None:
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", "frame-ancestors 'self'")  # no other page may lay buttons over ours


class _PageHandler(_Handler):
    def get(self) -> None:
        self.write(self.page.whole())


class _ContentHandler(_Handler):
    def get(self) -> None:
        self.write(self.page.now())


class _ViewHandler(_Handler):
    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.write(self.page.raw or "{}")


class _ControlHandler(_Handler):
    def check_xsrf_cookie(self) -> None:
        """Skip tornado's cookie: `request_refusal` checks a header that no other site's script may send."""

    async def post(self, what: str) -> None:
        view = self.page.view()
        if fault := request_refusal(what, self.request.headers, view):
            raise HTTPError(HTTPStatus.FORBIDDEN, reason=fault)
        worker = named_worker(self.request.body)
        if worker not in self.page.scheduler.workers:
            raise HTTPError(HTTPStatus.NOT_FOUND, reason="that worker is gone")
        await self.page.request(what, worker)

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "text/plain")
        self.finish(f"{status_code}: {self._reason}")


def named_worker(body: bytes) -> str:
    """Return the worker that a request names; "" if it names none.

    Raises:
        HTTPError: it is no JSON object.
    """
    try:
        return str(json.loads(body).get("worker", ""))
    except (ValueError, AttributeError, RecursionError):
        raise HTTPError(HTTPStatus.BAD_REQUEST, reason="send a JSON object with a worker") from None


def request_refusal(what: str, headers: Mapping[str, str], view: Mapping[str, Any]) -> str | None:
    """Return why a request to drain or kill a worker is refused; None if it is allowed.

    Another site's script in the user's browser can reach a page on loopback. But it may not send the header without a
    CORS preflight request, which is never allowed; and a host name that it points here is not one of this machine's.
    """
    if not view.get("allow_control"):
        return "the run was not started with --allow-control"
    if headers.get("X-Idletrain") != what:
        return "use the buttons of this page; another page sent this request"
    host = headers.get("Host", "")
    name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name not in ("localhost", socket.gethostname(), socket.getfqdn()):
            return "open the page by this machine's address, not by another name"
    return None
