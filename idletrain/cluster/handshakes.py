"""Limit what peers without a certificate can hold: a TLS handshake ends soon, and few are under way at once.

Dask's own listener waits for a handshake for ever, and every connection that sends nothing takes 50 KB meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from distributed.comm.registry import backends
from distributed.comm.tcp import TLSBackend, TLSListener

logger = logging.getLogger(__name__)
HANDSHAKE_SECONDS = 10.0  # as long as a peer waits for the connection
MAX_HANDSHAKES = 256  # at once on one port; one more closes the oldest, whose owner connects again if it is a peer
LOGGED_HANDSHAKES = 100  # refused ones that a listener logs: a stranger cannot fill the disk with them


def limit() -> None:
    """Have all TLS ports that this process opens from now on limit their handshakes."""
    backends["tls"] = _LimitedBackend()


class LimitedListener(TLSListener):
    """Dask's TLS listener, with limits on handshakes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pending: dict[Any, None] = {}  # streams, oldest first
        self._refused = 0

    async def _prepare_stream(self, stream: Any, address: str) -> Any:
        """Return the stream once its peer has shown its certificate; None if it does not."""
        self._pending[stream] = None
        if len(self._pending) > MAX_HANDSHAKES:
            oldest = next(iter(self._pending))
            del self._pending[oldest]  # at once: its own task does so later, and many connections may come before
            oldest.close()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await stream.wait_for_handshake()
        except OSError as error:  # and with it TimeoutError
            stream.close()
            self._refused += 1
            if self._refused <= LOGGED_HANDSHAKES:
                reason = getattr(error, "real_error", None) or error or f"nothing in {HANDSHAKE_SECONDS:.0f} s"
                logger.warning("no TLS handshake with %s on %s: %s", address, self.prefix, reason)
            return None
        finally:
            self._pending.pop(stream, None)
        return stream


class _LimitedBackend(TLSBackend):
    _listener_class = LimitedListener
