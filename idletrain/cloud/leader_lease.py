"""Elect a run's leader by a lease below its S3 prefix, held by conditional writes, so that no two heads write one run.

The lease of a dead head node expires; a caller that knows the head is dead can delete it at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from idletrain.errors import RefusedError, reading
from idletrain.storage import ConflictError, S3Prefix, TaggedContent

logger = logging.getLogger(__name__)
LEADER_LEASE_KEY = "lease.json"
LEASE_SECONDS = 30.0
RENEW_SECONDS = 8.0  # three tries before it expires
LEASE_POLL_SECONDS = 1.0


def end(prefix: S3Prefix) -> None:
    """Delete the lease of a head node whose machine is known to be gone; a living holder is refused from then on."""
    prefix.delete([LEADER_LEASE_KEY])


def renewed(prefix: S3Prefix) -> float:
    """Return when a run's head node last renewed its lease, in Unix seconds of its clock; 0 without a lease.

    Raises:
        DamageError: the lease is not what a head writes.
    """
    return _held(prefix.get(LEADER_LEASE_KEY))[1]


def is_renewed(prefix: S3Prefix) -> bool:
    """Return whether a head renews its lease, after at most the time in which a lease expires.

    The time in it does not tell: clocks of machines differ.
    """
    first, expires = renewed(prefix), time.monotonic() + LEASE_SECONDS
    while (latest := renewed(prefix)) == first and time.monotonic() < expires:
        time.sleep(LEASE_POLL_SECONDS)
    return latest != first


def _held(stored: TaggedContent | None) -> tuple[str, float]:
    """Return a lease's holder and when it was renewed; "" and 0 without a lease."""
    if stored is None:
        return "", 0.0
    with reading(LEADER_LEASE_KEY, "end the run with `idletrain down` and go on with --resume"):
        fields = json.loads(stored.content)
        return str(fields["holder"]), float(fields["renewed"])


class LeaderLease:
    """One head node's lease on a run.

    Args:
        prefix: The run's S3 prefix.
        holder: Instance id of this head node.
    """

    def __init__(self, prefix: S3Prefix, holder: str) -> None:
        self._prefix, self._holder, self._tag = prefix, holder, ""

    async def acquire(self) -> None:
        """Acquire the lease; wait for one that nobody renews to expire.

        Raises:
            RefusedError: another head leads the run.
        """
        stored = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
        if stored and _held(stored)[0]:
            await self._wait_for_expiry(stored.tag)
            stored = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
        await self._write(stored.tag if stored else None, self._holder)

    async def renew(self) -> None:
        """Renew the lease until cancelled.

        Raises:
            RefusedError: the lease is lost; another head node writes the run from now on.
        """
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._write(self._tag, self._holder)
            except RefusedError:
                raise
            except Exception as error:  # noqa: BLE001 (S3's client has retried; the next write shows a new holder)
                logger.warning("%s: the lease could not be renewed, trying again: %r", self._prefix.url, error)

    async def release(self) -> None:
        """Give the lease up, so that the next head node can acquire it at once."""
        await self._write(self._tag, "")

    async def _wait_for_expiry(self, tag: str) -> None:
        """Wait as long as a lease lasts, by our own clock; refuse if a living holder renews it meanwhile."""
        until = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(LEASE_POLL_SECONDS)
            stored = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
            holder, _ = _held(stored)
            if stored is None or not holder:
                return
            if stored.tag != tag:
                raise self._refusal(holder)

    async def _write(self, tag: str | None, holder: str) -> None:
        content = json.dumps({"holder": holder, "renewed": time.time()}).encode()
        try:
            self._tag = await asyncio.to_thread(self._prefix.put_if, LEADER_LEASE_KEY, content, tag)
        except ConflictError:
            stored = await asyncio.to_thread(self._prefix.get, LEADER_LEASE_KEY)
            if not stored or stored.tag == tag or _held(stored)[0] != self._holder:
                raise self._refusal("another head") from None
            await self._write(stored.tag, holder)  # our own write succeeded, but its answer was lost

    def _refusal(self, holder: str) -> RefusedError:
        return RefusedError(f"{holder} leads the run in {self._prefix.url}; stop it first, with `idletrain down`")
