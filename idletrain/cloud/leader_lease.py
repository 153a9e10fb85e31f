"""Who leads a run: a lease below its prefix, kept by conditional writes, so that no two heads write one run.

A dead head's lease runs out; nobody has to take it away, but who knows that it is dead can.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from idletrain.errors import RefusedError
from idletrain.storage import ConflictError, S3Prefix

logger = logging.getLogger(__name__)
LEADER_LEASE_KEY = "lease.json"
LEASE_SECONDS = 30.0
RENEW_SECONDS = 8.0  # three tries before it runs out
LEASE_POLL_SECONDS = 1.0


def end(prefix: S3Prefix) -> None:
    """Take away the lease of a head whose machine is known to be gone; a living holder is refused from then on."""
    prefix.delete([LEADER_LEASE_KEY])


def renewed(prefix: S3Prefix) -> float:
    """When a run's head last renewed its lease, in Unix seconds of its clock; 0 if there is none."""
    found = prefix.get(LEADER_LEASE_KEY)
    return float(json.loads(found.content)["renewed"]) if found else 0.0


class LeaderLease:
    """One head's hold on a run.

    Args:
        prefix: The run's prefix.
        holder: Who we are; an instance id.
    """

    def __init__(self, prefix: S3Prefix, holder: str) -> None:
        self._prefix, self._holder, self._tag = prefix, holder, ""

    async def acquire(self) -> None:
        """Take the lease; waits for one that nobody renews to run out.

        Raises:
            RefusedError: another head leads the run.
        """
        found = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
        if found and json.loads(found.content)["holder"]:
            await self._outlive(found.tag)
            found = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
        await self._write(found.tag if found else None, self._holder)

    async def renew(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            RefusedError: it was lost; whatever we write from now on is another's to write.
        """
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._write(self._tag, self._holder)
            except RefusedError:
                raise
            except Exception as error:  # noqa: BLE001 (S3's client has retried; who took the lease over is seen in it)
                logger.warning("%s: the lease is renewed late: %r", self._prefix.url, error)

    async def release(self) -> None:
        """Let the next head have it at once."""
        await self._write(self._tag, "")

    async def _outlive(self, tag: str) -> None:
        """Wait as long as a lease lasts; a living holder renews it meanwhile. Our clock alone counts."""
        until = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(LEASE_POLL_SECONDS)
            found = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
            if found is None or not json.loads(found.content)["holder"]:
                return
            if found.tag != tag:
                raise self._refusal(json.loads(found.content)["holder"])

    async def _write(self, tag: str | None, holder: str) -> None:
        content = json.dumps({"holder": holder, "renewed": time.time()}).encode()
        try:
            self._tag = await asyncio.to_thread(self._prefix.put_if, LEADER_LEASE_KEY, content, tag)
        except ConflictError:
            found = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
            if not found or found.tag == tag or json.loads(found.content)["holder"] != self._holder:
                raise self._refusal("another head") from None
            await self._write(found.tag, holder)  # a write of ours was carried out, but its answer was lost

    def _refusal(self, holder: str) -> RefusedError:
        return RefusedError(f"{holder} leads the run in {self._prefix.url}; stop it first, with `idletrain down`")
