"""State that a worker process keeps between tasks: its open runs, its locks, and its description for the head."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import torch
from distributed import Worker, get_worker
from torch import Tensor

from idletrain.cluster import dask_settings
from idletrain.cluster.known_workers import STEPS_METRIC
from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import LeaseId
from idletrain.exchange.peers import Mailbox
from idletrain.nn.data.arrays import Samples
from idletrain.nn.data.datasets import loading_of
from idletrain.nn.data.read_ahead import ReadAhead, can_read_ahead
from idletrain.nn.local_steps import BatchOrder
from idletrain.nn.orders import batch_order
from idletrain.nn.program import Program
from idletrain.worker.cohort import numeric_cohort
from idletrain.worker.device import make_repeatable, measure_speed, pick_device
from idletrain.worker.lease_spec import LeaseSpec
from idletrain.worker.memory_limits import memory_limit_bytes

if TYPE_CHECKING:
    from idletrain.nn.outofcore.executing.trainer import Known

LEASES = 2  # of a worker at once: while one subnet trains, the next is pulled and the last is pushed
RUNS_KEPT = 2  # programs of runs that share this worker


@dataclass(frozen=True)
class Loaded:
    """A run's program, data and batch order on this worker, its plans for subnets trained out of core, and the
    processes that read ahead, if it has some.
    """

    program: Program
    samples: Samples
    order: BatchOrder
    plans: Known
    read_ahead: ReadAhead | None = None


@dataclass(frozen=True)
class UnsentRows:
    """Rows of an update that its push left out, to be sent later."""

    lease: LeaseId
    rows: Tensor


class WorkerRun:
    """One epoch of a run on this worker: a client of its store, and its program, fetched and unpickled once.

    Attributes:
        unsent_rows: Rows that earlier pushes left out, the oldest first.
    """

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.unsent_rows: deque[UnsentRows] = deque()
        self._loading = threading.Lock()
        self._loaded: Loaded | None = None

    def load(self, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> Loaded:
        """Return the program and its data, fetching them the first time; `call` runs a coroutine of the client."""
        with self._loading:
            if self._loaded is None:
                program: Program = cloudpickle.loads(call(self.client.program()))
                samples, training = program.source.open(), program.training
                order = batch_order(samples, training)
                if training.exchange.transport == "udp":
                    call(self.client.use_datagrams())
                readers = loading_of(samples).num_workers if can_read_ahead() else 0
                read_ahead = ReadAhead(program.source, samples, readers) if readers else None
                self._loaded = Loaded(program, samples, order, {}, read_ahead)
        return self._loaded


class WorkerNode:
    """State of a worker process between tasks, through which `idletrain worker` also warns a running task.

    Attributes:
        draining: Set when the node is about to be taken: the running subnet stops after its step.
        checkpoint_now: Set when the node may be taken soon: the running subnet sends a progress checkpoint.
        computing: Held by the one task that trains; another pulls or pushes meanwhile.
        mailbox: Messages from the other members of a lockstep group.
        moving: Held by the one transfer under way: with two, a checkpoint's copy would be the fifth of a subnet.
        on_hang: Called when the head finds that an attempt hangs; does nothing unless the process may end itself.
        restarts: Whether it does, and is replaced.
        memory_bytes: RAM that the process may use; None: all that is free.
        free_bytes: Memory that was free when the worker joined.
        steps: Steps that it has trained.
    """

    def __init__(self) -> None:
        make_repeatable()
        self.draining = threading.Event()
        self.checkpoint_now = threading.Event()
        self.computing = threading.Lock()
        self.moving = threading.Lock()
        self.mailbox = Mailbox()
        self.on_hang: Callable[[], None] = lambda: None
        self.restarts = False
        self.memory_bytes: int | None = None
        self.free_bytes = self.steps = 0
        self._runs: dict[tuple[str, str, int], WorkerRun] = {}
        self._opening = threading.Lock()

    @classmethod
    def of(cls, worker: Worker) -> WorkerNode:
        """Return the node of a Dask worker, creating it the first time."""
        if "idletrain" not in worker.extensions:
            dask_settings.draw_apart()
        node: WorkerNode = worker.extensions.setdefault("idletrain", cls())
        worker.metrics[STEPS_METRIC] = lambda _worker: node.steps
        return node

    def run_of(self, spec: LeaseSpec, worker: Worker) -> WorkerRun:
        """Return the run that a lease belongs to (another head's run may have the same name)."""
        key = (spec.store, spec.lease.run, spec.lease.epoch)
        with self._opening:
            run = self._runs.pop(key, None)
            if run is None:
                arguments = worker.security.get_connection_args("worker")
                run = WorkerRun(StoreClient(spec.store, arguments, worker.address))
            self._runs[key] = run
            for oldest in list(self._runs)[:-RUNS_KEPT]:
                former = self._runs.pop(oldest)
                asyncio.run_coroutine_threadsafe(former.client.close(), worker.loop.asyncio_loop)
        return run


def describe(compiled_on: Collection[str] = ()) -> dict[str, Any]:
    """Return what the head must know of this worker: free memory in bytes, device, speed in steps/s, numeric cohort,
    leases it can hold at once, process id and name.

    Args:
        compiled_on: The kinds of devices on which the job has steps compiled: there the cohort tells the compiler.
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
        "cohort": numeric_cohort(device, compiled_on),
        "leases": min(LEASES, worker.state.nthreads),
        "restarts": node.restarts,
        "pid": os.getpid(),
        "name": str(worker.name),
    }
