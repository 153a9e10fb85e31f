"""The round manager: turns what Dask and the store tell into events, and the state machine's commands into calls.

Decides nothing about rounds (that is `state.advance`), keeps nothing (that is `journal`), computes nothing (`nn`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import cloudpickle
import dask
import torch
from distributed import Client, Future
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker, NoValidWorkerError
from distributed.utils import get_ip
from torch import Tensor

from idletrain.errors import RunError
from idletrain.exchange.codec import ReceivedMask, warm
from idletrain.exchange.messages import (
    AcceptanceRule,
    LeaseId,
    LockstepGroup,
    PartialPayload,
    PushHeader,
    Receipt,
    Reply,
    checksum,
)
from idletrain.exchange.store import StoreServer
from idletrain.job import Job
from idletrain.nn import assembly
from idletrain.nn.evaluate import Score, assembled, estimate_statistics, score
from idletrain.nn.ist.subnets import Subnet
from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.prepare import Prepared
from idletrain.observe.records import Recorder
from idletrain.rounds import lockstep_rules, protocol, state, table, widths
from idletrain.rounds.durable.run_directory import INLINE_BYTES, Payload, RunDirectory
from idletrain.rounds.late_rows import LateRows
from idletrain.rounds.membership import Membership
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints
from idletrain.rounds.reassembly import Baseline, DecodedPush, Reassembly, persistent_part
from idletrain.rounds.rendezvous import Rendezvous
from idletrain.worker import encoding, tasks
from idletrain.worker.encoding import ROUNDS_KEPT
from idletrain.worker.lease_spec import LeaseSpec, TrainingMode, version

logger = logging.getLogger(__name__)
STATE_TICK_SECONDS = 0.25
SCHEDULER_GONE_SECONDS = 5.0
NO_SCORE = dict.fromkeys(("accuracy", "loss", "calibration_error", "temperature"))
ACCOUNT_SECONDS, ACCOUNT_POLL_SECONDS = 1.0, 0.01


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: `completed`, `reached`, `stopped` or `diverged`, and with what."""

    status: str
    rounds: int
    params_sha256: str
    accuracy: float | None
    loss: float | None
    calibration_error: float | None = None
    temperature: float | None = None


