"""What a worker does: one Dask task trains one subnet of one round.

Specs and records are a few hundred bytes; parameters go straight to and from the store.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle
import psutil
import torch
from distributed import Worker, get_worker
from torch import Tensor

from idletrain.errors import RefusedError
from idletrain.exchange.client import StoreClient
from idletrain.exchange.wire import TAKEN, LeaseId, PushHeader, Reply, checksum
from idletrain.nn.data import Samples
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.program import Program

logger = logging.getLogger(__name__)
T = TypeVar("T")
BEAT_SECONDS = 1.0  # a tenth of the default lease
CALIBRATION_STEPS = 20  # of a 256-wide layer: 20 ms here, enough to tell a node from one half as fast


@dataclass(frozen=True)
class Spec:
    """One lease as it is sent to a worker; picklable in under 1 KB."""

    lease: LeaseId
    store: str
    shares: tuple[float, ...]
    mark_seconds: float


@dataclass
class Loaded:
    """A run's program on this worker, unpickled once."""

    program: Program
    samples: Samples
    order: BatchOrder
    client: StoreClient


class Node:
    """What a worker process keeps between tasks; also how `idletrain worker` tells a running task of a notice."""

    def __init__(self) -> None:
        self.draining = threading.Event()
        self.mark_now = threading.Event()
        self.memory_bytes: int | None = None
        self.loaded: dict[tuple[str, str, int], Loaded] = {}

    @classmethod
    def of(cls, worker: Worker) -> Node:
        """The node of a Dask worker, ours or a stock one."""
        node: Node = worker.extensions.setdefault("idletrain", cls())
        return node


def version() -> str:
    """The installed package's version."""
    return importlib.metadata.version("idletrain")


def describe() -> dict[str, Any]:
    """What a worker tells when it joins: its free memory in bytes, device, speed in steps/s, numeric cohort."""
    worker = get_worker()
    node = Node.of(worker)
    device = pick_device()
    process = psutil.Process()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        limit = node.memory_bytes or worker.memory_manager.memory_limit or psutil.virtual_memory().available
        free = limit - process.memory_info().rss
    return {
        "memory_bytes": max(0, int(free)),
        "device": str(device),
        "steps_per_second": measure_speed(device),
        "cohort": numeric_cohort(device),
        "pid": os.getpid(),
        "name": str(worker.name),
    }


def numeric_cohort(device: torch.device) -> str:
    """Workers of one cohort compute the same bits: same torch, instruction set, threads and kind of device."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__}/{capability}/{torch.get_num_threads()}/{device.type}"


def pick_device() -> torch.device:
    """The node's GPU, or its CPU if it has none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def measure_speed(device: torch.device) -> float:
    """Steps per second of CPU time (so that a busy neighbour does not count) of a small training step."""
    layer = torch.nn.Linear(256, 256, device=device)
    x = torch.ones(128, 256, device=device)
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    started = clock()
    for step in range(CALIBRATION_STEPS):
        if step == CALIBRATION_STEPS // 2:  # the first half warms up
            started = clock()
        layer(x).square().sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return CALIBRATION_STEPS / 2 / max(clock() - started, 1e-6)


def train_subnet(spec: Spec) -> dict[str, Any]:
    """Train one subnet until it has all its steps, a notice comes, or the lease is taken back.

    Returns:
        How it ended (`done`, `drained`, `revoked`), the steps it holds, and seconds and bytes by kind of work.
    """
    worker = get_worker()
    attempt = Attempt(spec, Node.of(worker), worker)
    try:
        return attempt.run()
    except RefusedError as refusal:
        return {"ended": "revoked", "reason": str(refusal), "steps": attempt.steps, **attempt.seconds, **attempt.bytes}


