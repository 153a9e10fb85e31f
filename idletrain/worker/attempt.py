"""What a worker does: an attempt trains one subnet of one round.

Specs and records are a few hundred bytes; parameters go straight to and from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import numpy as np
import psutil
import torch
from distributed import Worker, get_worker
from distributed.worker import WORKER_ANY_RUNNING
from torch import Tensor

from idletrain.errors import RefusedError
from idletrain.exchange.client import StoreClient
from idletrain.exchange.codec import ROW_BYTES, Codec
from idletrain.exchange.messages import DONE_REPLIES, LeaseId, PushHeader, Receipt, Reply, checksum
from idletrain.exchange.peers import Mailbox
from idletrain.nn.data.arrays import Samples
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.program import Program
from idletrain.worker import encoding
from idletrain.worker.cohort import numeric_cohort
from idletrain.worker.encoding import ROUNDS_KEPT
from idletrain.worker.lease_spec import LeaseSpec
from idletrain.worker.memory_limits import memory_limit_bytes

if TYPE_CHECKING:
    from idletrain.nn.outofcore.executing.trainer import Known

logger = logging.getLogger(__name__)
T = TypeVar("T")
LEASES = 2  # of a worker at once: while one subnet trains, the next is pulled and the last is pushed
HEARTBEATS_PER_LEASE = 10  # to a lease
COMPUTE_WAIT_POLL_SECONDS = 0.1  # between two looks whether a subnet that waits for its turn is still wanted
TRANSFERS = ("pull", "push")
ACCOUNT_FIELDS = (
    "wait_seconds",
    "train_seconds",
    *(f"{w}_{what}" for w in TRANSFERS for what in ("wait_seconds", "seconds", "bytes")),
)
RUNS_KEPT = 2  # programs of runs that share this worker
LOSS_STEPS = 10  # whose mean loss is reported: the last ones, as the network then stands
CALIBRATION_STEPS = 20  # of a 256-wide layer: 20 ms here, enough to tell a node from one half as fast


@dataclass(frozen=True)
class Loaded:
    """A run's program and data on this worker, and what was planned of subnets that are trained out of core."""

    program: Program
    samples: Samples
    order: BatchOrder
    plans: Known


@dataclass(frozen=True)
class UnsentRows:
    """Rows of an update that its push lacked."""

    lease: LeaseId
    rows: Tensor


