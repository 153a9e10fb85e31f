"""The stock Dask scheduler in a process of its own, with its dashboard, bound to loopback.

python -m idletrain.fleet.scheduler
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from distributed import Scheduler

from idletrain.fleet import settings
from idletrain.fleet.parent import when_parent_ends


async def serve() -> None:
    """Run until the parent is gone; the address is the first line of output, the dashboard's the second."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard=True, dashboard_address="127.0.0.1:0") as scheduler:
        port = scheduler.http_server.port if scheduler.http_server else 0
        sys.stdout.write(f"{scheduler.address}\nhttp://127.0.0.1:{port}/status\n")
        sys.stdout.flush()
        await scheduler.finished()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the head's to handle; it closes our input
    when_parent_ends(lambda: os._exit(0))
    settings.apply()
    asyncio.run(serve())