class Attempt:
    """One try at one lease, on the worker's task thread; its calls to the store run on the worker's event loop."""

    def __init__(self, spec: Spec, node: Node, worker: Worker) -> None:
        self._spec, self._node, self._worker = spec, node, worker
        self._revoked = threading.Event()
        self.steps = 0
        self.seconds = {"pull_seconds": 0.0, "train_seconds": 0.0, "push_seconds": 0.0}
        self.bytes = {"pull_bytes": 0, "push_bytes": 0}

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        loaded = self._load()
        beating = self._start(self._beat(loaded.client))
        try:
            self.steps, flat = self._call(loaded.client.pull(self._spec.lease))
            self.seconds["pull_seconds"] = time.perf_counter() - started
            self.bytes["pull_bytes"] = flat.nbytes
            return self._train(loaded, flat)
        finally:
            beating.cancel()

    def _load(self) -> Loaded:
        """The run's program, fetched once for every worker process and epoch."""
        key = (self._spec.store, self._spec.lease.run, self._spec.lease.epoch)  # another head's run may have our name
        if key not in self._node.loaded:
            client = StoreClient(self._spec.store, self._worker.security.get_connection_args("worker"))
            program: Program = cloudpickle.loads(self._call(client.program()))
            samples = program.source.open()
            training = program.training
            order = BatchOrder(training.seed, len(samples), training.batch_size, training.subnets)
            self._node.loaded = {key: Loaded(program, samples, order, client)}
        return self._node.loaded[key]

    def _train(self, loaded: Loaded, pulled: Tensor) -> dict[str, Any]:
        program, lease = loaded.program, self._spec.lease
        subnet = program.subnets(lease.round, self._spec.shares)[lease.subnet]
        flat = _all_slots(pulled, len(program.slots) * subnet.parameters).to(pick_device())
        work = LocalSteps(program, subnet, flat, lease.subnet, lease.round)
        work.resume_at(self.steps)
        mark: Any = None
        started = marked = time.perf_counter()
        while self.steps < program.training.local_steps and not self._revoked.is_set():
            work.step(loaded.samples, loaded.order, self.steps)
            self.steps += 1
            now = time.perf_counter()
            if self._node.draining.is_set():
                break
            due = now - marked > self._spec.mark_seconds or self._node.mark_now.is_set()
            if due and (mark is None or mark.done()):
                self._node.mark_now.clear()
                mark, marked = (
                    self._start(self._push(loaded.client, flat.cpu().clone(), self.steps, now - started)),
                    now,
                )
        self.seconds["train_seconds"] = time.perf_counter() - started
        if self._revoked.is_set():
            return {"ended": "revoked", "steps": self.steps, **self.seconds, **self.bytes}
        whole = self.steps == program.training.local_steps
        payload = flat[: program.travelling * subnet.parameters] if whole else flat
        pushing = time.perf_counter()
        reply = self._call(self._push(loaded.client, payload.cpu(), self.steps, self.seconds["train_seconds"]))
        self.seconds["push_seconds"] = time.perf_counter() - pushing
        self.bytes["push_bytes"] = payload.nbytes
        ended = ("done" if whole else "drained") if reply in TAKEN else "revoked"
        return {"ended": ended, "steps": self.steps, "reply": reply.value, **self.seconds, **self.bytes}

    def _push(self, client: StoreClient, flat: Tensor, steps: int, seconds: float) -> Coroutine[Any, Any, Reply]:
        digest = checksum([flat.numpy().data.cast("B")])
        return client.push(PushHeader(self._spec.lease, steps, seconds, digest), flat)

    async def _beat(self, client: StoreClient) -> None:
        """Prolong the lease until told that it is over."""
        while not self._revoked.is_set():
            await asyncio.sleep(BEAT_SECONDS)
            try:
                if await client.beat(self._spec.lease, self.steps) is not Reply.ACCEPTED:
                    self._revoked.set()
            except OSError as error:
                logger.warning("beat of subnet %d failed: %s", self._spec.lease.subnet, error)

    def _start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._worker.loop.asyncio_loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self._start(work).result()
        return result


def _all_slots(pulled: Tensor, size: int) -> Tensor:
    """The pulled buffer with room for optimizer state that starts at zero."""
    if len(pulled) == size:
        return pulled
    flat = torch.zeros(size)
    flat[: len(pulled)] = pulled
    return flat