class WorkerRun:
    """One epoch of a run on this worker: its store, and its program, fetched and unpickled once.

    Attributes:
        owed: What pushes lacked, the oldest first.
    """

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.unsent_rows: deque[UnsentRows] = deque()
        self._loading = threading.Lock()
        self._loaded: Loaded | None = None

    def load(self, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> Loaded:
        """The program; `call` runs a coroutine of the client."""
        with self._loading:
            if self._loaded is None:
                program: Program = cloudpickle.loads(call(self.client.program()))
                samples, training = program.source.open(), program.training
                order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
                if training.exchange.transport == "udp":
                    call(self.client.use_datagrams())
                self._loaded = Loaded(program, samples, order, {})
        return self._loaded


class WorkerNode:
    """What a worker process keeps between tasks; also how `idletrain worker` tells a running task of a notice.

    Attributes:
        computing: Held by the one task that trains; another pulls or pushes meanwhile.
        mailbox: Letters of those that train in lockstep with this worker.
        moving: Held by whatever pulls, pushes or marks: of two at once, a mark's copy would be the fifth of a subnet.
    """

    def __init__(self) -> None:
        self.draining = threading.Event()
        self.checkpoint_now = threading.Event()
        self.computing = threading.Lock()
        self.moving = threading.Lock()
        self.mailbox = Mailbox()
        self.memory_bytes: int | None = None
        self.free_bytes = 0  # when it joined
        self._runs: dict[tuple[str, str, int], WorkerRun] = {}
        self._entering = threading.Lock()

    @classmethod
    def of(cls, worker: Worker) -> WorkerNode:
        """The node of a Dask worker, ours or a stock one."""
        node: WorkerNode = worker.extensions.setdefault("idletrain", cls())
        return node

    def run_of(self, spec: LeaseSpec, worker: Worker) -> WorkerRun:
        """The run that a lease belongs to (another head's run may have the same name)."""
        key = (spec.store, spec.lease.run, spec.lease.epoch)
        with self._entering:
            run = self._runs.pop(key, None)
            if run is None:
                arguments = worker.security.get_connection_args("worker")
                run = WorkerRun(StoreClient(spec.store, arguments, worker.address))
            self._runs[key] = run
            for oldest in list(self._runs)[:-RUNS_KEPT]:
                former = self._runs.pop(oldest)
                asyncio.run_coroutine_threadsafe(former.client.close(), worker.loop.asyncio_loop)
        return run


def describe() -> dict[str, Any]:
    """What a worker tells when it joins: its free memory in bytes, device, speed in steps/s, numeric cohort, and how
    many leases it can hold at once.
    """
    worker = get_worker()
    node = WorkerNode.of(worker)
    device = pick_device()
    process = psutil.Process()
    if device.type == "cuda":
        free = min(torch.cuda.mem_get_info(device)[0], node.memory_bytes or sys.maxsize)
    else:
        limit = node.memory_bytes or worker.memory_manager.memory_limit or psutil.virtual_memory().available
        free = min(limit, memory_limit_bytes()) - process.memory_info().rss
    node.free_bytes = max(0, int(free))
    return {
        "memory_bytes": node.free_bytes,
        "device": str(device),
        "steps_per_second": measure_speed(device),
        "cohort": numeric_cohort(device),
        "leases": min(LEASES, worker.state.nthreads),
        "pid": os.getpid(),
        "name": str(worker.name),
    }


def pick_device() -> torch.device:
    """The node's GPU, or its CPU if it has none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_for(program: Program) -> torch.device:
    """Where a program trains: a very wide output's samplers and row steps run on the CPU."""
    return torch.device("cpu") if program.output else pick_device()


def measure_speed(device: torch.device) -> float:
    """Steps per second of CPU time (so that a busy neighbour does not count) of a small training step."""
    weight = torch.ones(256, 256, device=device, requires_grad=True)  # no random numbers: another run may draw some now
    x = torch.ones(128, 256, device=device)
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    started = clock()
    for step in range(CALIBRATION_STEPS):
        if step == CALIBRATION_STEPS // 2:  # the first half warms up
            started = clock()
        torch.autograd.backward(torch.nn.functional.linear(x, weight).square().sum())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return CALIBRATION_STEPS / 2 / max(clock() - started, 1e-6)


def carry_out(kind: type[Attempt], spec: LeaseSpec) -> None:
    """Train one subnet until it has all its steps, a notice comes, or the lease is taken back.

    The account (how it ended: `done`, `drained`, `revoked`, or `unfit` when this node cannot train such a subnet after
    all; the steps it holds, seconds by kind of work, payload bytes moved) goes to the head as an event of the store's
    topic, right ahead of the task's end. The head would have to fetch a result by way of the scheduler: two more calls
    between three processes.
    """
    worker = get_worker()
    attempt = kind(spec, WorkerNode.of(worker), worker)
    try:
        account = attempt.run()
    except (RefusedError, CancelledError) as refusal:
        account = attempt.report("revoked", reason=str(refusal))
    worker.log_event(spec.store, {"attempt": spec.lease.attempt, "account": account})


class Attempt:
    """One try at one lease, on a task thread of the worker; its calls to the store run on the worker's event loop."""

    def __init__(self, spec: LeaseSpec, node: WorkerNode, worker: Worker) -> None:
        self._lease_spec, self._node, self._worker = spec, node, worker
        self._run = node.run_of(spec, worker)
        self._revoked = threading.Event()
        self._calls: set[Future[Any]] = set()
        self._flat = torch.empty(0)
        self._baseline: Tensor | None = None  # as it was pulled, where updates travel as changes from it
        self.steps = 0
        self._losses: deque[Tensor] = deque(maxlen=LOSS_STEPS)
        self.account: dict[str, Any] = dict.fromkeys(ACCOUNT_FIELDS, 0.0)

    def run(self) -> dict[str, Any]:
        """Pull, wait for the turn to train, train, push; returns the account."""
        beating = self._start(self._beat())
        try:
            loaded = self._run.load(self._call)
            subnet = loaded.program.subnet(self._lease_spec.lease.round, self._lease_spec.blocks)
            with self._transferring("pull"):
                self._pull(loaded, subnet)
            began = self.steps
            with self._timed("wait_seconds"):
                mine = self._acquire(self._node.computing)
            if mine:
                try:
                    self._train(loaded, subnet)
                finally:
                    self._node.computing.release()
            if self._revoked.is_set():
                return self.report("revoked")
            if self.steps == began:
                return self.report("drained")
            whole = self.steps == loaded.program.training.local_steps
            with self._transferring("push"):
                reply = self._push(loaded, subnet, whole=whole)
        finally:
            beating.cancel()
        ended = ("done" if whole else "drained") if reply in DONE_REPLIES else "revoked"
        return self.report(ended, reply=reply.value)

    def _acquire(self, turn: threading.Lock) -> bool:
        """Wait until the other subnet is done with it; False if this one cannot wait for that or is not wanted."""
        while not turn.acquire(timeout=COMPUTE_WAIT_POLL_SECONDS):
            if self._is_unwanted():
                return False
        return True

    def _is_unwanted(self) -> bool:
        return self._node.draining.is_set() or self._revoked.is_set()

    @contextlib.contextmanager
    def _transferring(self, direction: str) -> Iterator[None]:
        with self._timed(f"{direction}_wait_seconds"):
            mine = self._acquire(self._node.moving)
        try:
            with self._timed(f"{direction}_seconds"):
                yield
        finally:
            if mine:
                self._node.moving.release()

    def report(self, ended: str, **why: str) -> dict[str, Any]:
        """The account as it stands."""
        return {"ended": ended, **why, "steps": self.steps, "transport": self._run.client.transport, **self.account}

    def _pull(self, loaded: Loaded, subnet: Subnet) -> None:
        self.steps, pulled = self._call(self._run.client.pull(self._lease_spec.lease))
        self.account["pull_bytes"] = pulled.nbytes
        self._flat = pulled if self.steps else encoding.decode_pull(loaded.program, subnet, pulled)
        if not self.steps and loaded.program.training.exchange.push != "fp32":
            self._baseline = pulled.clone()  # training works in place on what came uncoded

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        """Do the steps that are left."""
        program, lease = loaded.program, self._lease_spec.lease
        self._flat = all_slots(self._flat, program.buffer_size(subnet, persistent=False)).to(device_for(program))
        work = LocalSteps(program, subnet, self._flat, lease.subnet, lease.round)
        order = self._open_shard(loaded, work, subnet) if program.output else loaded.order
        self._steps(loaded, work, order)
        if program.output:
            self._count_draws(work)

    def _count_draws(self, work: LocalSteps) -> None:
        from idletrain.nn.wide import label_shards

        found = label_shards.wide_output(work.module)
        assert found
        self.account |= {"sampler_draws": found[1].drawn_batches, "sampler_fallbacks": found[1].fallbacks}

    def _open_shard(self, loaded: Loaded, work: LocalSteps, subnet: Subnet) -> BatchOrder:
        """Ready a very wide output; its tables are those of the round's start, also in the middle of it."""
        from idletrain.nn.wide import label_shards  # and with it Numba

        lease, begun = self._lease_spec.lease, self._flat
        if self.steps and label_shards.keeps_tables(loaded.program):
            _, begun = self._call(self._run.client.pull(lease, at=0))
        place = label_shards.ShardPlace(lease.round, lease.subnet)
        return label_shards.open_output(loaded.program, work.module, subnet, loaded.samples, begun, place)

    def _steps(self, loaded: Loaded, work: LocalSteps, order: BatchOrder) -> None:
        """The steps that are left, with marks."""
        all_steps, began = loaded.program.training.local_steps, self.steps
        started = marked = time.perf_counter()
        while self.steps < all_steps and not self._is_unwanted():
            self._losses.append(work.step(loaded.samples, order, self.steps))
            self.steps += 1
            now = time.perf_counter()
            left = all_steps - self.steps  # after the last comes the update itself
            seconds_left = left * (now - started) / (self.steps - began)
            due = self._is_checkpoint_due(now - marked, seconds_left)
            if due and left and self._send_in_background(functools.partial(self._save_progress, now - started)):
                self._node.checkpoint_now.clear()
                marked = now
            elif self._has_unsent_rows():
                self._send_in_background(self._send_late_rows)
        self.account["train_seconds"] = time.perf_counter() - started

    def _send_in_background(self, what: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Send something while steps go on; False if something else is on its way."""
        if not self._node.moving.acquire(blocking=False):
            return False
        with contextlib.ExitStack() as failed:
            failed.callback(self._node.moving.release)
            sent = self._start(what())
            failed.pop_all()
        sent.add_done_callback(lambda _: self._node.moving.release())
        return True

    def _has_unsent_rows(self) -> bool:
        """Whether rows of an earlier round's update are to be sent; those that nobody takes any more are given up."""
        owed, now = self._run.unsent_rows, self._lease_spec.lease.round
        while owed and owed[0].lease.round < now - ROUNDS_KEPT:
            self._count("given_up_bytes", owed.popleft())
        return bool(owed) and owed[0].lease.round < now

    async def _send_late_rows(self) -> None:
        """Send the rows that an update of an earlier round lacked, now that the link is idle."""
        if not self._run.unsent_rows:  # another attempt was first
            return
        debt = self._run.unsent_rows.popleft()
        try:
            reply = await self._run.client.late_rows(debt.lease, debt.rows)
        except ConnectionError:
            self._run.unsent_rows.appendleft(debt)
            raise
        self._count("repaid_bytes" if reply is Reply.ACCEPTED else "given_up_bytes", debt)

    def _count(self, what: str, unsent: UnsentRows) -> None:
        self.account[what] = self.account.get(what, 0) + unsent.rows.nbytes

    def _is_checkpoint_due(self, since_last: float, seconds_left: float) -> bool:
        takes = self.account["pull_seconds"] * self._flat.nbytes / self.account["pull_bytes"]  # as long as the pull
        return self._node.checkpoint_now.is_set() or self._lease_spec.wants_checkpoint(since_last, seconds_left, takes)

    def _save_progress(self, seconds: float) -> Coroutine[Any, Any, Receipt]:
        return self._send(self._flat.cpu().clone(), seconds, update=False)

    def _push(self, loaded: Loaded, subnet: Subnet, *, whole: bool) -> Reply:
        size = loaded.program.buffer_size(subnet, persistent=True)
        coded = loaded.program.training.exchange.push != "fp32"
        # Of few steps, what is small gets home before the node is gone; only `salvage` can do with a change.
        update = whole or (coded and self._lease_spec.salvage)
        payload = (self._flat[:size] if update else self._flat).cpu()
        codec = encoding.codec(loaded.program, subnet, "push") if update else None
        if codec:
            payload = self._encoded(loaded, subnet, payload)
        self.account["push_bytes"] = payload.nbytes
        prompt = codec.first_row + ROW_BYTES * codec.chunks if codec else payload.nbytes
        seconds = self.account["train_seconds"]
        receipt = self._call(self._send(payload, seconds, update=update, prompt=prompt, urgent=not whole))
        if codec and receipt.missing:
            self._keep_unsent_rows(codec, payload, receipt.missing)
        return receipt.reply

    def _keep_unsent_rows(self, codec: Codec, payload: Tensor, missing: bytes) -> None:
        rows_RB = payload[codec.first_row :].view(-1, ROW_BYTES)
        bits = np.unpackbits(np.frombuffer(missing, np.uint8), count=codec.rows, bitorder="little").astype(bool)
        rows = rows_RB[torch.from_numpy(bits)].flatten()
        self.account |= {"late_bytes": rows.nbytes}
        self._run.unsent_rows.append(UnsentRows(self._lease_spec.lease, rows))

    def _encoded(self, loaded: Loaded, subnet: Subnet, flat: Tensor) -> Tensor:
        """The update by what the round began with, which whoever goes on from a mark has yet to ask for."""
        if self._baseline is None:
            _, self._baseline = self._call(self._run.client.pull(self._lease_spec.lease, at=0))
            self.account["pull_bytes"] += self._baseline.nbytes
        begun = encoding.decode_pull(loaded.program, subnet, self._baseline)
        return encoding.encode_update(loaded.program, subnet, flat, begun, self._lease_spec.lease)

    def _send(
        self, payload: Tensor, seconds: float, *, update: bool, prompt: int = 0, urgent: bool = False
    ) -> Coroutine[Any, Any, Receipt]:
        digest = checksum([payload.numpy().data.cast("B")])
        header = PushHeader(self._lease_spec.lease, self.steps, seconds, digest, update, self._loss)
        return self._run.client.push(header, payload, prompt, urgent=urgent)

    @property
    def _loss(self) -> float | None:
        """Mean training loss of the last steps."""
        return float(torch.stack(list(self._losses)).mean()) if self._losses else None

    async def _beat(self) -> None:
        """Prolong the lease until told that it is over; give all up when there is nobody to work for any more."""
        heard = time.monotonic()
        while not self._revoked.is_set():
            await asyncio.sleep(self._lease_spec.lease_seconds / HEARTBEATS_PER_LEASE)
            try:
                reply = await self._run.client.beat(self._lease_spec.lease, self.steps)
            except ConnectionError as error:
                logger.warning("beat of subnet %d failed: %s", self._lease_spec.lease.subnet, error)
                silent = time.monotonic() - heard > self._lease_spec.lease_seconds
                if silent or self._worker.status not in WORKER_ANY_RUNNING:  # the head, or its scheduler, is dead
                    self._revoked.set()
                    for call in tuple(self._calls):
                        call.cancel()
            else:
                heard = time.monotonic()
                if reply is not Reply.ACCEPTED:
                    self._revoked.set()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.account[what] += time.perf_counter() - started

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        call = asyncio.run_coroutine_threadsafe(work, self._worker.loop.asyncio_loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._start(work).result()


def all_slots(pulled: Tensor, size: int) -> Tensor:
    """The pulled buffer with room for optimizer state that starts at zero."""
    if len(pulled) == size:
        return pulled
    flat = torch.zeros(size)
    flat[: len(pulled)] = pulled
    return flat
