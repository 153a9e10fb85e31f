"""Follows the workers of the Dask cluster as they join, get a notice and leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from typing import Any

from distributed import Client
from distributed.scheduler import KilledWorker

from idletrain.errors import RefusedError, RunError
from idletrain.observe.records import Recorder
from idletrain.rounds.refusals import ENDED_WHILE_JOINING, Refusals
from idletrain.rounds.verdicts import machine_of
from idletrain.rounds.widths import Capacity
from idletrain.worker import tasks
from idletrain.worker.lease_spec import version

logger = logging.getLogger(__name__)
MEMBERSHIP_POLL_SECONDS = 0.1
ENDINGS_UNTIL_TOLD = 3  # of one worker while it joins: some are taken just then
FIRST_WORKERS_SECONDS = 60.0  # the wait for the requested number of workers before starting with fewer
DESCRIBE_SECONDS = 60.0  # a joiner's first task imports torch, which a cold disk can draw out
REMIND_SECONDS = 10.0
PASSING = (OSError, CancelledError, KilledWorker)  # errors of the way to a worker, not of what it is
COUNT_SECONDS = 2.0
MOST_LAST_WORDS = 16  # more than workers that die before a run ends because of it


class Membership:
    """The workers of a cluster that may be leased work.

    Args:
        client: An asynchronous client.
        record: Takes what happens.
        spawn: Runs a coroutine beside the others.
        compiled_on: The kinds of devices on which workers compile steps, so that cohorts tell their compilers.
        misfit: Says why a worker of some capacity can hold no subnet; None for one that can.
        joined: Called with a worker's address once its capacity is known.
        noticed: Called when a worker reports that it will be preempted.
        left: Called with address and name when a worker that had joined is gone.

    Attributes:
        capacities: Memory and speed of each worker that is here and can be used, by address.
        last_words: The last lines of the log of workers that ended, by name, as their machines sent them.
    """

    def __init__(
        self,
        client: Client,
        record: Recorder,
        spawn: Callable[[Any], Any],
        *,
        compiled_on: Collection[str],
        misfit: Callable[[Capacity], str | None],
        joined: Callable[[str], None],
        noticed: Callable[[str], None],
        left: Callable[[str, str], None],
    ) -> None:
        self._client, self._record, self._spawn, self._compiled_on = client, record, spawn, compiled_on
        self._misfit, self._joined, self._noticed, self._left = misfit, joined, noticed, left
        self.capacities: dict[str, Capacity] = {}
        self.last_words: dict[str, str] = {}
        self._refusals = Refusals()
        self._known: set[str] = set()
        self._names: dict[str, str] = {}
        self._joining: set[str] = set()
        self._refused: set[str] = set()
        self._labels: dict[str, str] = {}
        self._asking = asyncio.Lock()
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

    def check_idle(self, count: int, idle_seconds: float, misfits: Sequence[str] = ()) -> None:
        """Raise RunError if no worker has been of use for `idle_seconds`.

        Args:
            count: The number of workers that the job asks for.
            idle_seconds: How long to wait.
            misfits: Why those that are here are of no use; none if one is.
        """
        now = time.monotonic()
        self._alone_since = now if self.capacities and not misfits else self._alone_since
        if now - self._alone_since > idle_seconds:
            waited = "; ".join((self.missing_text(count), *misfits))
            raise RunError(
                f"no worker could be used for {idle_seconds:.0f} s (nodes.idle_duration); waited {waited}; "
                "fix that and add --resume if the run has begun"
            )

    def missing_text(self, count: int) -> str:
        """Say how many of `count` workers are here, and why others were refused."""
        text = f"for workers: {len(self.capacities)} of {count} are here"
        return "; ".join(filter(None, (text, self._refusals.text())))

    def name_of(self, address: str) -> str:
        """Return a worker's name, also after it left."""
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
                self._on_removed(address)
            case "last-words":
                self.last_words[message["name"]] = message["text"]
                for oldest in list(self.last_words)[:-MOST_LAST_WORDS]:
                    del self.last_words[oldest]
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

    def _on_removed(self, address: str) -> None:
        if address in self._known and address not in {*self.capacities, *self._refused}:
            self._tell_not_joining(address)
            self._refuse(address, ENDED_WHILE_JOINING, ENDINGS_UNTIL_TOLD)
        self._known.discard(address)
        self._refused.discard(address)
        self._restarting.discard(address)
        if self.capacities.pop(address, None):
            self._left(address, self._names[address])
        self._labels.pop(address, None)

    async def _admit(self, address: str) -> None:
        """Ask a new worker for its capacity, and admit it if it runs the same version and can hold a subnet."""
        if address in self._known:
            return
        self._known.add(address)
        try:
            label = await self._label(address)
            if self._refusals.reason_for(label) != ENDED_WHILE_JOINING:
                self._joining.add(address)
                self._record("worker_joining", worker=address)
            description, capacity = await self._examine(address)
        except RefusedError as refusal:
            if address in self._known:
                self._refused.add(address)
                self._joining.discard(address)
                self._refuse(address, str(refusal))
            return
        except PASSING as error:
            logger.info("worker %s did not join: %r", address, error)
            if address in self._known:
                self._tell_not_joining(address)
            self._known.discard(address)  # the next poll tries again, if it is still here
            return
        if address not in self._known:  # it left meanwhile
            return
        self._joining.discard(address)
        self._refusals.lift(label)
        if description["restarts"]:
            self._restarting.add(address)
        self.capacities[address] = capacity
        self._names[address] = description["name"]
        fields = ("name", "memory_bytes", "device", "steps_per_second", "cohort", "pid")
        self._record("worker_joined", worker=address, **{field: description[field] for field in fields})
        self._joined(address)

    async def _label(self, address: str) -> str:
        """Return what a person knows a worker by: the name that it was given, else its host."""
        async with self._asking:  # an earlier request may have got it, too
            if address not in self._labels:
                workers = (await self._client.scheduler.identity())["workers"]
                names = {at: str(worker["name"]) for at, worker in workers.items()}
                self._labels |= {at: machine_of(at) if name == at else name for at, name in names.items()}
        return self._labels.setdefault(address, machine_of(address))

    async def _examine(self, address: str) -> tuple[dict[str, Any], Capacity]:
        """Return what a worker says of itself, and its capacity.

        Raises:
            RefusedError: It cannot be used.
        """
        try:
            versions = await self._client.run(version, workers=[address], on_error="return")
            theirs = versions.get(address, TimeoutError("it has left"))
            if isinstance(theirs, Exception):
                raise theirs
            if theirs != version():
                raise RefusedError(f"it runs idletrain {theirs} and the head {version()}; install one version on both")
            key, on = f"describe-{address}", self._compiled_on
            described = self._client.submit(tasks.describe, on, workers=[address], key=key, pure=False)
            description = await asyncio.wait_for(described, DESCRIBE_SECONDS)
        except (RefusedError, *PASSING):
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the worker would fail so again)
            if "ModuleNotFoundError" in repr(error):  # by Dask as the text of another exception, at times
                advice = f"it lacks a module ({error}); install idletrain {version()} with all it needs"
            else:
                advice = f"its first task failed ({error!r}); fix that and start it again"
            raise RefusedError(advice) from None
        capacity = Capacity(
            description["memory_bytes"],
            description["steps_per_second"],
            description["leases"],
            streams=description["device"] == "cpu",
            cohort=description["cohort"],
        )
        if misfit := await asyncio.to_thread(self._misfit, capacity):
            raise RefusedError(misfit)
        return description, capacity

    def _refuse(self, address: str, reason: str, told_after: int = 1) -> None:
        """Keep why a worker cannot be used, and record it the first time, or the given one in a row."""
        label = self._labels.get(address, machine_of(address))
        if self._refusals.add(label, reason) == told_after:
            self._record("worker_refused", worker=address, reason=f"{label}: {reason}")

    def _tell_not_joining(self, address: str) -> None:
        if address in self._joining:
            self._joining.discard(address)
            self._record("joining_failed", worker=address)
