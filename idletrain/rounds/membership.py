"""Follows the workers of the Dask cluster as they join, get a notice and leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from distributed import Client

from idletrain.errors import RefusedError, RunError
from idletrain.observe.records import Recorder
from idletrain.rounds.widths import Capacity
from idletrain.worker import tasks
from idletrain.worker.lease_spec import version

logger = logging.getLogger(__name__)
MEMBERSHIP_POLL_SECONDS = 0.1
FIRST_WORKERS_SECONDS = 60.0  # the wait for the requested number of workers before starting with fewer
DESCRIBE_SECONDS = 60.0  # a joiner's first task imports torch, which a cold disk can draw out
REMIND_SECONDS = 10.0
MOST_REASONS = 3
ENDED_WHILE_JOINING = "it ended while it joined; its log says why"
COUNT_SECONDS = 2.0


class Membership:
    """The workers of a cluster that may be leased work.

    Args:
        client: An asynchronous client.
        record: Takes what happens.
        spawn: Runs a coroutine beside the others.
        joined: Called with a worker's address once its capacity is known.
        noticed: Called when a worker reports that it will be preempted.
        left: Called with address and name when a worker that had joined is gone.

    Attributes:
        capacities: Memory and speed of each worker that is here, by address.
        refused: Why each worker that is here, but cannot be used, was refused, by address.
    """

    def __init__(
        self,
        client: Client,
        record: Recorder,
        spawn: Callable[[Any], Any],
        *,
        joined: Callable[[str], None],
        noticed: Callable[[str], None],
        left: Callable[[str, str], None],
    ) -> None:
        self._client, self._record, self._spawn = client, record, spawn
        self._joined, self._noticed, self._left = joined, noticed, left
        self.capacities: dict[str, Capacity] = {}
        self.refused: dict[str, str] = {}
        self._known: set[str] = set()
        self._names: dict[str, str] = {}
        self._restarting: set[str] = set()
        self._alone_since = time.monotonic()

    async def watch(self) -> None:
        """Subscribe to workers' events, and poll the cluster for workers that joined before."""
        await self._client.set_metadata(["idletrain"], {"version": version(), "client": self._client.id})
        self._client.subscribe_topic("all", self._on_event)
        self._client.subscribe_topic("idletrain", self._on_event)
        self._spawn(self._poll())

    async def leave(self) -> None:
        """Release the cluster: workers of other versions may join it again."""
        if self._client.status == "running":
            with contextlib.suppress(OSError):
                await self._client.set_metadata(["idletrain"], None)

    async def wait_for(self, count: int, idle_seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait until `count` workers joined; after a minute, return with fewer, if there is one.

        Raises:
            RunError: There was none for `idle_seconds`.
        """
        started = reminded = time.monotonic()
        while len(self.capacities) < count and not stopped():
            now = time.monotonic()
            if now - started >= FIRST_WORKERS_SECONDS and self.capacities:
                break
            if now - reminded >= REMIND_SECONDS:
                reminded = now
                self._record("waiting", reason=self.missing_text(count))
            self.check_idle(count, idle_seconds)
            await asyncio.sleep(MEMBERSHIP_POLL_SECONDS)

    def check_idle(self, count: int, idle_seconds: float) -> None:
        """Raise RunError if there has been no worker for `idle_seconds`."""
        now = time.monotonic()
        self._alone_since = now if self.capacities else self._alone_since
        if now - self._alone_since > idle_seconds:
            raise RunError(
                f"no worker could be used for {idle_seconds:.0f} s (nodes.idle_duration); waited "
                f"{self.missing_text(count)}; fix that and add --resume if the run has begun"
            )

    def missing_text(self, count: int) -> str:
        """Say how many of `count` workers are here, and why others were refused."""
        text = f"for workers: {len(self.capacities)} of {count} are here"
        reasons = Counter(self.refused.values())
        return "; ".join([text, *(f"{n} refused: {reason}" for reason, n in reasons.most_common(MOST_REASONS))])

    def name_of(self, address: str) -> str:
        """Return the name of a worker that has joined, also after it left."""
        return self._names.get(address, address)

    def is_restarting(self, address: str) -> bool:
        """Return whether a worker ends itself when it hangs, and whoever started it starts another."""
        return address in self._restarting

    def _on_event(self, event: tuple[float, Any]) -> None:
        message = event[1]
        address = message.get("worker", "")
        match message.get("action"):
            case "add-worker":
                self._spawn(self._admit(address))
            case "remove-worker":
                if address in self._known and address not in self.capacities:
                    self._record("joining_failed", worker=address)
                    self.refused.setdefault(address, ENDED_WHILE_JOINING)
                self._known.discard(address)
                self._restarting.discard(address)
                if self.capacities.pop(address, None):
                    self._left(address, self._names[address])
            case "at-risk":
                self._record("worker_at_risk", worker=address)
            case "notice":
                self._record("worker_notice", worker=address)
                self._noticed(address)

    async def _poll(self) -> None:
        """Admit workers that were here before the subscription, and again those whose admission failed."""
        while True:
            if self._client.status == "running":
                with contextlib.suppress(OSError):  # the coordinator notices that a scheduler is gone
                    for address in (await self._client.scheduler.ncores()).keys() - self._known:
                        self._spawn(self._admit(address))
            await asyncio.sleep(COUNT_SECONDS)

    async def _admit(self, address: str) -> None:
        """Ask a new worker for its capacity, and admit it if it runs the same version."""
        if address in self._known:
            return
        self._known.add(address)
        self._record("worker_joining", worker=address)
        try:
            await self._check_version(address)
            described = self._client.submit(tasks.describe, workers=[address], key=f"describe-{address}", pure=False)
            description = await asyncio.wait_for(described, DESCRIBE_SECONDS)
        except RefusedError as refusal:
            self.refused[address] = str(refusal)
            self._record("worker_refused", worker=address, reason=str(refusal))
            return
        except Exception as error:  # noqa: BLE001 (whatever the error, the worker has not joined)
            logger.info("worker %s did not join: %r", address, error)
            if address in self._known:
                self._record("joining_failed", worker=address)
            self._known.discard(address)  # the next poll tries again, if it is still here
            return
        if address not in self._known:  # it left meanwhile
            return
        self.refused.pop(address, None)
        if description["restarts"]:
            self._restarting.add(address)
        self.capacities[address] = Capacity(
            description["memory_bytes"],
            description["steps_per_second"],
            description["leases"],
            streams=description["device"] == "cpu",
            cohort=description["cohort"],
        )
        self._names[address] = description["name"]
        fields = ("name", "memory_bytes", "device", "steps_per_second", "cohort", "pid")
        self._record("worker_joined", worker=address, **{field: description[field] for field in fields})
        self._joined(address)

    async def _check_version(self, address: str) -> None:
        versions = await self._client.run(version, workers=[address], on_error="return")
        theirs = versions.get(address)
        if isinstance(theirs, OSError):
            raise theirs
        if isinstance(theirs, Exception) or theirs != version():
            raise RefusedError(
                f"worker {address} runs idletrain {theirs} and the head {version()}; install one version on both"
            )
