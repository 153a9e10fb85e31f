"""One attempt's traffic with the parameter store: pull, push, progress checkpoints, late rows and heartbeats.

An attempt runs on a task thread; every coroutine here runs on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from distributed import Worker
from distributed.worker import WORKER_ANY_RUNNING
from torch import Tensor

from idletrain.cluster import prompt_thread
from idletrain.exchange.admission import ADMISSION_BYTES
from idletrain.exchange.codec import ROW_BYTES, Codec
from idletrain.exchange.messages import Activity, PushHeader, Receipt, Reply, checksum
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.program import Program
from idletrain.worker import encoding
from idletrain.worker.encoding import ROUNDS_KEPT
from idletrain.worker.lease_spec import LeaseSpec
from idletrain.worker.node import UnsentRows, WorkerNode, WorkerRun

logger = logging.getLogger(__name__)
T = TypeVar("T")
HEARTBEATS_PER_LEASE = 10
WAIT_POLL_SECONDS = 0.1  # between two checks whether a waiting attempt is still wanted
ACCOUNT_FIELDS = (
    "wait_seconds",
    "train_seconds",
    *(
        f"{direction}_{quantity}"
        for direction in encoding.DIRECTIONS
        for quantity in ("wait_seconds", "seconds", "bytes")
    ),
)


@dataclass(frozen=True)
class Progress:
    """An attempt's progress: steps since the round's start, seconds spent in them, mean loss of the last few, and how
    far its part of a stream was read.
    """

    steps: int
    train_seconds: float
    loss: float | None
    position: str = ""


class Transfers:
    """Everything that one attempt sends to the store and receives from it.

    Attributes:
        account: Seconds by kind of work and bytes moved, by name.
        revoked: Set once the lease is over or the head is gone.
    """

    def __init__(self, spec: LeaseSpec, run: WorkerRun, node: WorkerNode, worker: Worker) -> None:
        self._spec, self._run, self._node, self._worker = spec, run, node, worker
        self._calls: set[Future[Any]] = set()
        self._baseline: Tensor | None = None  # the buffer as pulled at step 0, where updates travel as changes from it
        self.revoked = threading.Event()
        self.account: dict[str, Any] = dict.fromkeys(ACCOUNT_FIELDS, 0.0)

    # --- calls and turns ------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the worker's event loop."""
        call = asyncio.run_coroutine_threadsafe(work, self._worker.loop.asyncio_loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the worker's event loop and return its result."""
        return self.start(work).result()

    def is_unwanted(self) -> bool:
        """Return whether to stop: the node is about to be taken, or the lease is over."""
        return self._node.draining.is_set() or self.revoked.is_set()

    def acquire(self, lock: threading.Lock) -> bool:
        """Wait for a lock that the worker's other subnet holds; return False once this attempt should stop."""
        while not lock.acquire(timeout=WAIT_POLL_SECONDS):
            if self.is_unwanted():
                return False
        return True

    @contextlib.contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time spent within to a field of the account."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.account[field] += time.perf_counter() - started

    @contextlib.contextmanager
    def transferring(self, direction: encoding.Direction, size_bytes: int) -> Iterator[None]:
        """Wait for the worker's other transfer to end, and count both the wait and the time within.

        Args:
            direction: What is transferred.
            size_bytes: How much, about. Beside the thread that trains, what is large leaves its link idle while this
                thread waits for a core; of many small transfers, each turn before others costs these more.
        """
        with self.timed(f"{direction}_wait_seconds"):
            acquired = self.acquire(self._node.moving)
        try:
            is_large = size_bytes > ADMISSION_BYTES
            with prompt_thread.prompt() if is_large else contextlib.nullcontext(), self.timed(f"{direction}_seconds"):
                yield
        finally:
            if acquired:
                self._node.moving.release()

    def send_in_background(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Send what `make` returns while steps go on; return False if another transfer is under way."""
        if not self._node.moving.acquire(blocking=False):
            return False
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._node.moving.release)
            sent = self.start(make())
            on_failure.pop_all()
        sent.add_done_callback(lambda _: self._node.moving.release())
        return True

    # --- parameters -----------------------------------------------------------------------------------------------

    def pull(self, program: Program, subnet: Subnet) -> tuple[int, Tensor]:
        """Fetch the subnet: return the steps it holds and its flat buffer, decoded."""
        steps, pulled = self.call(self._run.client.pull(self._spec.lease))
        self.account["pull_bytes"] = pulled.nbytes
        flat = pulled if steps else encoding.decode_pull(program, subnet, pulled)
        if not steps and program.training.exchange.push != "fp32":
            self._baseline = pulled.clone()  # training works in place on an uncoded buffer
        return steps, flat

    def send(
        self, payload: Tensor, progress: Progress, *, update: bool, prompt: int = 0, urgent: bool = False
    ) -> Coroutine[Any, Any, Receipt]:
        """Return the coroutine that pushes a payload, as an update or as a progress checkpoint.

        Args:
            payload: The bytes to push.
            progress: What they hold.
            update: Whether it is the round's update.
            prompt: Leading bytes that matter most.
            urgent: Whether it goes before waiting pushes, because the node leaves.
        """
        digest = checksum([payload.numpy().data.cast("B")])
        header = PushHeader(
            self._spec.lease,
            progress.steps,
            progress.train_seconds,
            digest,
            update,
            progress.loss,
            progress.position,
        )
        return self._run.client.push(header, payload, prompt, urgent=urgent)

    def push(self, program: Program, subnet: Subnet, flat: Tensor, progress: Progress, *, whole: bool) -> Reply:
        """Push the result: an update if all steps are done (`whole`), else usually a progress checkpoint."""
        size = program.buffer_size(subnet, persistent=True)
        coded = program.training.exchange.push != "fp32"
        # Before all steps are done, a coded update arrives more surely before the node is gone, being smaller; only
        # `salvage` can use one.
        update = whole or (coded and self._spec.salvage)
        payload = (flat[:size] if update else flat).cpu()
        codec = encoding.codec(program, subnet, "push") if update else None
        if codec:
            payload = self._encode(program, subnet, payload)
        self.account["push_bytes"] = payload.nbytes
        prompt = codec.first_row + ROW_BYTES * codec.chunks if codec else payload.nbytes
        receipt = self.call(self.send(payload, progress, update=update, prompt=prompt, urgent=not whole))
        if codec and receipt.missing:
            self._keep_unsent_rows(codec, payload, receipt.missing)
        return receipt.reply

    def _encode(self, program: Program, subnet: Subnet, flat: Tensor) -> Tensor:
        """Encode the update as a change from the round's initial values.

        An attempt that resumed from a progress checkpoint fetches those first.
        """
        if self._baseline is None:
            _, self._baseline = self.call(self._run.client.pull(self._spec.lease, at=0))
            self.account["pull_bytes"] += self._baseline.nbytes
        baseline = encoding.decode_pull(program, subnet, self._baseline)
        return encoding.encode_update(program, subnet, flat, baseline, self._spec.lease)

    # --- late rows ------------------------------------------------------------------------------------------------

    def _keep_unsent_rows(self, codec: Codec, payload: Tensor, missing: bytes) -> None:
        rows_RB = payload[codec.first_row :].view(-1, ROW_BYTES)
        bits = np.unpackbits(np.frombuffer(missing, np.uint8), count=codec.rows, bitorder="little").astype(bool)
        rows = rows_RB[torch.from_numpy(bits)].flatten()
        self.account |= {"unsent_bytes": rows.nbytes}
        self._run.unsent_rows.append(UnsentRows(self._spec.lease, rows))

    def has_unsent_rows(self) -> bool:
        """Return whether rows of an earlier round's update wait to be sent, after dropping those that are too old."""
        unsent, current = self._run.unsent_rows, self._spec.lease.round
        while unsent and unsent[0].lease.round < current - ROUNDS_KEPT:
            self._count("dropped_bytes", unsent.popleft())
        return bool(unsent) and unsent[0].lease.round < current

    async def send_late_rows(self) -> None:
        """Send the oldest rows that an earlier update left out, while the link is idle."""
        if not self._run.unsent_rows:  # another attempt was first
            return
        oldest = self._run.unsent_rows.popleft()
        try:
            reply = await self._run.client.late_rows(oldest.lease, oldest.rows)
        except ConnectionError:
            self._run.unsent_rows.appendleft(oldest)
            raise
        self._count("late_bytes" if reply is Reply.ACCEPTED else "dropped_bytes", oldest)

    def _count(self, field: str, unsent: UnsentRows) -> None:
        self.account[field] = self.account.get(field, 0) + unsent.rows.nbytes

    # --- heartbeats -----------------------------------------------------------------------------------------------

    async def beat(self, report: Callable[[], tuple[int, Activity]]) -> None:
        """Renew the lease, reporting steps and activity, until the attempt ends; cancel calls once the head is dead.

        Beats go on after the lease is over: the head may answer that this attempt hangs.
        """
        answered_at = time.monotonic()
        while True:
            await asyncio.sleep(self._spec.lease_seconds / HEARTBEATS_PER_LEASE)
            try:
                reply = await self._run.client.beat(self._spec.lease, *report())
            except ConnectionError as error:
                logger.warning("heartbeat of subnet %d failed: %s", self._spec.lease.subnet, error)
                silent = time.monotonic() - answered_at > self._spec.lease_seconds
                if silent or self._worker.status not in WORKER_ANY_RUNNING:  # the head, or its scheduler, is dead
                    self.revoked.set()
                    for call in tuple(self._calls):
                        call.cancel()
                    return
            else:
                answered_at = time.monotonic()
                if reply is not Reply.ACCEPTED:
                    self.revoked.set()
                if reply is Reply.HUNG:
                    self._node.on_hang()
