"""One attempt at a lease: pull a subnet, train it, push it.

Lease specs and accounts are a few hundred bytes; parameters go straight between the worker and the store.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any

import torch
from distributed import Worker, get_worker
from torch import Tensor

from idletrain.errors import RefusedError
from idletrain.exchange.messages import DONE_REPLIES, Activity, Receipt, Reply
from idletrain.nn.data.read_ahead import stream_position
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.local_steps import BatchOrder, LocalSteps
from idletrain.nn.orders import StreamOrder
from idletrain.worker.device import compute_repeatably, device_for, finish, repeatably
from idletrain.worker.lease_spec import LeaseSpec
from idletrain.worker.node import Loaded, WorkerNode
from idletrain.worker.transfers import Progress, Transfers

ALIGNMENT_BYTES = 64  # of memory that torch allocates on a CPU
LOSS_STEPS = 10  # whose mean loss is reported: the last ones, as the network then stands


def train_lease(attempt_type: type[Attempt], spec: LeaseSpec) -> None:
    """Train one subnet until it has all its steps, the node is about to be taken, or the lease is revoked.

    The account goes to the head as an event of the store's topic, right ahead of the task's end: how the attempt ended
    (`done`, `drained`, `revoked`, or `out_of_memory` when this node cannot train such a subnet after all), the steps it
    holds, seconds by kind of work, payload bytes moved. As a task's result the head would have to fetch it by way of
    the scheduler: two more calls between three processes.
    """
    worker = get_worker()
    attempt = attempt_type(spec, WorkerNode.of(worker), worker)
    try:
        account = attempt.run()
    except (RefusedError, CancelledError) as refusal:
        account = attempt.report("revoked", reason=str(refusal))
    worker.log_event(spec.store, {"attempt": spec.lease.attempt, "account": account})


class Attempt:
    """One try at one lease, on a task thread of the worker.

    Attributes:
        steps: Local steps that the subnet holds, counted from the round's start.
        account: Seconds by kind of work and bytes moved, by name.
    """

    def __init__(self, spec: LeaseSpec, node: WorkerNode, worker: Worker) -> None:
        self._spec, self._node, self._worker = spec, node, worker
        self._run = node.run_of(spec, worker)
        self._transfers = Transfers(spec, self._run, node, worker)
        self._flat = torch.empty(0)
        self.steps = 0
        self._doing: Activity = "load"
        self._losses: deque[Tensor] = deque(maxlen=LOSS_STEPS)
        self._position = ""
        self.account = self._transfers.account

    def run(self) -> dict[str, Any]:
        """Pull, wait for the turn to train, train, push; return the account."""
        transfers = self._transfers
        heartbeat = transfers.start(transfers.beat(lambda: (self.steps, self._activity())))
        try:
            loaded = self._run.load(transfers.call)
            subnet = loaded.program.subnet(self._spec.lease.round, self._spec.place)
            size = 4 * loaded.program.buffer_size(subnet, persistent=True)
            self._doing = "move"
            with transfers.transferring("pull", size):
                self._pull(loaded, subnet)
            initial_steps = self.steps
            self._doing = "wait"
            with transfers.timed("wait_seconds"):
                acquired = transfers.acquire(self._node.computing)
            if acquired:
                try:
                    self._train(loaded, subnet)
                finally:
                    self._node.computing.release()
            if transfers.revoked.is_set():
                return self.report("revoked")
            if self.steps == initial_steps:
                return self.report("drained")
            whole = self.steps == loaded.program.local_steps(self._spec.lease.round)
            with transfers.transferring("push", size):
                reply = self._push(loaded, subnet, whole=whole)
        finally:
            heartbeat.cancel()
        ended = ("done" if whole else "drained") if reply in DONE_REPLIES else "revoked"
        return self.report(ended, reply=reply.value)

    def report(self, ended: str, **details: str) -> dict[str, Any]:
        """Return the account as it stands, with how the attempt ended."""
        return {"ended": ended, **details, "steps": self.steps, "transport": self._run.client.transport, **self.account}

    # --- what each kind of attempt does in its own way --------------------------------------------------------------

    def _pull(self, loaded: Loaded, subnet: Subnet) -> None:
        self.steps, self._flat = self._transfers.pull(loaded.program, subnet)

    def _train(self, loaded: Loaded, subnet: Subnet) -> None:
        """Do the remaining steps."""
        program, lease = loaded.program, self._spec.lease
        self._flat = all_slots(self._flat, program.buffer_size(subnet, persistent=False)).to(device_for(program))
        first = self._spec.first_step
        work = LocalSteps(program, subnet, self._flat, lease.subnet, lease.round, first_step=first)
        order = self._open_shard(loaded, work, subnet) if program.output else self._batch_order(loaded)
        self._train_steps(loaded, work, order)
        work.check_buffers()
        if program.output:
            self._count_draws(work)

    def _save_progress(self, seconds: float) -> Coroutine[Any, Any, Receipt]:
        """Return the coroutine that sends the state between two steps, after `seconds` of training."""
        return self._transfers.send(self._flat.cpu().clone(), self._progress(seconds), update=False)

    def _push(self, loaded: Loaded, subnet: Subnet, *, whole: bool) -> Reply:
        progress = self._progress(self.account["train_seconds"])
        return self._transfers.push(loaded.program, subnet, self._flat, progress, whole=whole)

    def _activity(self) -> Activity:
        """Return what the attempt does now."""
        return self._doing

    # --- what they share --------------------------------------------------------------------------------------------

    def _batch_order(self, loaded: Loaded) -> BatchOrder:
        """Return the order of batches: of a stream that keeps its state, from where the subnet stands."""
        if not (isinstance(loaded.order, StreamOrder) and getattr(loaded.samples, "resumes", False)):
            return loaded.order
        return loaded.order.going_on(self._transfers.call(self._run.client.stream_position(self._spec.lease)))

    def _train_steps(self, loaded: Loaded, work: LocalSteps, order: BatchOrder) -> None:
        """Do the remaining steps, sending progress checkpoints and late rows meanwhile."""
        compute_repeatably(wanted=not self._spec.salvage)
        all_steps, initial_steps = loaded.program.local_steps(self._spec.lease.round), self.steps
        transfers, samples = self._transfers, loaded.samples
        if loaded.read_ahead:
            loaded.read_ahead.start(work.reads(order, self.steps))
            samples = loaded.read_ahead
        started = saved_at = time.perf_counter()
        while self.steps < all_steps and not transfers.is_unwanted():
            self._doing = "train"
            self._losses.append(repeatably(functools.partial(work.step, samples, order, self.steps)))
            self.steps += 1
            self._node.steps += 1
            now = time.perf_counter()
            steps_left = all_steps - self.steps  # after the last comes the update itself
            seconds_left = steps_left * (now - started) / (self.steps - initial_steps)
            due = self._is_checkpoint_due(now - saved_at, seconds_left) and steps_left
            if due:
                self._position = stream_position(samples)
            if due and transfers.send_in_background(functools.partial(self._save_progress, now - started)):
                self._node.checkpoint_now.clear()
                saved_at = now
            elif transfers.has_unsent_rows():
                transfers.send_in_background(transfers.send_late_rows)
        self._doing = "move"
        if self.steps > initial_steps:
            self._position = stream_position(samples)
        finish(self._flat.device)
        self.account["train_seconds"] = time.perf_counter() - started

    def _is_checkpoint_due(self, since_last: float, seconds_left: float) -> bool:
        """Return whether to send a checkpoint now; it is assumed to take as long, byte for byte, as the pull."""
        transfer_seconds = self.account["pull_seconds"] * self._flat.nbytes / self.account["pull_bytes"]
        return self._node.checkpoint_now.is_set() or self._spec.wants_checkpoint(
            since_last, seconds_left, transfer_seconds
        )

    def _open_shard(self, loaded: Loaded, work: LocalSteps, subnet: Subnet) -> BatchOrder:
        """Prepare a very wide output and return the order of its batches.

        Its hash tables are built from the round's initial values, also when it resumes in the middle of the round.
        """
        from idletrain.nn.wide import label_shards  # and with it Numba

        lease, initial = self._spec.lease, self._flat
        if self.steps and label_shards.keeps_tables(loaded.program):
            initial = aligned(self._transfers.call(self._run.client.pull(lease, at=0))[1])
        place = label_shards.ShardPlace(lease.round, lease.subnet)
        return label_shards.open_output(loaded.program, work.module, subnet, loaded.samples, initial, place)

    def _count_draws(self, work: LocalSteps) -> None:
        """Add to the account how many batches the sampler drew for, and for how many it found nothing."""
        from idletrain.nn.wide import label_shards

        output = label_shards.wide_output(work.module)
        assert output
        self.account |= {"sampler_draws": output[1].drawn_batches, "sampler_fallbacks": output[1].fallbacks}

    def _progress(self, train_seconds: float) -> Progress:
        loss = float(torch.stack(list(self._losses)).mean()) if self._losses else None
        return Progress(self.steps, train_seconds, loss, self._position)


def all_slots(pulled: Tensor, size: int) -> Tensor:
    """Return an aligned buffer of `size` values that begins with a pulled one: the rest, state not pulled, is zero."""
    if len(pulled) == size:
        return aligned(pulled)
    flat = torch.zeros(size)
    flat[: len(pulled)] = pulled
    return flat


def aligned(values: Tensor) -> Tensor:
    """Return a tensor that begins where torch begins its own: itself, or a copy.

    Products of a matrix and a vector, and dot products, round by where their values begin in memory.
    """
    return values if values.data_ptr() % ALIGNMENT_BYTES == 0 else values.clone()
