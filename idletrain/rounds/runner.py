"""The round manager: turns what Dask and the store tell into events, and the state machine's commands into calls.

Decides nothing about rounds (that is `state.advance`) and computes nothing (that is `nn`).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
from distributed import Client, Future
from distributed.utils import get_ip
from torch import Tensor

from idletrain.errors import RefusedError, RunError
from idletrain.exchange.store import Store
from idletrain.exchange.wire import LeaseId, PushHeader, Reply, inspect
from idletrain.job import Job
from idletrain.nn.evaluate import assembled, estimate_statistics, score
from idletrain.nn.memory import need_of
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared
from idletrain.observe.records import Recorder
from idletrain.rounds import ledger, plan, recovery, snapshots, state, task, updates
from idletrain.rounds.plan import Capacity
from idletrain.storage import NO_ROOM, Reached

logger = logging.getLogger(__name__)
T = TypeVar("T")
TICK_SECONDS = 0.25
ROOM_RETRY_SECONDS = 1.0
FIRST_WORKERS_SECONDS = 60.0  # the wait for the asked number of workers before starting with those that are there
DESCRIBE_SECONDS = 60.0  # a joiner's first task imports torch, which a cold disk can draw out
SCHEDULER_GONE_SECONDS = 5.0


@dataclass(frozen=True)
class Ending:
    """How a run ended: `completed`, `reached`, `stopped` or `diverged`, and with what."""

    status: str
    rounds: int
    params_sha256: str
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True)
class Payload:
    """A push that was found sound: its frames, and what its header says of them."""

    frames: Sequence[memoryview]
    train_seconds: float
    checksum: int

    @property
    def size_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames)


class Runner:
    """One run, from its first or next round to its end.

    Args:
        job: The job.
        prepared: Its program and the network's first values.
        run_dir: The run directory, held by this process.
        record: Takes what happens.
        reached: Called at named points around every durable write.
    """

    def __init__(self, job: Job, prepared: Prepared, run_dir: Path, record: Recorder, reached: Reached) -> None:
        self._job, self._prepared, self._program = job, prepared, prepared.program
        self._dir, self._record, self._reached = run_dir, record, reached
        for folder in ("updates", "snapshots"):
            (run_dir / folder).mkdir(exist_ok=True)
        self._ledger = ledger.Ledger(run_dir / "ledger")
        past = recovery.history(self._ledger.records)
        self._network = self._first_network() if not past.rounds else recovery.restore(run_dir, self._program, past)
        self._round, self._epoch = past.rounds, past.epochs + 1
        self._staged = self._sound_updates(past.staged.get(past.rounds, {}))
        self._shares = past.shares.get(past.rounds, ())
        self._need_bytes = need_of(self._program)
        self._pickled = cloudpickle.dumps(self._program)
        self._module = assembled(prepared.module, self._network.values)
        self._score: tuple[float | None, float | None] = (None, None)
        self._capacities: dict[str, Capacity] = {}
        self._futures: dict[int, tuple[str, Future]] = {}
        self._pulls: dict[int, asyncio.Future[Tensor]] = {}
        self._marks: dict[int, Payload] = {}
        self._next_offset = max((u.offset + u.size_bytes for u in self._staged.values()), default=0)
        self._staging: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._snapshot_at = self._opened_at = time.monotonic()
        self._traffic = (0, 0)
        self._state: state.State | None = None
        self._done: asyncio.Future[str] | None = None

    async def run(self, client: Client, count: int) -> Ending:
        """Train with the workers of a cluster until the job is done.

        Args:
            client: An asynchronous client of the cluster.
            count: Workers to wait for before the first round.

        Raises:
            RunError: no worker can do the work, or the scheduler is gone.
        """
        self._client = client
        self._done = asyncio.get_running_loop().create_future()
        self._store = Store(self, client.security)
        self._address = await self._store.listen(_own_host(client.scheduler.address))
        try:
            await client.set_metadata(["idletrain"], {"version": task.version()})
            client.subscribe_topic("all", self._on_cluster_event)
            client.subscribe_topic("idletrain", self._on_cluster_event)
            for address in client.scheduler_info(n_workers=-1)["workers"]:
                self._spawn(self._welcome(address))
            self._announce()
            await self._first_workers(count)
            await self._open()
            return await self._end(await self._until_done())
        finally:
            await self._close()

    def stop(self) -> None:
        """Ask the run to end where it is; it can be resumed."""
        if self._state is None:
            self._finish("stopped")
        else:
            self._handle(state.StopAsked(now=time.monotonic()))

    # --- start and end ------------------------------------------------------------------------------------------

    def _first_network(self) -> Network:
        network = Network(self._program.layout, self._program.travelling, self._prepared.network)
        snapshots.write(self._dir, 0, network, self._reached)
        return network

    def _sound_updates(self, staged: dict[int, updates.Staged]) -> dict[int, updates.Staged]:
        """What a head before us staged of the open round, without what a power cut spoilt."""
        sound = {}
        for k, update in staged.items():
            try:
                updates.read(updates.path_of(self._dir, self._round), update)
            except updates.DamageError as error:
                logger.warning("%s; it is trained again", error)
            else:
                sound[k] = update
        return sound

    def _announce(self) -> None:
        self._record(
            "run_started",
            run=self._job.name,
            version=task.version(),
            subnets=self._program.training.subnets,
            rounds=self._program.training.rounds,
            policy=self._job.preemption.policy,
            target=self._job.stop.accuracy,
            method=self._program.training.method,
            local_steps=self._program.training.local_steps,
            parameters=sum(tensor.numel() for tensor in self._network.values),
            groups={group.name: group.size for group in self._program.layout.groups},
            resumed_at=self._round,
            run_dir=str(self._dir),
        )

    async def _first_workers(self, count: int) -> None:
        waited = 0.0
        while len(self._capacities) < count and not self._finished:
            if waited >= FIRST_WORKERS_SECONDS and self._capacities:
                break
            if waited and waited % 10 == 0:
                self._record("waiting", reason=f"for workers: {len(self._capacities)} of {count} are there")
            await asyncio.sleep(TICK_SECONDS)
            waited += TICK_SECONDS

    async def _open(self) -> None:
        """Begin this epoch: whatever an older head or its workers still do is void from here on."""
        if self._finished:
            return
        if not self._shares or self._job.preemption.policy == "salvage" and not self._staged:
            self._shares = await asyncio.to_thread(self._plan_shares)
        fields = {"epoch": self._epoch, "round": self._round, "shares": self._shares}
        await self._durably(lambda: self._ledger.append("epoch", durable=True, **fields))
        self._reached("epoch-recorded")
        training, preemption = self._program.training, self._job.preemption
        rules = state.Rules(
            salvage=preemption.policy == "salvage",
            local_steps=training.local_steps,
            rounds=training.rounds,
            lease_seconds=preemption.lease,
            evaluate_every=training.evaluate_every,
            target=self._job.stop.accuracy,
        )
        staged = {k: update.steps for k, update in self._staged.items()}
        now = self._opened_at = time.monotonic()
        self._state = state.open_run(rules, self._job.name, self._epoch, self._round, self._needs(), staged, now)
        self._subnets = self._program.subnets(self._round, self._shares)
        for address, capacity in self._capacities.items():
            self._handle(state.WorkerJoined(now=now, worker=address, memory_bytes=capacity.memory_bytes))
        self._handle(state.Tick(now=now))

    async def _until_done(self) -> str:
        assert self._done is not None
        gone_since = None
        while not self._done.done():
            await asyncio.wait((self._done,), timeout=TICK_SECONDS)
            now = time.monotonic()
            gone_since = None if self._client.status == "running" else gone_since or now
            if gone_since and now - gone_since > SCHEDULER_GONE_SECONDS:
                raise RunError(
                    f"the Dask scheduler is gone after round {self._round}; start the job again with --resume"
                )
            self._handle(state.Tick(now=now))
            self._warn_of_misfits()
        return self._done.result()

    async def _end(self, status: str) -> Ending:
        digest = await asyncio.to_thread(self._network.sha256)
        fields = {"status": status, "rounds": self._round, "params_sha256": digest}
        await self._durably(lambda: self._ledger.append("end", durable=True, **fields))
        accuracy, loss = self._score
        self._record("run_ended", **fields, accuracy=accuracy, loss=loss, run_dir=str(self._dir))
        return Ending(status, self._round, digest, accuracy, loss)

    async def _close(self) -> None:
        self._state = None
        for pending in (*self._tasks, *self._pulls.values()):
            pending.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, future in self._futures.values():
            future.release()
        await self._store.close()
        self._ledger.close()

    # --- events in, commands out --------------------------------------------------------------------------------

    def _handle(self, event: state.Event, pushed: Payload | None = None) -> Reply:
        """Advance the state by an event and carry out what follows; returns the answer to a push or beat."""
        if self._state is None:
            return Reply.STALE_ROUND
        answer = Reply.ACCEPTED
        self._state, commands = state.advance(self._state, event)
        for command in commands:
            match command:
                case state.Answer(reply):
                    answer = reply
                case state.Keep(k):
                    assert pushed is not None
                    self._marks[k] = pushed
                    self._record("marked", round=self._round, subnet=k, **self._attempt_of(k))
                case state.Store(k):
                    arrived = isinstance(event, state.Pushed) and event.lease.subnet == k
                    payload = pushed if arrived and pushed else self._marks[k]
                    self._staging[k] = self._spawn(self._stage(command, payload))
                case state.Lease():
                    self._lease(command)
                case state.Lost():
                    self._note_lost(command)
                case state.Commit():
                    self._spawn(self._commit(command))
                case state.Look():
                    self._spawn(self._look(command))
                case state.Finish(status):
                    self._finish(status)
        return answer

    def _attempt_of(self, k: int) -> dict[str, int]:
        assert self._state is not None
        subnet = self._state.subnets[k]
        return {"attempt": subnet.attempt, "steps": subnet.steps}

    def _note_lost(self, lost: state.Lost) -> None:
        kept_seconds = self._marks[lost.subnet].train_seconds if lost.kept_steps else 0.0
        fields = {name: getattr(lost, name) for name in ("subnet", "attempt", "worker", "cause", "kept_steps", "lost_steps")}
        self._record("lost", round=self._round, kept_seconds=kept_seconds, **fields)

    def _finish(self, status: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(status)

    @property
    def _finished(self) -> bool:
        return self._done is not None and self._done.done()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine beside the others; what goes wrong in it ends the run."""
        started = asyncio.ensure_future(work)
        self._tasks.add(started)
        started.add_done_callback(self._reap)
        return started

    def _reap(self, ended: asyncio.Task[Any]) -> None:
        self._tasks.discard(ended)
        if not ended.cancelled() and (error := ended.exception()) and self._done and not self._done.done():
            self._done.set_exception(error)

    # --- workers ------------------------------------------------------------------------------------------------

    def _on_cluster_event(self, event: tuple[float, Any]) -> None:
        message = event[1]
        address = message.get("worker", "")
        match message.get("action"):
            case "add-worker":
                self._spawn(self._welcome(address))
            case "remove-worker":
                self._on_left(address)
            case "notice":
                self._record("worker_notice", worker=address)
                self._handle(state.NoticeGiven(now=time.monotonic(), worker=address))

    async def _welcome(self, address: str) -> None:
        """Learn what a new worker can do, and let it in if it runs the same version."""
        try:
            await self._check_version(address)
            described = self._client.submit(
                task.describe, workers=[address], key=f"describe-{address}-{self._epoch}", pure=False
            )
            about = await asyncio.wait_for(described, DESCRIBE_SECONDS)
        except RefusedError as refusal:
            self._record("worker_refused", worker=address, reason=str(refusal))
            return
        except Exception as error:  # noqa: BLE001 (whatever a worker dies of while it joins, it has not joined)
            logger.info("worker %s did not join: %s", address, error)
            return
        self._capacities[address] = Capacity(about["memory_bytes"], about["steps_per_second"])
        fields = ("memory_bytes", "device", "steps_per_second", "cohort", "pid")
        self._record("worker_joined", worker=address, **{field: about[field] for field in fields})
        if self._state is not None:
            memory = about["memory_bytes"]
            self._handle(state.WorkerJoined(now=time.monotonic(), worker=address, memory_bytes=memory))

    async def _check_version(self, address: str) -> None:
        found = await self._client.run(task.version, workers=[address], on_error="return")
        theirs = found.get(address)
        if isinstance(theirs, Exception) or theirs != task.version():
            raise RefusedError(f"worker {address} runs idletrain {theirs} and the head {task.version()}; install the same")

    def _on_left(self, address: str) -> None:
        if address not in self._capacities:
            return
        del self._capacities[address]
        worker = self._state.workers.get(address) if self._state else None
        self._record("worker_left", worker=address, cause=_cause_of_leaving(worker, self._finished))
        for holder, future in list(self._futures.values()):
            if holder == address:
                self._spawn(_cancel(future))
        self._handle(state.WorkerLeft(now=time.monotonic(), worker=address))

    def _warn_of_misfits(self) -> None:
        """Tell when a subnet waits for a worker that nobody is large enough to be."""
        if self._state is None or not self._capacities:
            return
        largest = max(capacity.memory_bytes for capacity in self._capacities.values())
        for k, subnet in enumerate(self._state.subnets):
            if subnet.phase is state.Phase.WAITING and subnet.need_bytes > largest:
                reason = f"subnet {k} needs {subnet.need_bytes >> 20} MiB; the largest worker has {largest >> 20} MiB"
                self._warn_once(reason)

    @functools.lru_cache(maxsize=8)  # noqa: B019 (a runner lives as long as its process' run)
    def _warn_once(self, reason: str) -> None:
        self._record("waiting", reason=reason)

    # --- leases -------------------------------------------------------------------------------------------------

    def _lease(self, command: state.Lease) -> None:
        lease = command.lease
        if not command.step:
            # Cut the subnet out while the lease is on its way: a column gather runs at a third of the link's speed.
            self._pulls[lease.attempt] = asyncio.ensure_future(
                asyncio.to_thread(self._network.pull, self._subnets[lease.subnet])
            )
        self._record(
            "leased",
            round=lease.round,
            subnet=lease.subnet,
            attempt=lease.attempt,
            worker=command.worker,
            step=command.step,
        )
        spec = task.Spec(lease, self._address, tuple(self._shares), self._job.preemption.mark_every)
        future = self._client.submit(
            task.train_subnet,
            spec,
            key=f"round{lease.round:05d}-subnet{lease.subnet}-attempt{lease.attempt}-epoch{lease.epoch}",
            workers=[command.worker],
            pure=False,
            retries=0,
        )
        self._futures[lease.attempt] = command.worker, future
        self._spawn(self._follow(lease, command.worker, future))

    async def _follow(self, lease: LeaseId, worker: str, future: Future) -> None:
        """Wait for an attempt's end, of whatever kind; only the ledger says what it achieved."""
        try:
            record = await future
        except asyncio.CancelledError:
            if not future.cancelled():
                raise
            record = {"ended": "cancelled"}
        except Exception as error:  # noqa: BLE001 (a task may die of anything; the subnet is leased again)
            logger.info("attempt %d at subnet %d ended: %r", lease.attempt, lease.subnet, error)
            record = {"ended": "error", "reason": repr(error)[:200]}
        del self._futures[lease.attempt]
        self._pulls.pop(lease.attempt, None)
        names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt, "worker": worker}
        self._record("attempt_ended", **names, **record)
        self._handle(state.AttemptEnded(now=time.monotonic(), lease=lease))

    # --- what the store asks (exchange.store.Head) --------------------------------------------------------------

    def program(self) -> bytes:
        """See `Head`."""
        return self._pickled

    async def pull(self, lease: LeaseId) -> tuple[int, Tensor] | Reply:
        """See `Head`."""
        if self._state is None or (reply := state.standing(self._state, lease)) is not Reply.ACCEPTED:
            return Reply.STALE_ROUND if self._state is None else reply
        step = self._state.subnets[lease.subnet].base_steps
        if step:
            mark = bytearray().join(self._marks[lease.subnet].frames)
            return step, torch.frombuffer(mark, dtype=torch.float32)
        return step, await self._pulls[lease.attempt]

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Reply:
        """See `Head`."""
        fault = await asyncio.to_thread(inspect, header, frames, self._expected_bytes(header))
        event = state.Pushed(now=time.monotonic(), lease=header.lease, steps=header.steps, fault=fault)
        reply = self._handle(event, Payload(frames, header.train_seconds, header.checksum))
        lease = header.lease
        if reply not in (Reply.ACCEPTED, Reply.DUPLICATE):
            names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt}
            self._record("refused", **names, reply=reply.value)
        elif lease.subnet in self._staging and header.steps == self._program.training.local_steps:
            await asyncio.shield(self._staging[lease.subnet])
        return reply

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """See `Head`."""
        return self._handle(state.Beat(now=time.monotonic(), lease=lease, steps=steps))

    def _expected_bytes(self, header: PushHeader) -> int:
        k = header.lease.subnet
        whole = header.steps == self._program.training.local_steps
        slots = self._program.travelling if whole else len(self._program.slots)
        return 4 * slots * self._subnets[k].parameters if 0 <= k < len(self._subnets) else -1

    # --- durable writes -----------------------------------------------------------------------------------------

    async def _stage(self, command: state.Store, payload: Payload) -> None:
        """Make an update durable: the payload first, then the ledger's word for it."""
        k, path = command.subnet, updates.path_of(self._dir, self._round)
        staged = updates.Staged(k, command.steps, self._next_offset, payload.size_bytes, payload.checksum)
        self._staged[k] = staged
        self._next_offset += staged.size_bytes
        await self._durably(lambda: updates.write(path, staged.offset, payload.frames))
        self._reached("update-written")
        fields = {"round": self._round, "attempt": command.attempt, **asdict(staged)}
        await self._durably(lambda: self._ledger.append("stage", **fields))
        self._reached("update-recorded")
        assert self._state is not None
        self._record(
            "staged",
            round=self._round,
            subnet=k,
            attempt=command.attempt,
            worker=self._state.subnets[k].worker,
            steps=command.steps,
            train_seconds=payload.train_seconds,
        )
        self._handle(state.Stored(now=time.monotonic(), subnet=k))

    async def _commit(self, command: state.Commit) -> None:
        """End a round: the ledger says so, then the network changes, then the next round is drawn."""
        started = time.monotonic()
        await self._durably(lambda: updates.sync(updates.path_of(self._dir, self._round)))
        next_shares = self._shares
        if self._job.preemption.policy == "salvage" and self._capacities:
            next_shares = await asyncio.to_thread(self._plan_shares)
        fields = {"round": command.round, "staged": command.staged, "next_shares": next_shares}
        await self._durably(lambda: self._ledger.append("commit", durable=True, **fields))
        self._reached("commit-recorded")
        steps = dict(command.staged)
        await asyncio.to_thread(
            recovery.apply, self._dir, self._program, self._network, command.round, self._shares, self._staged, steps
        )
        ended = time.monotonic()
        down, up = self._store.bytes_down, self._store.bytes_up
        self._record(
            "round_committed",
            round=command.round,
            steps=sum(steps.values()),
            seconds=ended - self._opened_at,
            commit_seconds=ended - started,
            bytes_down=down - self._traffic[0],
            bytes_up=up - self._traffic[1],
            shares=list(self._shares),
        )
        self._traffic, self._opened_at = (down, up), ended
        self._round, self._shares = command.round + 1, next_shares
        self._staged, self._marks, self._staging, self._next_offset = {}, {}, {}, 0
        self._subnets = self._program.subnets(self._round, self._shares)
        due = ended - self._snapshot_at > self._job.checkpoint.every
        self._handle(state.Committed(now=ended, needs=self._needs(), snapshot_due=due))

    async def _look(self, command: state.Look) -> None:
        """Evaluate and write the committed network while the next round trains; it does not change meanwhile."""
        started, round_ = time.monotonic(), self._round
        accuracy = None
        if command.evaluate and self._prepared.test is not None:
            accuracy, loss = await asyncio.to_thread(self._evaluate)
            self._score = accuracy, loss
            seconds = time.monotonic() - started
            self._record("evaluated", round=round_, accuracy=accuracy, loss=loss, seconds=seconds)
        if command.snapshot:
            await self._snapshot(round_)
        self._handle(state.Looked(now=time.monotonic(), accuracy=accuracy))

    async def _snapshot(self, round_: int) -> None:
        started = time.monotonic()
        await self._durably(lambda: snapshots.write(self._dir, round_, self._network, self._reached))
        await asyncio.to_thread(snapshots.prune, self._dir, self._job.checkpoint.keep)
        await asyncio.to_thread(updates.prune, self._dir, min(snapshots.rounds(self._dir)))
        self._reached("updates-pruned")
        self._snapshot_at = time.monotonic()
        self._record("snapshot", round=round_, seconds=self._snapshot_at - started)

    async def _durably(self, write: Callable[[], None]) -> None:
        """Write in a thread; while there is no room, say so and try again until there is."""
        paused = False
        while True:
            try:
                await asyncio.to_thread(write)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                if not paused:
                    reason = errno.errorcode[error.errno or 0]
                    self._record("paused", reason=f"no room left in {self._dir} ({reason}); free some and the run goes on")
                paused = True
                await asyncio.sleep(ROOM_RETRY_SECONDS)
            else:
                break
        if paused:
            self._record("resumed", reason=f"there is room in {self._dir} again")

    # --- computing ----------------------------------------------------------------------------------------------

    def _evaluate(self) -> tuple[float | None, float]:
        assert self._prepared.test is not None
        estimate_statistics(self._module, self._program.source.open(), self._program.training.seed)
        return score(self._module, self._prepared.test.open(), self._program.loss)

    def _plan_shares(self) -> tuple[float, ...]:
        workers = list(self._capacities.values())
        smallest = min(self._program.layout.sizes, default=1)
        return plan.shares(workers, self._program.training.subnets, self._need_bytes, smallest)

    def _needs(self) -> tuple[int, ...]:
        return tuple(self._need_bytes(share if self._program.layout.groups else 1.0) for share in self._shares)


def _own_host(scheduler: str) -> str:
    """The address of this machine that the scheduler's workers reach it at: loopback for a local scheduler."""
    host = scheduler.split("://")[-1].rsplit(":", 1)[0].strip("[]")
    own: str = get_ip(host)
    return own


def _cause_of_leaving(worker: state.Worker | None, finished: bool) -> str:
    if finished:
        return "end"
    return "notice" if worker is not None and worker.draining else "kill"


async def _cancel(future: Future) -> Awaitable[None] | None:
    """Free a future whose worker is gone; stock clusters would keep it pending for ever."""
    cancelled: Awaitable[None] | None = await future.cancel()
    return cancelled