class Coordinator:
    """One run, from its first or next round to its end; the store's `Head`.

    Args:
        job: The job.
        prepared: Its program and test data.
        journal: Its durable side.
        client: An asynchronous client of the cluster whose workers train.
        record: Takes what happens.
        about: What else a run's first record tells: where it is shown, and what to reproduce it takes.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        directory: RunDirectory,
        client: Client,
        record: Recorder,
        about: Mapping[str, Any],
    ) -> None:
        self._job, self._prepared, self._program = job, prepared, prepared.program
        self._directory, self._client, self._record = directory, client, record
        self._about = about
        self._store = StoreServer(self, client.security)
        self._membership = Membership(
            client, record, self._spawn, joined=self._on_joined, noticed=self._on_notice, left=self._on_left
        )
        self._out_of_core = OutOfCoreForecast(self._program)
        self._need_bytes = self._out_of_core.need_bytes
        self._narrowest_bytes = self._need_bytes(1 / min(self._program.layout.sizes, default=1))
        self._pickled: bytes = cloudpickle.dumps(self._program)
        self._module = assembled(prepared.module, directory.network.values)
        self._score: Score | None = None
        self._losses: dict[int, float] = {}  # of the open round's subnets, in their last steps
        self._subnet_loss: float | None = None  # of the last committed round
        self._warned = False
        self._futures: dict[int, tuple[str, Future]] = {}
        self._accounts: dict[int, dict[str, Any]] = {}
        self._ended: list[Future] = []
        self._pulls: dict[int, asyncio.Future[Tensor]] = {}
        self._reassembly = Reassembly(self._program, salvage=job.preemption.policy == "salvage")
        self._late_rows = LateRows(self._program)
        self._late_updates: dict[LeaseId, asyncio.Task[Reply]] = {}
        self._rendezvous = Rendezvous(self._roll_back)
        self._checkpoints = self._no_checkpoints()
        self._staging: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._misfits: set[str] = set()
        self._noticed: set[str] = set()
        self._failure = ""
        self._snapshot_at = self._opened_at = time.monotonic()
        self._traffic = (0, 0)
        self._state: table.RoundState | None = None
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, count: int) -> RunOutcome:
        """Train until the job is done.

        Args:
            count: Workers to wait for before the first round.

        Raises:
            RunError: no worker can do the work, or the scheduler is gone.
        """
        try:
            if self._program.training.exchange.coded:
                await asyncio.to_thread(warm)  # its loops take a second to load, which leases should not wait for
            self._address = await self._store.listen(_own_host(self._client.scheduler.address))
            self._client.subscribe_topic(self._address, self._on_account)
            self._announce()
            self._spawn(self._watch_scheduler())
            await self._membership.watch()
            await self._membership.wait_for(count, stopped=self._done.done)
            if not self._done.done():
                await self._open()
            return await self._record_end(await self._until_done())
        except CommClosedError:  # whatever was being asked of it
            raise self._scheduler_gone() from None
        finally:
            await self._close()

    def stop(self) -> None:
        """Ask the run to end where it is; it can be resumed."""
        self._directory.stop_waiting()
        if self._state is None:
            self._finish("stopped")
        else:
            self._handle(protocol.StopRequested(now=time.monotonic()))

    # --- start and end ------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        training = self._program.training
        self._record(
            "run_started",
            run=self._job.name,
            version=version(),
            subnets=training.subnets,
            rounds=training.rounds,
            policy=self._job.preemption.policy,
            target=self._job.stop.accuracy,
            method=training.method,
            local_steps=training.local_steps,
            exchange=training.exchange.model_dump(),
            parameters=sum(tensor.numel() for tensor in self._directory.network.values),
            groups={group.name: group.size for group in self._program.layout.groups},
            resumed_at=self._directory.round,
            run_dir=str(self._directory.run_dir),
            **self._about,
        )

    async def _open(self) -> None:
        """Begin this epoch with the workers that are there."""
        journal, training, preemption = self._directory, self._program.training, self._job.preemption
        salvage = preemption.policy == "salvage"
        # What is left of a round in lockstep could not train alone.
        drop = training.mode == "lockstep" and 0 < len(journal.staged) < training.subnets
        keep = journal.shares and (not salvage or journal.staged)
        await journal.begin(journal.shares if keep else await asyncio.to_thread(self._plan), drop=drop)
        rules = table.RoundRules(
            salvage=salvage,
            local_steps=training.local_steps,
            rounds=training.rounds,
            lease_seconds=preemption.lease,
            evaluate_every=training.evaluate_every,
            target=self._job.stop.accuracy,
            lockstep=training.mode == "lockstep",
        )
        staged = {k: update.steps for k, update in journal.staged.items()}
        now = self._opened_at = time.monotonic()
        needs, alone = await asyncio.to_thread(self._needs)
        workers = {
            address: table.WorkerState(memory_bytes=brings.memory_bytes, leases=brings.leases, cohort=brings.cohort)
            for address, brings in self._capacities().items()
        }
        name, epoch, number = self._job.name, journal.epoch, journal.round
        opened = state.open_run(rules, name, epoch, number, needs, staged, now, workers, alone)
        self._state = opened
        if opened.evaluating:
            self._spawn(
                self._run_evaluation(
                    protocol.Evaluate(evaluate=True, snapshot=opened.stage is table.RunStage.LAST_EVALUATION)
                )
            )
        self._handle(protocol.ClockTick(now=now))

    async def _until_done(self) -> str:
        while not self._done.done():
            await asyncio.wait((self._done,), timeout=STATE_TICK_SECONDS)
            self._handle(protocol.ClockTick(now=time.monotonic()))
            self._warn_of_misfits()
        return self._done.result()

    async def _watch_scheduler(self) -> None:
        """End the run, at whatever point it is, once the scheduler is gone."""
        gone_since = None
        while True:
            await asyncio.sleep(STATE_TICK_SECONDS)
            now = time.monotonic()
            gone_since = None if self._client.status == "running" else gone_since or now
            if gone_since and now - gone_since > SCHEDULER_GONE_SECONDS:
                raise self._scheduler_gone()

    def _scheduler_gone(self) -> RunError:
        return RunError(
            f"the Dask scheduler is gone after round {self._directory.round}; start the job again with --resume"
        )

    async def _record_end(self, status: str) -> RunOutcome:
        if status == "failed":
            raise RunError(f"a subnet fails on every worker: {self._failure}; mend that and add --resume")
        if status in ("completed", "reached"):
            await self._await_accounts()
        digest = await self._directory.end(status)
        ending = RunOutcome(status, self._directory.round, digest, **(asdict(self._score) if self._score else NO_SCORE))
        self._record("run_ended", **asdict(ending), run_dir=str(self._directory.run_dir))
        return ending

    async def _await_accounts(self) -> None:
        """Wait a moment for the attempts' own accounts, which come behind their updates."""
        until = time.monotonic() + ACCOUNT_SECONDS
        while self._futures and time.monotonic() < until:
            await asyncio.sleep(ACCOUNT_POLL_SECONDS)

    async def _close(self) -> None:
        self._state = None
        self._rendezvous.answer_waiting(None)
        for pending in (*self._tasks, *self._pulls.values()):
            pending.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._membership.leave()
        for _, future in self._futures.values():
            future.release()
        await self._store.close()

    def _finish(self, status: str) -> None:
        if not self._done.done():
            self._done.set_result(status)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine beside the others; what goes wrong in it ends the run."""
        started: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(started)
        started.add_done_callback(self._reap)
        return started

    def _reap(self, ended: asyncio.Task[Any]) -> None:
        self._tasks.discard(ended)
        if not ended.cancelled() and (error := ended.exception()) and not self._done.done():
            self._done.set_exception(error)

    # --- events in, commands out --------------------------------------------------------------------------------

    def _handle(self, event: protocol.RoundEvent, pushed: DecodedPush | None = None) -> Reply:  # noqa: C901 (one case a command)
        """Advance the state by an event and carry out what follows; returns the answer to a push or beat."""
        if self._state is None:
            return Reply.STALE_ROUND
        answer = Reply.ACCEPTED
        self._state, commands = state.advance(self._state, event)
        for command in commands:
            match command:
                case protocol.Respond(reply):
                    answer = reply
                case protocol.KeepProgress(k) if pushed:
                    self._keep_checkpoint(k, pushed.payload)
                case protocol.Persist(k) if command.norm_fraction:
                    came = self._reassembly.arrived(command.attempt, command.steps, self._baseline(k))
                    self._staging[k] = self._spawn(self._salvage(command, came))
                case protocol.Persist(k):
                    # A push may close a round under `salvage` and itself be refused: then the mark is what counts.
                    arrived = (
                        isinstance(event, protocol.Pushed) and event.lease.subnet == k and answer is Reply.ACCEPTED
                    )
                    taken = pushed if arrived and pushed else self._checkpoint(k)
                    self._staging[k] = self._spawn(self._stage(command, taken, reported=not arrived))
                case protocol.LeaseLost():
                    kept_seconds = self._kept_seconds(command)
                    self._record("lost", round=self._directory.round, kept_seconds=kept_seconds, **asdict(command))
                case protocol.Commit():
                    self._spawn(self._commit(command))
                case protocol.Evaluate():
                    self._spawn(self._run_evaluation(command))
                case protocol.Finish(status):
                    self._finish(status)
        self._rendezvous.answer_waiting(self._state)
        if leases := [command for command in commands if isinstance(command, protocol.GrantLease)]:
            self._lease(leases)
        return answer

    def _keep_checkpoint(self, k: int, checkpoint: Payload) -> None:
        assert self._state is not None
        subnet = self._state.subnets[k]
        self._checkpoints.keep(k, subnet.steps, checkpoint)
        if subnet.steps < self._program.training.local_steps:  # else it is its update, told when it is stored
            self._record(
                "progress_saved", round=self._directory.round, subnet=k, attempt=subnet.attempt, steps=subnet.steps
            )

    def _kept_seconds(self, lost: protocol.LeaseLost) -> float:
        """Time of the lost lease's steps that are safe at home."""
        if lost.norm_fraction:
            assert self._state
            return self._reassembly.train_seconds(lost.attempt, self._state.subnets[lost.subnet].steps)
        return self._checkpoints.latest(lost.subnet).train_seconds if lost.kept_steps else 0.0

    def _checkpoint(self, k: int) -> DecodedPush:
        """The latest mark as an update: what of it goes from round to round."""
        size = 4 * self._program.buffer_size(self._directory.subnets[k], persistent=True)
        return DecodedPush(persistent_part(self._checkpoints.latest(k), size))

    def _roll_back(self, step: int) -> None:
        if self._state:
            self._checkpoints.forget_above(step)
            kept = [max(self._checkpoints.steps(k), default=0) for k in range(len(self._state.subnets))]
            self._state = lockstep_rules.rolled_back(self._state, step, kept)

    def _no_checkpoints(self) -> ProgressCheckpoints:
        training = self._program.training
        return ProgressCheckpoints(training.subnets if training.mode == "lockstep" else 0)

    # --- workers ------------------------------------------------------------------------------------------------

    def _on_joined(self, address: str) -> None:
        brings = self._capacities()[address]
        joined = protocol.WorkerJoined(
            now=time.monotonic(),
            worker=address,
            memory_bytes=brings.memory_bytes,
            leases=brings.leases,
            cohort=brings.cohort,
        )
        self._handle(joined)

    def _capacities(self) -> dict[str, widths.Capacity]:
        """What the workers that are there bring, within the job's budget for each."""
        budget = self._job.memory.budget or sys.maxsize
        return {
            address: replace(brings, memory_bytes=min(brings.memory_bytes, budget))
            for address, brings in self._membership.capacities.items()
        }

    def _on_notice(self, address: str) -> None:
        self._noticed.add(address)  # also before there is a state that knows workers
        self._handle(protocol.NoticeReceived(now=time.monotonic(), worker=address))

    def _on_left(self, address: str, name: str) -> None:
        warned = "notice" if address in self._noticed else "kill"
        self._noticed.discard(address)
        self._record("worker_left", worker=address, name=name, cause="end" if self._done.done() else warned)
        self._store.worker_left(address)
        for holder, future in list(self._futures.values()):
            if holder == address:  # a stock cluster would keep it pending for ever
                self._spawn(future.cancel())
        self._handle(protocol.WorkerLeft(now=time.monotonic(), worker=address))

    def _warn_of_misfits(self) -> None:
        """Tell, once, when a subnet waits for a worker that nobody is large enough to be, or a worker is too small."""
        capacities = self._capacities()
        if self._state is None or not capacities:
            return
        if self._state.rules.lockstep:
            chosen = lockstep_rules.lockstep_cohort(self._state)
            alike = {address: brings for address, brings in capacities.items() if brings.cohort == chosen}
            if self._state.subnets.waiting and len(alike) < len(self._state.subnets):
                here = f"{len(capacities)} workers are here"
                here += f", {len(alike)} alike" if len(alike) < len(capacities) else ""
                each = "need a worker each, whose machines are alike"
                self._report_misfit(f"{len(self._state.subnets)} subnets in lockstep {each}; {here}")
            capacities = alike
        for address, capacity in capacities.items():
            if capacity.memory_bytes < self._narrowest_bytes:
                # A subnet that is trained out of core may need less than the narrowest in core.
                needs = min([self._narrowest_bytes, *(subnet.need_bytes for subnet in self._state.subnets)])
                has = capacity.memory_bytes
                if has < needs:
                    what = f"{address} has {has >> 20} MiB free and the narrowest subnet needs {needs >> 20}"
                    self._report_misfit(f"{what}: it gets no work")
        largest = max((capacity.memory_bytes for capacity in capacities.values()), default=0)
        for k in self._state.subnets.waiting:
            need = self._state.subnets[k].need_bytes
            if need <= largest:  # and so do all that follow
                break
            self._report_misfit(f"subnet {k} needs {need >> 20} MiB; the largest worker has {largest >> 20} MiB")

    def _report_misfit(self, reason: str) -> None:
        if reason not in self._misfits:
            self._misfits.add(reason)
            self._record("waiting", reason=reason)

    # --- leases -------------------------------------------------------------------------------------------------

    def _lease(self, commands: Sequence[protocol.GrantLease]) -> None:
        """Send leases to their workers, in one graph: the scheduler's work is by the message, not by the task."""
        opened, journal, preemption = self._state, self._directory, self._job.preemption
        assert opened
        keys, specs, workers = [], [], {}
        for lease, worker, step in ((command.lease, command.worker, command.step) for command in commands):
            names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt, "worker": worker}
            self._record("leased", **names, step=step)
            if not step:
                # Cut the subnet out while the lease is on its way: a column gather runs at a third of the link's speed.
                cutting = asyncio.to_thread(self._cut, journal.subnets[lease.subnet])
                self._pulls[lease.attempt] = asyncio.ensure_future(cutting)
            keys.append(f"round{lease.round:05d}-subnet{lease.subnet}-attempt{lease.attempt}-{self._client.id}")
            blocks, how = journal.blocks[lease.subnet], _training_mode(opened, lease.subnet)
            salvage = opened.rules.salvage
            specs.append(
                LeaseSpec(lease, self._address, blocks, how, preemption.progress_every, preemption.lease, salvage)
            )
            workers[keys[-1]] = [worker]
        with dask.annotate(workers=workers.get):  # each task to its own worker; `map` itself knows one set for all
            futures = self._client.map(tasks.train_subnet, specs, key=keys, pure=False, retries=0)
        for command, future in zip(commands, futures, strict=True):
            self._futures[command.lease.attempt] = command.worker, future
            self._spawn(self._follow(command.lease, command.worker, future))
        # Only now: Dask sends a worker something every 5 ms at most, and a release would make the lease wait.
        self._ended.clear()

    def _on_account(self, event: tuple[float, dict[str, Any]]) -> None:
        """Keep what a worker tells of an attempt; the task's end comes right behind it."""
        attempt = event[1]["attempt"]
        if attempt in self._futures:
            self._accounts[attempt] = event[1]["account"]

    async def _follow(self, lease: LeaseId, worker: str, future: Future) -> None:
        """Wait for an attempt's end, of whatever kind; only the ledger says what it achieved."""
        failed = False
        error = await future.exception()
        record = self._accounts.pop(lease.attempt, {"ended": "cancelled"})
        if error is not None:  # a task may die of anything; the subnet is leased again
            logger.info("attempt %d at subnet %d ended: %r", lease.attempt, lease.subnet, error)
            failed = not isinstance(error, ConnectionError | KilledWorker | NoValidWorkerError)
            record = {"ended": "error", "reason": repr(error)[:200]}
            if isinstance(error, ConnectionError) and not self._store.bytes_down:
                self._report_misfit(
                    f"workers do not reach the store at {self._address}; let them through to this machine"
                )
            self._failure = record["reason"] if failed else self._failure
        self._ended.append(self._futures.pop(lease.attempt)[1])
        self._pulls.pop(lease.attempt, None)
        names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt, "worker": worker}
        self._record("attempt_ended", **names, **record)
        unfit = record["ended"] == "out_of_memory"
        self._handle(
            protocol.AttemptEnded(now=time.monotonic(), lease=lease, worker=worker, failed=failed, out_of_memory=unfit)
        )
        self._reassembly.drop(lease.attempt)
        self._store.attempt_ended(lease)
        if unfit and self._state and worker in self._state.workers and worker in self._membership.capacities:
            memory_bytes = self._state.workers[worker].memory_bytes  # the next rounds are planned with that
            self._membership.capacities[worker] = replace(
                self._membership.capacities[worker], memory_bytes=memory_bytes
            )

    # --- what the store asks (exchange.store.Head) --------------------------------------------------------------

    def program(self) -> bytes:
        """See `Head`."""
        return self._pickled

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:
        """See `Head`."""
        if self._state is None:
            return Reply.STALE_ROUND
        if (reply := state.check_lease(self._state, lease)) is not Reply.ACCEPTED:
            return reply
        if at is not None:
            return await self._pull_at(lease.subnet, at)
        step = self._state.subnets[lease.subnet].base_steps
        if lease.attempt not in self._pulls:
            mark = self._checkpoints.latest(lease.subnet)
            self._pulls[lease.attempt] = asyncio.ensure_future(asyncio.to_thread(_whole, mark))
        part = (await self._pulls[lease.attempt])[start:stop]
        if stop is None and step:  # nobody asks again
            self._pulls.pop(lease.attempt, None)
        return step, part

    async def _pull_at(self, k: int, step: int) -> tuple[int, Tensor] | Reply:
        if not step:
            return 0, await asyncio.to_thread(self._cut, self._directory.subnets[k])
        mark = self._checkpoints.at(k, step)
        return (step, await asyncio.to_thread(_whole, mark)) if mark else Reply.NOT_LEASED

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """See `Head`."""
        lease = header.lease
        reply = state.check_lease(self._state, lease) if self._state else Reply.STALE_ROUND
        if reply is not Reply.ACCEPTED:
            return reply
        subnet = self._directory.subnets[lease.subnet]
        if not self._reassembly.hold(header, start, frames, subnet):
            return self._refused(lease, Reply.WRONG_SHAPE)
        reply = self._on_part_arrived(header)
        enough = header.update and self._reassembly.is_enough(lease.attempt, header.steps, subnet)
        return Reply.ENOUGH if enough and reply is Reply.ACCEPTED else reply

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:
        """See `Head`."""
        reply = state.check_lease(self._state, header.lease) if self._state else Reply.STALE_ROUND
        if reply is not Reply.ACCEPTED:
            return reply
        bound = self._reassembly.acceptance_rule(header, size, self._directory.subnets[header.lease.subnet])
        return self._refused(header.lease, bound) if isinstance(bound, Reply) else bound

    def part_arrived(self, header: PushHeader, content: memoryview, pieces: ReceivedMask, piece: int) -> bool:
        """See `Head`."""
        if not self._state or state.check_lease(self._state, header.lease) is not Reply.ACCEPTED:
            return False
        self._reassembly.note(header, content, pieces, piece, self._directory.subnets[header.lease.subnet])
        return self._on_part_arrived(header) is Reply.ACCEPTED

    def _on_part_arrived(self, header: PushHeader) -> Reply:
        lease, covered = header.lease, 0.0
        if header.update:
            covered = self._reassembly.norm_fraction(lease.attempt, header.steps, self._directory.subnets[lease.subnet])
        return self._handle(
            protocol.PartArrived(now=time.monotonic(), lease=lease, steps=header.steps, norm_fraction=covered)
        )

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:
        """See `Head`."""
        if lease.epoch != self._directory.epoch or lease.run != self._job.name:
            return Reply.STALE_EPOCH
        if lease.round == self._directory.round:  # what it adds to is not in the network yet
            return Reply.STALE_ROUND
        if lease not in self._late_updates:
            if not self._late_rows.missing(lease):
                return Reply.NOT_LEASED
            self._late_updates = {k: v for k, v in self._late_updates.items() if k.round >= lease.round - ROUNDS_KEPT}
            self._late_updates[lease] = self._spawn(
                self._late_rows_arrived(lease, memoryview(bytearray().join(frames)))
            )
        return await asyncio.shield(self._late_updates[lease])  # also if it is sent again, as the answer did not come

    async def _late_rows_arrived(self, lease: LeaseId, rows: memoryview) -> Reply:
        lacking = self._late_rows.pop(lease)
        change = await asyncio.to_thread(self._late_rows.change, lacking, rows) if lacking else None
        if change is None or not change.isfinite().all():
            return Reply.NOT_LEASED
        values = [change.numpy().data.cast("B")]
        await self._directory.late_rows(lease.round, lease.subnet, Payload(values, 0.0, checksum(values)))
        names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt}
        self._record("late_rows_added", **names, bytes=len(rows))
        return Reply.ACCEPTED

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `Head`."""
        lease, current = header.lease, header.lease.round == self._directory.round
        if current and lease.subnet in self._staging:  # sent again, as the answer did not come, or too late
            await asyncio.shield(self._staging[lease.subnet])
        if missing := self._late_rows.missing(lease):
            return Receipt(Reply.DUPLICATE, missing)
        begun = self._baseline(lease.subnet) if current and 0 <= lease.subnet < len(self._directory.subnets) else None
        small = 0 < sum(map(len, frames)) <= INLINE_BYTES
        read = functools.partial(self._reassembly.read, header, frames, begun)
        taken = read() if small else await asyncio.to_thread(read)
        now, fault = time.monotonic(), taken.fault
        event = protocol.Pushed(now=now, lease=lease, steps=header.steps, update=header.update, fault=fault)
        reply = self._handle(event, taken)
        if reply is Reply.ACCEPTED and header.loss is not None:
            self._losses[lease.subnet] = header.loss
        if reply not in (Reply.ACCEPTED, Reply.DUPLICATE):
            self._refused(lease, reply, taken.where)
        elif lease.subnet in self._staging:
            await asyncio.shield(self._staging[lease.subnet])  # the answer means: durable
        return Receipt(reply, self._late_rows.missing(lease))

    def _refused(self, lease: LeaseId, reply: Reply, where: str = "") -> Reply:
        names = {"round": lease.round, "subnet": lease.subnet, "attempt": lease.attempt}
        self._record("refused", **names, reply=reply.value, where=where)
        return reply

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """See `Head`."""
        return self._handle(protocol.Heartbeat(now=time.monotonic(), lease=lease, steps=steps))

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        """See `Head`."""
        if why:
            self._report_misfit(f"lockstep: {address} was cut off: {why}")
        return await self._rendezvous.join(
            lease, address, {*steps, *self._checkpoints.steps(lease.subnet)}, self._state
        )

    def _baseline(self, k: int) -> Baseline:
        return Baseline(self._directory.subnets[k], self._directory.network)

    def _cut(self, subnet: Subnet) -> Tensor:
        """A subnet as the open round begins with it, as it goes to its worker."""
        return encoding.encode_pull(self._program, subnet, self._directory.network.pull(subnet))

    # --- rounds -------------------------------------------------------------------------------------------------

    async def _salvage(self, command: protocol.Persist, arrived: PartialPayload) -> None:
        """Store what has come of an update whose worker is gone."""
        payload = await asyncio.to_thread(self._reassembly.salvaged, arrived, self._baseline(command.subnet))
        lacking = (
            None if arrived.received.all() else arrived
        )  # its worker may only have been slow: then the rest follows
        await self._stage(command, DecodedPush(payload, None, command.norm_fraction, lacking), reported=True)

    async def _stage(self, command: protocol.Persist, push: DecodedPush, *, reported: bool) -> None:
        """Make an update durable; `told`: its seconds were, when its lease was lost."""
        assert self._state is not None
        if push.missing_rows is not None:
            opened = self._state
            lease = LeaseId(opened.run, opened.epoch, opened.round, command.subnet, command.attempt)
            self._late_rows.add(lease, self._directory.subnets[command.subnet], push.missing_rows)
        worker, k = self._state.subnets[command.subnet].worker, command.subnet
        names = {"round": self._directory.round, "subnet": k, "attempt": command.attempt, "worker": worker}
        await self._directory.stage(k, command.attempt, command.steps, push.payload, push.norm_fraction)
        reported = reported and not self._state.rules.lockstep
        seconds = 0.0 if reported else push.payload.train_seconds
        lost = 1 - float(push.missing_rows.received.mean()) if push.missing_rows else 0.0
        self._record(
            "staged",
            **names,
            steps=command.steps,
            train_seconds=seconds,
            norm_fraction=push.norm_fraction,
            missing_rows=lost,
        )
        self._handle(protocol.Persisted(now=time.monotonic(), subnet=k))

    async def _commit(self, command: protocol.Commit) -> None:
        """End a round and draw the next."""
        journal, started = self._directory, time.monotonic()
        shares = next_shares = journal.shares
        if self._job.preemption.policy == "salvage" and self._membership.capacities:
            with contextlib.suppress(RunError):  # whoever could hold a subnet is gone just now
                next_shares = await asyncio.to_thread(self._plan)
        await journal.commit(command.staged, next_shares)
        self._subnet_loss = _mean_loss(self._losses, command.staged)
        self._losses = {}
        ended = time.monotonic()
        traffic = self._store.bytes_down, self._store.bytes_up
        self._record(
            "round_committed",
            round=command.round,
            steps=sum(steps for _, steps in command.staged),
            seconds=ended - self._opened_at,
            commit_seconds=ended - started,
            bytes_down=traffic[0] - self._traffic[0],
            bytes_up=traffic[1] - self._traffic[1],
            shares=shares,
            loss=self._subnet_loss,
        )
        self._traffic, self._opened_at, self._checkpoints, self._staging = traffic, ended, self._no_checkpoints(), {}
        due = ended - self._snapshot_at > self._job.checkpoint.every
        needs, alone = await asyncio.to_thread(self._needs)
        self._handle(protocol.Committed(now=ended, needs=needs, exclusive=alone, snapshot_due=due))

    async def _run_evaluation(self, command: protocol.Evaluate) -> None:
        """Evaluate and write the committed network while the next round trains; it does not change meanwhile."""
        started, accuracy = time.monotonic(), None
        if command.evaluate:
            self._score, warning = await asyncio.to_thread(self._evaluate)
            seconds = time.monotonic() - started
            if self._score:
                accuracy = self._score.accuracy
                self._record("evaluated", round=self._directory.round, **asdict(self._score), seconds=seconds)
            if warning:
                self._warned = True
                self._record("warning", round=self._directory.round, reason=warning)
        if command.snapshot:
            await self._directory.snapshot()
            self._snapshot_at = time.monotonic()
        self._handle(protocol.Evaluated(now=time.monotonic(), accuracy=accuracy))

    def _evaluate(self) -> tuple[Score | None, str | None]:
        """Score the committed network on test data, if there is any, and compare it with its subnets."""
        program, compared = self._program, self._subnet_loss if not self._warned else None
        if self._prepared.test is None and compared is None:
            return None, None
        samples = program.source.open()
        estimate_statistics(self._module, samples, program.training.seed)
        found = score(self._module, self._prepared.test.open(), program.loss) if self._prepared.test else None
        if compared is None or program.output:  # a very wide output's subnets have losses over other labels
            return found, None
        losses = assembly.training_loss(self._module, samples, program), compared
        return found, assembly.warning(program, self._directory.network, self._directory.subnets, losses)

    def _plan(self) -> tuple[float, ...]:
        """Shares for the workers that are there; under `reissue` not by their measured speed nor by how many they are
        just now, which are noise to a result that is a function of the job (one of seven undisturbed runs of
        workflows/digits.yaml differed).
        """
        workers = sorted(self._capacities().values(), key=lambda worker: -worker.memory_bytes)
        if self._job.preemption.policy == "reissue":
            asked = self._job.nodes.count
            workers = [replace(worker, steps_per_second=1.0) for worker in workers + workers[-1:] * asked][:asked]
        smallest = min(self._program.layout.sizes, default=1)
        how, beyond = self._program.out_of_core, None
        if how != "never":
            streams = all(worker.streams for worker in workers)
            least = functools.partial(self._out_of_core.least_bytes, streams=streams)
            beyond = widths.OutOfCoreEstimate(
                least, functools.partial(self._out_of_core.seconds, streams=streams), how == "always"
            )
        found = widths.shares(workers, self._program.training.subnets, self._need_bytes, smallest, beyond)
        if self._program.training.mode == "lockstep" and sum(found) < widths.WHOLE_NETWORK:
            raise RunError(
                f"training.mode: lockstep needs all labels at once, and the workers hold {sum(found):.0%} of them; "
                "take more or larger workers"
            )
        return found

    def _needs(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """What each subnet needs, and which are trained out of core: those that nobody here can hold, or all."""
        widths = [share if self._program.layout.groups else 1.0 for share in self._directory.shares]
        largest = max((capacity.memory_bytes for capacity in self._capacities().values()), default=sys.maxsize)
        how, streams = self._program.out_of_core, all(c.streams for c in self._capacities().values())
        alone = frozenset(
            k
            for k, width in enumerate(widths)
            if how == "always" or (how == "auto" and self._need_bytes(width) > largest)
        )
        needs = (
            self._out_of_core.least_bytes(width, streams=streams) if k in alone else self._need_bytes(width)
            for k, width in enumerate(widths)
        )
        return tuple(needs), alone


def _mean_loss(losses: Mapping[int, float], staged: Sequence[tuple[int, int]]) -> float | None:
    """The mean of the subnets' losses, weighted by their steps; None if none is known."""
    known = [(losses[k], steps) for k, steps in staged if k in losses]
    return sum(loss * steps for loss, steps in known) / sum(steps for _, steps in known) if known else None


def _training_mode(opened: table.RoundState, k: int) -> TrainingMode:
    if opened.rules.lockstep:
        return "lockstep"
    return "out-of-core" if opened.subnets[k].exclusive else "in-core"


def _whole(checkpoint: Payload) -> Tensor:
    """A mark as one buffer."""
    return torch.frombuffer(bytearray().join(checkpoint.frames), dtype=torch.float32)


def _own_host(scheduler: str) -> str:
    """The address of this machine that the scheduler's workers reach it at: loopback for a local scheduler."""
    host = scheduler.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    own: str = get_ip(host)
    return own
