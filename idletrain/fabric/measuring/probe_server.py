"""A node's listening post: what others measure against, in a thread of its worker, until told to go or long unused.

A post costs nothing while nobody calls. It dies with its worker, and by itself when whoever measures is gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from distributed import Worker
from distributed.security import Security

from idletrain.fabric.measuring import comms, sockets
from idletrain.fabric.measuring.sockets import Door

KEY = "idletrain-fabric"  # among a worker's extensions
LOOK_SECONDS = 0.5
SILENT_SECONDS = 900.0  # after which whoever measured is gone, unless told otherwise


class Post:
    """All servers of one node, on an event loop of their own: the worker's own serves the cluster meanwhile."""

    def __init__(
        self,
        host: str,
        token: str,
        cluster: Security,
        temporary: Security | None = None,
        *,
        plain: bool = False,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._silent_seconds = silent_seconds
        self._plain = sockets.Listener(host, token)
        self._posts = comms.Posts(token)
        self._ended, self._opened = threading.Event(), threading.Event()
        self._faults: list[BaseException] = []
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, cluster, temporary, plain)), daemon=True, name=KEY
        )
        self._thread.start()
        self._opened.wait()
        if self._faults:
            self._plain.close()
            raise self._faults[0]
        self.door = Door(host, self._plain.port, self._posts.addresses)

    def close(self) -> None:
        """Serve no more; returns at once."""
        self._ended.set()

    async def _serve(self, host: str, cluster: Security, temporary: Security | None, plain: bool) -> None:
        try:
            await self._posts.open(host, cluster, temporary, plain=plain)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            self._faults.append(error)
            await self._posts.close()
            return
        finally:
            self._opened.set()
        while not self._ended.is_set() and time.monotonic() - self._plain.heard < self._silent_seconds:
            await asyncio.sleep(LOOK_SECONDS)
        await self._posts.close()
        await asyncio.to_thread(self._plain.close)


def opened(worker: Worker, **settings: Any) -> Door:
    """Open a worker's post, in the place of one that an earlier measurement left."""
    closed(worker)
    post = Post(**settings, cluster=worker.security, plain=worker.address.startswith("tcp://"))
    worker.extensions[KEY] = post
    return post.door


def closed(worker: Worker) -> None:
    """Close a worker's post, if it has one."""
    if post := worker.extensions.pop(KEY, None):
        post.close()
