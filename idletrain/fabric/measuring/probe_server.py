"""Serve other nodes' measurements from a thread of the worker, until closed or unused for long.

An idle server costs nothing. It ends with its worker, and by itself when the measuring client is gone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from distributed import Worker
from distributed.security import Security

from idletrain.fabric.measuring import comms, sockets
from idletrain.fabric.measuring.sockets import SocketAddress

PROBE_SERVER_KEY = "idletrain-fabric"  # among a worker's extensions
IDLE_POLL_SECONDS = 0.5
PROBE_SILENCE_SECONDS = 900.0  # without a call, after which the measuring client counts as gone


class ProbeServer:
    """All servers of one node, on an event loop of their own, as the worker's own loop serves the cluster.

    Args:
        host: IP address to listen on.
        token: Secret that callers must send.
        cluster: The cluster's own security.
        temporary: Certificates of this measurement alone, for the server over TLS; None for no such server.
        plain: Whether to open a server without TLS as well.
        silent_seconds: Time without a call after which the servers close.

    Attributes:
        address: Where other nodes reach the servers.
    """

    def __init__(
        self,
        host: str,
        token: str,
        cluster: Security,
        temporary: Security | None = None,
        *,
        plain: bool = False,
        silent_seconds: float = PROBE_SILENCE_SECONDS,
    ) -> None:
        self._silent_seconds = silent_seconds
        self._plain = sockets.Listener(host, token)
        self._probe_servers = comms.ProbeServers(token)
        self._ended, self._opened = threading.Event(), threading.Event()
        self._faults: list[BaseException] = []
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, cluster, temporary, plain)), daemon=True, name=PROBE_SERVER_KEY
        )
        self._thread.start()
        self._opened.wait()
        if self._faults:
            self._plain.close()
            raise self._faults[0]
        self.address = SocketAddress(host, self._plain.port, self._probe_servers.addresses)

    def close(self) -> None:
        """Stop serving; return at once."""
        self._ended.set()

    async def _serve(self, host: str, cluster: Security, temporary: Security | None, plain: bool) -> None:
        try:
            await self._probe_servers.open(host, cluster, temporary, plain=plain)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            self._faults.append(error)
            await self._probe_servers.close()
            return
        finally:
            self._opened.set()
        while not self._ended.is_set() and time.monotonic() - self._plain.last_call_at < self._silent_seconds:
            await asyncio.sleep(IDLE_POLL_SECONDS)
        await self._probe_servers.close()
        await asyncio.to_thread(self._plain.close)


def open_server(worker: Worker, **settings: Any) -> SocketAddress:
    """Open a worker's probe server, closing one that an earlier measurement left; return its address."""
    close_server(worker)
    server = ProbeServer(**settings, cluster=worker.security, plain=worker.address.startswith("tcp://"))
    worker.extensions[PROBE_SERVER_KEY] = server
    return server.address


def close_server(worker: Worker) -> None:
    """Close a worker's probe server, if it has one."""
    if server := worker.extensions.pop(PROBE_SERVER_KEY, None):
        server.close()
