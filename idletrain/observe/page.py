"""`/idletrain` on a Dask scheduler's dashboard, its metrics beside Dask's, and its link in Dask's navigation.

A run's head sends what there is to show as one JSON text into the scheduler's metadata; nothing here knows the events.
Also a Dask preload, for a scheduler that is not idletrain's own:

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

VIEW_KEY = "idletrain-view"  # the scheduler's metadata: what there is to show, and that there is a page to show it
PAGE_KEY = "idletrain-page"
SIGNALS = {"drain": signal.SIGTERM, "kill": signal.SIGKILL}
DASK_TEMPLATES = Path(distributed.__file__).parent / "http" / "templates"
CURVES = ("curve", "preempted", "target")  # of a view, what its curves are drawn of
PAGE_SILENCE_SECONDS = 5.0  # ten views that did not come
WAITING = "<p>No run has begun on this scheduler yet.</p>"
_collectors: dict[str, RunCollector] = {}  # Prometheus' registry is the process', too


def dask_setup(scheduler: Scheduler) -> None:
    """Add the page, its metrics and its link to a scheduler's dashboard."""
    add_metrics(scheduler)
    page = DashboardPage(scheduler)
    routes = [
        (r"(?:/.+)?/idletrain", _Whole, {"page": page}),
        (r"(?:/.+)?/idletrain/now", _Now, {"page": page}),
        (r"(?:/.+)?/idletrain/view\.json", _Json, {"page": page}),
        (r"(?:/.+)?/idletrain/(drain|kill)", _Ask, {"page": page}),
    ]
    scheduler.http_application.add_handlers(r".*", routes)
    if "idletrain" not in page.navigation["pages"]:
        page.navigation["pages"].insert(0, "idletrain")
    scheduler.set_metadata([PAGE_KEY], True)


def add_metrics(scheduler: Scheduler) -> None:
    """Add the run's metrics, which cost no import of bokeh, to Dask's."""
    if scheduler.id not in _collectors:
        _collectors[scheduler.id] = RunCollector(lambda: json.loads(scheduler.get_metadata([VIEW_KEY], "") or "{}"))
        prometheus_client.REGISTRY.register(_collectors[scheduler.id])


def dask_teardown(scheduler: Scheduler) -> None:
    """Forget the metrics of a scheduler that ends."""
    if collector := _collectors.pop(scheduler.id, None):
        prometheus_client.REGISTRY.unregister(collector)


class DashboardPage:
    """What the page's handlers share.

    Args:
        scheduler: The scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        from distributed.dashboard.scheduler import template_variables  # bokeh: two seconds

        self.scheduler = scheduler
        self.navigation = template_variables(scheduler)  # the very one that Dask's own pages use
        self._templates = charts.templates()
        assert self._templates.loader is not None
        self._templates.loader = ChoiceLoader([self._templates.loader, FileSystemLoader(DASK_TEMPLATES)])
        self._raw, self._since = "", time.monotonic()
        self._drawn: tuple[tuple[str, int], str] = (("", 0), WAITING)
        self._curves: tuple[dict[str, Any], str] = ({}, "")

    @property
    def raw(self) -> str:
        """The view as the head sent it; "" before there is one."""
        raw: str = self.scheduler.get_metadata([VIEW_KEY], "")
        return raw

    def view(self) -> dict[str, Any]:
        """The view; empty before there is one."""
        view: dict[str, Any] = json.loads(self.raw or "{}")
        return view

    def now(self) -> str:
        """The page's content, drawn once however many look; also how long its head has been silent."""
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
        """The curves, which are most of the work and change the least."""
        shown = {key: view[key] for key in CURVES}
        if shown != self._curves[0]:
            self._curves = shown, self._draw("curves", view)
        return self._curves[1]

    def _draw(self, name: str, view: dict[str, Any], silent: int = 0) -> str:
        return self._templates.get_template(f"{name}.html").render(v=view, silent=silent)

    def whole(self) -> str:
        """The page within Dask's frame."""
        return self._templates.get_template("page.html").render(now=self.now(), **self.navigation)

    async def request(self, what: str, worker: str) -> None:
        """Signal a worker's process: SIGTERM drains it, SIGKILL is a loss without notice."""
        message = {"op": "run", "function": dumps(signal.raise_signal), "args": dumps((SIGNALS[what],)), "wait": True}
        await self.scheduler.broadcast(msg=message, workers=[worker], on_error="ignore")  # the dead do not answer


class _Handler(RequestHandler):
    def initialize(self, page: DashboardPage) -> None:
        self.page = page

    def set_default_headers(self) -> None:
        self.set_header("Cache-Control", "no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")


class _Whole(_Handler):
    def get(self) -> None:
        self.write(self.page.whole())


class _Now(_Handler):
    def get(self) -> None:
        self.write(self.page.now())


class _Json(_Handler):
    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.write(self.page.raw or "{}")


class _Ask(_Handler):
    def check_xsrf_cookie(self) -> None:
        """See `refusal`: a header that no other site's script may send stands for the cookie."""

    async def post(self, what: str) -> None:
        view = self.page.view()
        if fault := request_refusal(what, self.request.headers, view):
            raise HTTPError(HTTPStatus.FORBIDDEN, reason=fault)
        try:
            worker = str(json.loads(self.request.body)["worker"])
        except (ValueError, TypeError):
            raise HTTPError(HTTPStatus.BAD_REQUEST, reason="asked with something else than a worker") from None
        except KeyError:
            worker = ""
        if worker not in self.page.scheduler.workers:
            raise HTTPError(HTTPStatus.NOT_FOUND, reason="that worker is gone")
        await self.page.request(what, worker)

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "text/plain")
        self.finish(f"{status_code}: {self._reason}")


def request_refusal(what: str, headers: Mapping[str, str], view: Mapping[str, Any]) -> str | None:
    """Why a request to drain or kill a worker is not done; None if it is.

    Another site's script in the user's browser can reach a page on loopback, but may not send the header without
    asking first, which is never allowed; and a name that it made point here is not one of this machine's.
    """
    if not view.get("allow_control"):
        return "the run was not started with --allow-control"
    if headers.get("X-Idletrain") != what:
        return "asked by another page"
    host = headers.get("Host", "")
    name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name not in ("localhost", socket.gethostname(), socket.getfqdn()):
            return "open the page by this machine's address, not by another name"
    return None
