"""The stock Dask scheduler in a process of its own, with its dashboard on loopback.

Reads one line of JSON from its input, `{"host": "127.0.0.1", "port": 0, "identity": null}`, and ends when that closes.
The identity (a `certificates.Identity`) comes this way because arguments and environment can be read by others.

    python -m idletrain.fleet.scheduler
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from distributed import Scheduler
from distributed.security import Security

from idletrain.fleet import settings
from idletrain.fleet.certificates import Identity
from idletrain.fleet.parent import when_parent_ends


async def serve(host: str, port: int, identity: dict[str, str] | None) -> None:
    """Run until the parent is gone; the address is the first line of output, the dashboard's the second."""
    secure: dict[str, Any] = {"security": Security()}
    if identity is not None:
        secure = {"security": Identity(**identity).security(), "protocol": "tls"}
    async with Scheduler(host=host, port=port, dashboard=True, dashboard_address="127.0.0.1:0", **secure) as scheduler:
        page = scheduler.http_server.port if scheduler.http_server else 0
        sys.stdout.write(f"{scheduler.address}\nhttp://127.0.0.1:{page}/status\n")
        sys.stdout.flush()
        await scheduler.finished()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle; it closes our input
    asked = json.loads(sys.stdin.readline())
    when_parent_ends(lambda: os._exit(0))
    settings.apply()
    asyncio.run(serve(**asked))
