"""Runs a job's rounds: turns what happens into events for the state machine, and its commands into calls.

Decides nothing about rounds (that is `state.advance`), writes nothing (that is `durable`), computes nothing (`nn`).
Events come from `membership`, `leases` and `uploads`, and from the clock; commands go to them and to `commits`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client
from distributed.comm import CommClosedError
from distributed.utils import get_ip

from idletrain.errors import RunError
from idletrain.exchange.codec import warm
from idletrain.exchange.messages import Reply
from idletrain.exchange.store import StoreServer
from idletrain.job import Job
from idletrain.nn.prepare import Prepared
from idletrain.observe.records import DONE_STATUSES, Recorder
from idletrain.rounds import lockstep_rules, protocol, state, table
from idletrain.rounds.backend import RunBackend
from idletrain.rounds.commits import Commits
from idletrain.rounds.downloads import Downloads
from idletrain.rounds.durable.rolling_directory import RollingDirectory
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.rounds.durable.stream_positions import StreamPositions
from idletrain.rounds.evaluation import Evaluator, OnEvaluate
from idletrain.rounds.leases import Leases
from idletrain.rounds.membership import Membership
from idletrain.rounds.opening import open_epoch
from idletrain.rounds.progress_checkpoints import ProgressCheckpoints
from idletrain.rounds.reassembly import DecodedPush, Reassembly
from idletrain.rounds.rendezvous import Rendezvous
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.run_records import failure_reason, record_sick, record_start
from idletrain.rounds.sizing import SubnetSizing
from idletrain.rounds.uploads import Uploads
from idletrain.rounds.widths import Capacity

STATE_TICK_SECONDS = 0.25
SCHEDULER_GONE_SECONDS = 5.0
NO_SCORE: dict[str, Any] = {"accuracy": None, "loss": None}
ACCOUNT_SECONDS, ACCOUNT_POLL_SECONDS = 1.0, 0.01


@dataclass(frozen=True)
class RunOutcome:
    """A run's end: its status, its last scores, the digest of its last network, and the best network's round.

    The status is `completed`, `reached` (the target), `stopped-early`, `stopped` (by the user) or `diverged`.
    """

    status: str
    rounds: int
    params_sha256: str
    accuracy: float | None
    loss: float | None
    calibration_error: float | None = None
    temperature: float | None = None
    constant_loss: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    best_round: int | None = None


class Coordinator:
    """One run, from its first or next round to its end.

    Args:
        job: The job.
        prepared: Its program and test data.
        directory: Its durable side.
        client: An asynchronous client of the cluster whose workers train.
        record: Takes what happens.
        about: Further fields of the run's first record: its dashboard, and how to reproduce it.
        on_evaluate: Called with a copy of each network that is evaluated, and its scores.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        directory: RunDirectory,
        client: Client,
        record: Recorder,
        about: Mapping[str, Any],
        on_evaluate: OnEvaluate | None = None,
    ) -> None:
        self._client, self._about, training = client, about, prepared.program.training
        self._run = RunContext(
            job=job,
            program=prepared.program,
            directory=directory,
            record=record,
            handle=self._handle,
            spawn=self._spawn,
            positions=StreamPositions(directory.run_dir),
            checkpoints=ProgressCheckpoints(
                training.phase(directory.round).subnets if training.mode == "lockstep" else 0
            ),
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._membership = Membership(
            client,
            record,
            self._spawn,
            compiled_on=prepared.program.compiled_on,
            misfit=self._misfit,
            joined=self._on_joined,
            noticed=self._on_notice,
            left=self._on_left,
        )
        self._noticed: set[str] = set()
        self._sizing = SubnetSizing(job, prepared.program, self._membership.capacities)
        self._evaluation = Evaluator(self._run, prepared, on_evaluate)
        self._rendezvous = Rendezvous(self._roll_back)
        reassembly = Reassembly(prepared.program, salvage=job.preemption.policy == "salvage")
        self._downloads, self._uploads = Downloads(self._run), Uploads(self._run, reassembly)
        self._store = StoreServer(
            RunBackend(self._run, self._downloads, self._uploads, self._rendezvous), client.security
        )
        self._leases = Leases(self._run, client, self._membership.capacities, self._store, self._downloads, reassembly)
        self._commits = Commits(self._run, self._sizing, self._uploads, self._evaluation, self._store)
        self._blame: protocol.Finish | None = None

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
            record_start(self._run, self._about)
            self._spawn(self._watch_scheduler())
            await self._membership.watch()
            await self._membership.wait_for(count, self._run.job.nodes.idle_duration, stopped=self._done.done)
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

    async def _open(self) -> None:
        """Begin this epoch with the workers that are here."""
        opened = self._run.state = await open_epoch(self._run, self._sizing, self._evaluation.watch)
        self._commits.open_round(opened.opened_at)
        if opened.evaluating:
            last = opened.stage is table.RunStage.LAST_EVALUATION
            self._spawn(self._commits.evaluate(state.evaluation(opened.rules, snapshot=last, last=last)))
        self._handle(protocol.ClockTick(now=time.monotonic()))

    async def _until_done(self) -> str:
        while not self._done.done():
            await asyncio.wait((self._done,), timeout=STATE_TICK_SECONDS)
            self._handle(protocol.ClockTick(now=time.monotonic()))
            if not self._run.state:
                continue
            misfits = list(self._sizing.misfits(self._run.state))
            for reason in misfits:
                self._run.record_waiting(reason)
            if self._run.state.stage is table.RunStage.TRAINING:
                stuck = misfits if not self._run.state.subnets.count(table.Phase.LEASED, table.Phase.STORING) else ()
                self._membership.check_idle(self._run.job.nodes.count, self._run.job.nodes.idle_duration, stuck)
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
        if self._blame and self._blame.status != "diverged":
            failure = self._leases.failure
            raise RunError(failure_reason(self._run, self._membership, self._blame, failure)) from failure
        if status in DONE_STATUSES:
            await self._await_accounts()
        directory, score = self._run.directory, self._evaluation.score
        digest = await directory.end(status)
        scores = asdict(score) if score else NO_SCORE
        outcome = RunOutcome(status, directory.round, digest, best_round=directory.best_round, **scores)
        stop = self._run.job.stop
        early = (
            {"reason": f"no better {stop.watched} in {stop.patience} evaluations"} if status == "stopped-early" else {}
        )
        self._run.record("run_ended", **asdict(outcome), run_dir=str(directory.run_dir), **early)
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
                case protocol.KeepProgress() if push:
                    self._uploads.keep_progress(command, push.payload)
                case protocol.Persist(k):
                    # A push may close a round under `salvage` and itself be refused: then the checkpoint counts.
                    pushed = isinstance(event, protocol.Pushed) and event.lease.subnet == k and reply is Reply.ACCEPTED
                    self._uploads.persist(command, push if pushed else None)
                case protocol.LeaseLost():
                    kept_seconds = self._uploads.kept_seconds(command)
                    number = run.state.subnets[command.subnet].round
                    run.record("lost", round=number, kept_seconds=kept_seconds, **asdict(command))
                case protocol.Commit():
                    rolling = isinstance(run.directory, RollingDirectory)
                    self._spawn((self._commits.pass_round if rolling else self._commits.commit)(command))
                case protocol.Evaluate():
                    self._spawn(self._commits.evaluate(command))
                case protocol.KeepScore():
                    self._spawn(self._commits.keep_score(command))
                case protocol.WorkerSick():
                    record_sick(run, self._membership, command)
                case protocol.Finish(status):
                    self._blame = command if command.workers else None
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

    def _misfit(self, capacity: Capacity) -> str | None:
        return self._sizing.misfit(capacity)

    def _on_joined(self, address: str) -> None:
        capacity = self._sizing.capacity(address)
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
        known = self._run.state.workers.get(address) if self._run.state else None
        cause = "notice" if address in self._noticed else "hang" if known and known.hung else "kill"
        self._noticed.discard(address)
        self._run.record("worker_left", worker=address, name=name, cause="end" if self._done.done() else cause)
        self._store.worker_left(address)
        self._leases.cancel_on(address)
        self._handle(protocol.WorkerLeft(now=time.monotonic(), worker=address))


def _own_host(scheduler: str) -> str:
    """Return the address at which the scheduler's workers reach this machine: loopback for a local scheduler."""
    host = scheduler.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]")
    own: str = get_ip(host)
    return own
