"""Sends leases to workers as Dask tasks and follows each attempt to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dask
from distributed import Client, Future
from distributed.scheduler import KilledWorker, NoValidWorkerError

from idletrain.errors import placed
from idletrain.exchange.messages import LeaseId
from idletrain.exchange.store import StoreServer
from idletrain.rounds.downloads import Downloads
from idletrain.rounds.protocol import AttemptEnded, GrantLease
from idletrain.rounds.reassembly import Reassembly
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.table import RoundState
from idletrain.rounds.widths import Capacity
from idletrain.worker import tasks
from idletrain.worker.lease_spec import LeaseSpec, TrainingMode

logger = logging.getLogger(__name__)
MOST_REASON = 300  # characters in a record
TASK_NAME = "train-subnet"  # Dask keeps a group for every name in front of a number, for ever


class Leases:
    """The attempts under way.

    Args:
        run: The run.
        client: An asynchronous client of the cluster whose workers train.
        capacities: What each worker brings, by address; lowered where a subnet did not fit after all.
        store: Where workers pull and push; told of attempts that ended.
        downloads: What they pull.
        reassembly: What they push; told of attempts that ended.

    Attributes:
        failure: The last error of the job's own code on a worker, with its traceback there.
    """

    def __init__(
        self,
        run: RunContext,
        client: Client,
        capacities: dict[str, Capacity],
        store: StoreServer,
        downloads: Downloads,
        reassembly: Reassembly,
    ) -> None:
        self._run, self._client, self._capacities = run, client, capacities
        self._store, self._downloads, self._reassembly = store, downloads, reassembly
        self._address = ""
        self._futures: dict[int, tuple[str, Future]] = {}
        self._accounts: dict[int, dict[str, Any]] = {}
        self._ended: list[Future] = []
        self.failure: BaseException | None = None

    def listen(self, address: str) -> None:
        """Send the store's address with leases from now on, and take attempts' records from the topic of that name."""
        self._address = address
        self._client.subscribe_topic(address, self._on_account)

    @property
    def pending(self) -> bool:
        """Return whether attempts are under way."""
        return bool(self._futures)

    def send(self, opened: RoundState, commands: Sequence[GrantLease]) -> None:
        """Send leases to their workers in one graph: the scheduler's work is by the message, not by the task."""
        run, preemption = self._run, self._run.job.preemption
        keys, specs, workers = [], [], {}
        for command in commands:
            lease = command.lease
            run.record("leased", **_names(lease, command.worker), step=command.step, backup=command.backup)
            self._downloads.prepare(lease, command.step)
            keys.append(f"{TASK_NAME}-{lease.round:05d}-{lease.subnet}-{lease.attempt}-{self._client.id}")
            specs.append(
                LeaseSpec(
                    lease,
                    self._address,
                    run.directory.places[lease.subnet],
                    _training_mode(opened, lease.subnet),
                    preemption.progress_every,
                    preemption.lease,
                    opened.rules.salvage,
                    run.directory.first_step_of(lease.subnet),
                )
            )
            workers[keys[-1]] = [command.worker]
        with dask.annotate(workers=workers.get):  # each task to its own worker; `map` itself takes one set for all
            futures = self._client.map(tasks.train_subnet, specs, key=keys, pure=False, retries=0)
        for command, future in zip(commands, futures, strict=True):
            self._futures[command.lease.attempt] = command.worker, future
            run.spawn(self._follow(command.lease, command.worker, future))
        # Only now: Dask sends a worker something every 5 ms at most, and a release would make the lease wait.
        self._ended.clear()

    def cancel_on(self, worker: str) -> None:
        """Cancel the attempts of a worker that left: a stock cluster would keep them pending for ever."""
        for holder, future in list(self._futures.values()):
            if holder == worker:
                self._run.spawn(future.cancel())

    def release(self) -> None:
        """Let the cluster forget all attempts."""
        for _, future in self._futures.values():
            future.release()

    def _on_account(self, event: tuple[float, dict[str, Any]]) -> None:
        """Keep a worker's own record of an attempt; the task's end arrives right after it."""
        attempt = event[1]["attempt"]
        if attempt in self._futures:
            self._accounts[attempt] = event[1]["account"]

    async def _follow(self, lease: LeaseId, worker: str, future: Future) -> None:
        """Wait for an attempt's end, of whatever kind; only the write-ahead log says what it achieved."""
        run, failed = self._run, False
        error = await future.exception()
        account = self._accounts.pop(lease.attempt, {"ended": "cancelled"})
        if error is not None:  # a task may die of anything; the subnet is leased again
            logger.info("attempt %d at subnet %d ended: %r", lease.attempt, lease.subnet, error)
            failed = not isinstance(error, ConnectionError | KilledWorker | NoValidWorkerError)
            error.__traceback__ = await future.traceback()
            account = {"ended": "error", "reason": placed(error)[:MOST_REASON]}
            if isinstance(error, ConnectionError) and not self._store.bytes_down:
                run.record_waiting(
                    f"workers do not reach the store at {self._address}; let them through to this machine"
                )
            self.failure = error if failed else self.failure
        self._ended.append(self._futures.pop(lease.attempt)[1])
        self._downloads.drop(lease.attempt)
        run.record("attempt_ended", **_names(lease, worker), **account)
        out_of_memory = account["ended"] == "out_of_memory"
        run.handle(
            AttemptEnded(now=time.monotonic(), lease=lease, worker=worker, failed=failed, out_of_memory=out_of_memory)
        )
        self._reassembly.drop(lease.attempt)
        self._store.attempt_ended(lease)
        if out_of_memory and run.state and worker in run.state.workers and worker in self._capacities:
            memory_bytes = run.state.workers[worker].memory_bytes  # the next rounds are planned with that
            self._capacities[worker] = replace(self._capacities[worker], memory_bytes=memory_bytes)


def _names(lease: LeaseId, worker: str) -> dict[str, Any]:
    return {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt, "worker": worker}


def _training_mode(opened: RoundState, k: int) -> TrainingMode:
    if opened.rules.lockstep:
        return "lockstep"
    return "out-of-core" if opened.subnets[k].exclusive else "in-core"
