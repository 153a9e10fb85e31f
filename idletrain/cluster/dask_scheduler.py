"""Run the stock Dask scheduler in a process of its own, with Dask's dashboard and idletrain's page on loopback.

The process reads one line of JSON from its input, `{"host": "127.0.0.1", "port": 0, "identity": null}`, and ends when
the input closes. The identity (an `identity.Identity`) is passed this way because other users of the machine can read
arguments and environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tornado.web import Application, RequestHandler

from idletrain.cluster import forked_processes
from idletrain.cluster.dashboard_guard import guard
from idletrain.cluster.identity import Identity
from idletrain.cluster.shutdown import when_parent_ends
from idletrain.errors import RunError
from idletrain.storage import owner_only, write_whole

if TYPE_CHECKING:
    from distributed import Scheduler

DASHBOARD_PORT = 8787  # Dask's default; where it is in use, the next free one
PORTS = 100
CLUSTER_FILE = "cluster.json"  # the addresses of a run's scheduler and dashboard, and the scheduler's process


@contextlib.asynccontextmanager
async def started(
    run_dir: Path, host: str = "127.0.0.1", port: int = 0, identity: Identity | None = None
) -> AsyncIterator[str]:
    """Start a scheduler that ends with this process, and yield its address.

    Args:
        run_dir: Where its log and addresses go.
        host: The address to listen on; any but loopback needs an identity.
        port: The port, or 0 for a free one.
        identity: Certificates: only their authority's other certificates can connect, and the dashboard asks for the
            identity's token. Without one, anybody who can connect to the port can run code as this user.

    Raises:
        RunError: it does not start.
    """
    with open(run_dir / "scheduler.log", "ab", opener=owner_only) as log:
        scheduler = forked_processes.piped(__name__, log.fileno())
    settings = {"host": host, "port": port, "identity": identity and asdict(identity)}
    try:
        with contextlib.suppress(BrokenPipeError):  # what it prints says more
            scheduler.stdin.write(json.dumps(settings).encode() + b"\n")
            scheduler.stdin.flush()
        address, dashboard = [(await asyncio.to_thread(scheduler.stdout.readline)).decode().strip() for _ in range(2)]
        if not dashboard:
            raise RunError(f"the Dask scheduler did not start; see {run_dir / 'scheduler.log'}")
        addresses = {"scheduler": address, "dashboard": dashboard, "pid": scheduler.process.pid}
        write_whole(run_dir / CLUSTER_FILE, json.dumps(addresses).encode())
        yield address
    finally:
        with contextlib.suppress(BrokenPipeError):
            scheduler.stdin.close()
        await asyncio.to_thread(scheduler.process.wait)
        scheduler.stdout.close()


async def serve(host: str, port: int, identity: dict[str, str] | None) -> None:
    """Run until the parent ends; print the scheduler's address on the first line, the dashboard's on the second."""
    from distributed import Scheduler

    from idletrain.cluster import dask_settings

    dask_settings.apply()
    dask_settings.lift_file_limit()
    own = Identity(**identity) if identity else None
    secure: dict[str, Any] = {"security": own.security(), "protocol": "tls"} if own else {}
    dashboard = f"127.0.0.1:{free_port(DASHBOARD_PORT)}"
    server = Scheduler(host=host, port=port, dashboard=False, dashboard_address=dashboard, **secure)
    if own:
        guard(server.http_server, own.dashboard_token)
    async with server as scheduler:
        sys.stdout.write(f"{scheduler.address}\nhttp://127.0.0.1:{scheduler.http_server.port}/status\n")
        sys.stdout.flush()
        SleepingScheduler(scheduler)
        _page().add_metrics(scheduler)
        await scheduler.finished()


def free_port(first: int) -> int:
    """Return the first free port on loopback from `first` on; 0, which means any, if the next 100 are taken."""
    for port in range(first, first + PORTS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    return 0


class SleepingScheduler:
    """Add the dashboard's pages at the first request: Dask's, as `Scheduler(dashboard=True)` does, and idletrain's.

    Loading them takes three seconds of CPU, better spent on training while nobody watches.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._waking = scheduler, asyncio.Lock()
        self._asleep = Application([(r".*", _Waking, {"dashboard": self})])
        scheduler.http_application.add_application(self._asleep)

    async def wake(self) -> None:
        """Add the pages, the first time."""
        async with self._waking:
            applications = self._scheduler.http_application.applications
            if self._asleep not in applications:
                return
            pages = await asyncio.to_thread(importlib.import_module, "distributed.dashboard.scheduler")
            page = await asyncio.to_thread(_page)
            applications.remove(self._asleep)
            pages.connect(self._scheduler.http_application, self._scheduler.http_server, self._scheduler, prefix="")
            page.dask_setup(self._scheduler)


def _page() -> ModuleType:
    """Import idletrain's page: here, so that a scheduler's start does not wait half a second for it."""
    from idletrain.observe import page

    return page


class _Waking(RequestHandler):
    def initialize(self, dashboard: SleepingScheduler) -> None:
        self._dashboard = dashboard

    async def get(self) -> None:
        await self._dashboard.wake()
        self.redirect(self.request.uri or "/")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the head handles Ctrl-C, and closes this input
    settings = json.loads(sys.stdin.readline())
    when_parent_ends(lambda: os._exit(0))
    asyncio.run(serve(**settings))
