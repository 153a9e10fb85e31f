"""Runs a job's rounds: turns what happens into events for the state machine, and its commands into calls.

Decides nothing about rounds (that is `state.advance`), writes nothing (that is `durable`), computes nothing (`nn`).
Events come from `membership`, `leases` and `uploads`, and from the clock; commands go to them and to the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cloudpickle
from distributed import Client
from distributed.comm import CommClosedError
from distributed.utils import get_ip

from idletrain.errors import RunError
from idletrain.exchange.codec import warm
from idletrain.exchange.messages import LeaseId, LockstepGroup, Reply
from idletrain.exchange.store import StoreServer
from idletrain.job import Job
from idletrain.nn.prepare import Prepared
from idletrain.observe.records import Recorder
from idletrain.rounds import lockstep_rules, protocol, state, table
from idletrain.rounds.downloads import Downloads
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.rounds.evaluation import Evaluator
from idletrain.rounds.leases import Leases
from idletrain.rounds.membership import Membership
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints
from idletrain.rounds.reassembly import DecodedPush, Reassembly
from idletrain.rounds.rendezvous import Rendezvous
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.sizing import SubnetSizing
from idletrain.rounds.uploads import Uploads
from idletrain.worker.lease_spec import version

STATE_TICK_SECONDS = 0.25
SCHEDULER_GONE_SECONDS = 5.0
NO_SCORE = dict.fromkeys(("accuracy", "loss", "calibration_error", "temperature"))
ACCOUNT_SECONDS, ACCOUNT_POLL_SECONDS = 1.0, 0.01


@dataclass(frozen=True)
class RunOutcome:
    """A run's end: `completed`, `reached`, `stopped` or `diverged`, its last scores and the network's digest."""

    status: str
    rounds: int
    params_sha256: str
    accuracy: float | None
    loss: float | None
    calibration_error: float | None = None
    temperature: float | None = None


class Coordinator:
    """One run, from its first or next round to its end.

    Args:
        job: The job.
        prepared: Its program and test data.
        directory: Its durable side.
        client: An asynchronous client of the cluster whose workers train.
        record: Takes what happens.
        about: Further fields of the run's first record: its dashboard, and how to reproduce it.
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
        self._client, self._about, training = client, about, prepared.program.training
        self._run = RunContext(
            job=job,
            program=prepared.program,
            directory=directory,
            record=record,
            handle=self._handle,
            spawn=self._spawn,
            checkpoints=ProgressCheckpoints(training.subnets if training.mode == "lockstep" else 0),
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._membership = Membership(
            client, record, self._spawn, joined=self._on_joined, noticed=self._on_notice, left=self._on_left
        )
        self._noticed: set[str] = set()
        self._sizing = SubnetSizing(job, prepared.program, self._membership.capacities)
        self._evaluation = Evaluator(self._run, prepared)
        self._rendezvous = Rendezvous(self._roll_back)
        reassembly = Reassembly(prepared.program, salvage=job.preemption.policy == "salvage")
        self._downloads, self._uploads = Downloads(self._run), Uploads(self._run, reassembly)
        self._store = StoreServer(
            RunBackend(self._run, self._downloads, self._uploads, self._rendezvous), client.security
        )
        self._leases = Leases(self._run, client, self._membership.capacities, self._store, self._downloads, reassembly)
        self._subnet_loss: float | None = None  # of the last committed round
        self._snapshot_at = self._opened_at = time.monotonic()
        self._traffic = (0, 0)

    async def run(self, count: int) -> RunOutcome:
        """Train until the job is done.

        Args:
            count: Workers to wait for before the first round.

        Raises:
            RunError: No worker can do the work, or the scheduler is gone.
        """
        try:
            if self._run.program.training.exchange.coded:
                await asyncio.to_thread(warm)  # its loops take a second to load, which leases should not wait for
            self._leases.listen(await self._store.listen(_own_host(self._client.scheduler.address)))
            self._record_start()
            self._spawn(self._watch_scheduler())
            await self._membership.watch()
            await self._membership.wait_for(count, stopped=self._done.done)
            if not self._done.done():
                await self._open()
            return await self._record_end(await self._until_done())
        except CommClosedError:  # whichever call to the scheduler was under way
            raise self._scheduler_gone() from None
        finally:
            await self._close()

    def stop(self) -> None:
        """End the run where it is; it can be resumed."""
        self._run.directory.stop_waiting()
        if self._run.state is None:
            self._finish("stopped")
        else:
            self._handle(protocol.StopRequested(now=time.monotonic()))

    # --- start and end ------------------------------------------------------------------------------------------

    def _record_start(self) -> None:
        run, training = self._run, self._run.program.training
        run.record(
            "run_started",
            run=run.job.name,
            version=version(),
            subnets=training.subnets,
            rounds=training.rounds,
            policy=run.job.preemption.policy,
            target=run.job.stop.accuracy,
            method=training.method,
            local_steps=training.local_steps,
            exchange=training.exchange.model_dump(),
            parameters=sum(tensor.numel() for tensor in run.directory.network.values),
            groups={group.name: group.size for group in run.program.layout.groups},
            resumed_at=run.directory.round,
            run_dir=str(run.directory.run_dir),
            **self._about,
        )

    async def _open(self) -> None:
        """Begin this epoch with the workers that are here."""
        directory, training = self._run.directory, self._run.program.training
        preemption = self._run.job.preemption
        salvage, lockstep = preemption.policy == "salvage", training.mode == "lockstep"
        # The subnets that are left of a round in lockstep could not train alone.
        drop = lockstep and 0 < len(directory.staged) < training.subnets
        keep = directory.shares and (not salvage or directory.staged)
        await directory.begin(directory.shares if keep else await asyncio.to_thread(self._sizing.shares), drop=drop)
        rules = table.RoundRules(
            salvage=salvage,
            local_steps=training.local_steps,
            rounds=training.rounds,
            lease_seconds=preemption.lease,
            evaluate_every=training.evaluate_every,
            target=self._run.job.stop.accuracy,
            lockstep=lockstep,
        )
        staged = {k: update.steps for k, update in directory.staged.items()}
        now = self._opened_at = time.monotonic()
        needs, exclusive = await asyncio.to_thread(self._sizing.needs, directory.shares)
        workers = {
            address: table.WorkerState(
                memory_bytes=capacity.memory_bytes, leases=capacity.leases, cohort=capacity.cohort
            )
            for address, capacity in self._sizing.capacities().items()
        }
        name, epoch, number = self._run.job.name, directory.epoch, directory.round
        opened = state.open_run(rules, name, epoch, number, needs, staged, now, workers, exclusive)
        self._run.state = opened
        if opened.evaluating:
            snapshot = opened.stage is table.RunStage.LAST_EVALUATION
            self._spawn(self._evaluate(protocol.Evaluate(evaluate=True, snapshot=snapshot)))
        self._handle(protocol.ClockTick(now=now))

    async def _until_done(self) -> str:
        while not self._done.done():
            await asyncio.wait((self._done,), timeout=STATE_TICK_SECONDS)
            self._handle(protocol.ClockTick(now=time.monotonic()))
            for reason in self._sizing.misfits(self._run.state) if self._run.state else ():
                self._run.record_waiting(reason)
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
        number = self._run.directory.round
        return RunError(f"the Dask scheduler is gone after round {number}; start the job again with --resume")

    async def _record_end(self, status: str) -> RunOutcome:
        if status == "failed":
            raise RunError(f"a subnet fails on every worker: {self._leases.failure}; mend that and add --resume")
        if status in ("completed", "reached"):
            await self._await_accounts()
        directory, score = self._run.directory, self._evaluation.score
        digest = await directory.end(status)
        outcome = RunOutcome(status, directory.round, digest, **(asdict(score) if score else NO_SCORE))
        self._run.record("run_ended", **asdict(outcome), run_dir=str(directory.run_dir))
        return outcome

    async def _await_accounts(self) -> None:
        """Wait a moment for the attempts' own records, which arrive after their updates."""
        until = time.monotonic() + ACCOUNT_SECONDS
        while self._leases.pending and time.monotonic() < until:
            await asyncio.sleep(ACCOUNT_POLL_SECONDS)

    async def _close(self) -> None:
        self._run.state = None
        self._rendezvous.answer_waiting(None)
        for task in self._tasks:
            task.cancel()
        self._downloads.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._membership.leave()
        self._leases.release()
        await self._store.close()

    def _finish(self, status: str) -> None:
        if not self._done.done():
            self._done.set_result(status)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine beside the others; an error in it ends the run."""
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, ended: asyncio.Task[Any]) -> None:
        self._tasks.discard(ended)
        if not ended.cancelled() and (error := ended.exception()) and not self._done.done():
            self._done.set_exception(error)

    # --- events in, commands out --------------------------------------------------------------------------------

    def _handle(self, event: protocol.RoundEvent, push: DecodedPush | None = None) -> Reply:  # noqa: C901 (one case a command)
        """Advance the state by an event and carry out the commands; return the reply to a push or heartbeat."""
        run = self._run
        if run.state is None:
            return Reply.STALE_ROUND
        reply = Reply.ACCEPTED
        run.state, commands = state.advance(run.state, event)
        for command in commands:
            match command:
                case protocol.Respond(answer):
                    reply = answer
                case protocol.KeepProgress(k) if push:
                    self._uploads.keep_progress(k, push.payload)
                case protocol.Persist(k):
                    # A push may close a round under `salvage` and itself be refused: then the checkpoint counts.
                    pushed = isinstance(event, protocol.Pushed) and event.lease.subnet == k and reply is Reply.ACCEPTED
                    self._uploads.persist(command, push if pushed else None)
                case protocol.LeaseLost():
                    kept_seconds = self._uploads.kept_seconds(command)
                    run.record("lost", round=run.directory.round, kept_seconds=kept_seconds, **asdict(command))
                case protocol.Commit():
                    self._spawn(self._commit(command))
                case protocol.Evaluate():
                    self._spawn(self._evaluate(command))
                case protocol.Finish(status):
                    self._finish(status)
        self._rendezvous.answer_waiting(run.state)
        if (grants := [command for command in commands if isinstance(command, protocol.GrantLease)]) and run.state:
            self._leases.send(run.state, grants)
        return reply

    def _roll_back(self, step: int) -> None:
        """Roll the state back to the step from which a new lockstep group goes on."""
        run = self._run
        if run.state:
            run.checkpoints.forget_above(step)
            saved_steps = [max(run.checkpoints.steps(k), default=0) for k in range(len(run.state.subnets))]
            run.state = lockstep_rules.rolled_back(run.state, step, saved_steps)

    def _on_joined(self, address: str) -> None:
        capacity = self._sizing.capacities()[address]
        joined = protocol.WorkerJoined(
            now=time.monotonic(),
            worker=address,
            memory_bytes=capacity.memory_bytes,
            leases=capacity.leases,
            cohort=capacity.cohort,
        )
        self._handle(joined)

    def _on_notice(self, address: str) -> None:
        self._noticed.add(address)  # also before there is a state that knows workers
        self._handle(protocol.NoticeReceived(now=time.monotonic(), worker=address))

    def _on_left(self, address: str, name: str) -> None:
        cause = "notice" if address in self._noticed else "kill"
        self._noticed.discard(address)
        self._run.record("worker_left", worker=address, name=name, cause="end" if self._done.done() else cause)
        self._store.worker_left(address)
        self._leases.cancel_on(address)
        self._handle(protocol.WorkerLeft(now=time.monotonic(), worker=address))

    # --- rounds -------------------------------------------------------------------------------------------------

    async def _commit(self, command: protocol.Commit) -> None:
        """Commit a round and draw the next one's partition."""
        run, directory, started = self._run, self._run.directory, time.monotonic()
        shares = next_shares = directory.shares
        if run.job.preemption.policy == "salvage" and self._membership.capacities:
            with contextlib.suppress(RunError):  # every worker that could hold a subnet is gone just now
                next_shares = await asyncio.to_thread(self._sizing.shares)
        await directory.commit(command.staged, next_shares)
        self._subnet_loss = _mean_loss(self._uploads.losses, command.staged)
        ended, traffic = time.monotonic(), (self._store.bytes_down, self._store.bytes_up)
        run.record(
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
        self._traffic, self._opened_at = traffic, ended
        run.checkpoints.clear()
        self._uploads.open_round()
        due = ended - self._snapshot_at > run.job.checkpoint.every
        needs, exclusive = await asyncio.to_thread(self._sizing.needs, directory.shares)
        self._handle(protocol.Committed(now=ended, needs=needs, exclusive=exclusive, snapshot_due=due))

    async def _evaluate(self, command: protocol.Evaluate) -> None:
        """Evaluate and write the committed network while the next round trains; it does not change meanwhile."""
        accuracy = await self._evaluation.run(self._subnet_loss) if command.evaluate else None
        if command.snapshot:
            await self._run.directory.snapshot()
            self._snapshot_at = time.monotonic()
        self._handle(protocol.Evaluated(now=time.monotonic(), accuracy=accuracy))


class RunBackend:
    """The store's `StoreBackend`: passes each request of a worker on to the part of the run that answers it.

    Args:
        run: The run.
        downloads: Answers pulls.
        uploads: Takes pushes, their parts and late rows.
        rendezvous: Forms lockstep groups.
    """

    def __init__(self, run: RunContext, downloads: Downloads, uploads: Uploads, rendezvous: Rendezvous) -> None:
        self._run, self._rendezvous = run, rendezvous
        self._pickled: bytes = cloudpickle.dumps(run.program)
        self.pull = downloads.pull
        self.push, self.late_rows = uploads.push, uploads.late_rows
        self.part, self.expect, self.part_arrived = uploads.part, uploads.expect, uploads.part_arrived

    def program(self) -> bytes:
        """See `StoreBackend`."""
        return self._pickled

    def beat(self, lease: LeaseId, steps: int) -> Reply:
        """See `StoreBackend`."""
        return self._run.handle(protocol.Heartbeat(now=time.monotonic(), lease=lease, steps=steps))

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:
        """See `StoreBackend`."""
        if why:
            self._run.record_waiting(f"lockstep: {address} was cut off: {why}")
        stored = self._run.checkpoints.steps(lease.subnet)
        return await self._rendezvous.join(lease, address, {*steps, *stored}, self._run.state)


def _mean_loss(losses: Mapping[int, float], staged: Sequence[tuple[int, int]]) -> float | None:
    """Return the mean of the subnets' losses, weighted by their steps; None if none is known."""
    known = [(losses[k], steps) for k, steps in staged if k in losses]
    return sum(loss * steps for loss, steps in known) / sum(steps for _, steps in known) if known else None


def _own_host(scheduler: str) -> str:
    """Return the address at which the scheduler's workers reach this machine: loopback for a local scheduler."""
    host = scheduler.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    own: str = get_ip(host)
    return own
