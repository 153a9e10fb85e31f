"""Commits rounds, and has the committed network evaluated and written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from idletrain.errors import RunError
from idletrain.exchange.store import StoreServer
from idletrain.nn.ist.schemes import SubnetSpec
from idletrain.rounds import protocol
from idletrain.rounds.evaluation import CommittedNetwork, Evaluator
from idletrain.rounds.run_context import RunContext
from idletrain.rounds.run_records import record_phase
from idletrain.rounds.sizing import SubnetSizing
from idletrain.rounds.uploads import Uploads


class Commits:
    """The rounds that a run commits, and the time and bytes that each took.

    Args:
        run: The run.
        sizing: Chooses the next round's subnets.
        uploads: The open round's pushes.
        evaluator: Evaluates the committed network.
        store: Counts the bytes moved.
    """

    def __init__(
        self, run: RunContext, sizing: SubnetSizing, uploads: Uploads, evaluator: Evaluator, store: StoreServer
    ) -> None:
        self._run, self._sizing, self._uploads, self._evaluator, self._store = run, sizing, uploads, evaluator, store
        self._subnet_loss: float | None = None  # of the last committed round
        self._committed: CommittedNetwork | None = None  # as the last evaluation that a commit waited for had it
        self._beside: asyncio.Task[None] | None = None  # evaluates a copy
        self._snapshot_at = self._opened_at = time.monotonic()
        self._traffic = (0, 0)

    def open_round(self, now: float) -> None:
        """Begin to measure a round.

        Args:
            now: Seconds of the head's monotonic clock.
        """
        self._opened_at = now

    async def commit(self, command: protocol.Commit) -> None:
        """Commit a round and draw the next one's partition."""
        run, directory, started = self._run, self._run.directory, time.monotonic()
        training = run.program.training
        ended_phase, phase = training.phase(command.round), training.phase(command.round + 1)
        specs = directory.specs
        next_specs = directory.planned[phase.number - 1] if directory.planned else specs
        if run.job.preemption.policy == "salvage" and self._sizing.capacities():
            with contextlib.suppress(RunError):  # every worker that could hold a subnet is gone just now
                next_specs = await asyncio.to_thread(self._sizing.specs, command.round + 1)
        await directory.commit(command.staged, next_specs)
        await directory.keep_positions(run.positions)
        ended = self._record(command.round, command.staged, specs, started)
        run.checkpoints.open_round(phase.subnets if training.mode == "lockstep" else 0)
        self._uploads.open_round()
        begins = phase != ended_phase
        if begins:
            record_phase(run, phase)
        due = ended - self._snapshot_at > run.job.checkpoint.every
        needs, exclusive = await asyncio.to_thread(self._sizing.needs, directory.specs)
        self._run.handle(
            protocol.Committed(
                now=ended,
                needs=needs,
                exclusive=exclusive,
                snapshot_due=due,
                new_local_steps=phase.local_steps if begins else None,
            )
        )

    async def pass_round(self, command: protocol.Commit) -> None:
        """Under `rolling`, take note that another round is over; its updates are in the network already."""
        started, directory = time.monotonic(), self._run.directory
        await directory.keep_positions(self._run.positions)
        ended = self._record(command.round, self._uploads.take_steps(), directory.specs, started)
        due = ended - self._snapshot_at > self._run.job.checkpoint.every
        self._run.handle(protocol.Committed(now=ended, needs=(), snapshot_due=due))

    def _record(
        self, round_: int, staged: Sequence[tuple[int, int]], specs: Sequence[SubnetSpec], started: float
    ) -> float:
        """Record a committed round, and return when it ended."""
        self._subnet_loss = _mean_loss(self._uploads.losses, staged)
        program, step = self._run.program, self._run.program.steps_before(round_ + 1) - 1
        ended, traffic = time.monotonic(), (self._store.bytes_down, self._store.bytes_up)
        self._run.record(
            "round_committed",
            round=round_,
            steps=sum(steps for _, steps in staged),
            seconds=ended - self._opened_at,
            commit_seconds=ended - started,
            bytes_down=traffic[0] - self._traffic[0],
            bytes_up=traffic[1] - self._traffic[1],
            shares=[spec.share for spec in specs],
            loss=self._subnet_loss,
            lr=program.training.optimizer.lr * program.lr_factor(step),
            **self._pace(),
        )
        self._traffic, self._opened_at = traffic, ended
        return ended

    def _pace(self) -> dict[str, float]:
        """Return the least trained neuron's steps over those of the mean, where neurons have no steps in common."""
        rolling = self._run.directory.rolling
        return {"least_trained": float(rolling.pace.min())} if rolling else {}

    async def evaluate(self, command: protocol.Evaluate) -> None:
        """Evaluate and write the committed network while the next round trains; it does not change until Evaluated.

        Where nothing depends on the scores, a copy is evaluated, unless the one before still is: the next evaluation
        takes the place of one that is late.
        """
        if command.waits:
            await self._evaluate(command)
            return
        if self._beside is None or self._beside.done():
            await self._evaluate_beside(command)
        self._run.handle(protocol.Evaluated(now=time.monotonic(), accuracy=None, measured=False))

    async def _evaluate(self, command: protocol.Evaluate) -> None:
        if self._beside is not None:
            await asyncio.wait([self._beside])  # a failure of it ends the run
        async with self._run.directory.unchanged():
            self._committed = network = await self._evaluator.committed(self._subnet_loss, copy=False)
        if command.evaluate:
            await self._evaluator.run(network)
        if command.snapshot:
            await self._snapshot(network)
        latest, watch = self._evaluator.score if command.evaluate else None, self._evaluator.watch
        accuracy = latest.accuracy if latest else None
        score = latest.of(watch.metric) if latest and watch else None
        now = time.monotonic()
        self._run.handle(protocol.Evaluated(now=now, accuracy=accuracy, measured=command.evaluate, score=score))

    async def _evaluate_beside(self, command: protocol.Evaluate) -> None:
        """Begin to evaluate a copy of the network; of a snapshot, only what a run is resumed from is written now."""
        async with self._run.directory.unchanged():
            network = await self._evaluator.committed(self._subnet_loss, copy=True)
            if command.snapshot:
                await self._run.directory.snapshot_network()
                self._snapshot_at = time.monotonic()

        async def evaluate_copy() -> None:
            if command.evaluate:
                await self._evaluator.run(network, quick=True)
            if command.snapshot:
                await asyncio.to_thread(network.estimate)
                await self._run.directory.complete_snapshot(network.round, network.module)

        self._beside = self._run.spawn(evaluate_copy())

    async def _snapshot(self, network: CommittedNetwork) -> None:
        """Write the committed network, with the buffers that are estimated for it."""
        await asyncio.to_thread(network.estimate)
        await self._run.directory.snapshot()
        self._snapshot_at = time.monotonic()

    async def keep_score(self, command: protocol.KeepScore) -> None:
        """Record what tells the best network, and keep this one if it is the best so far."""
        directory, watch = self._run.directory, self._evaluator.watch
        assert watch is not None
        assert self._committed is not None
        if command.best:
            await asyncio.to_thread(self._committed.estimate)
        await directory.keep_score(command.score, best=command.best)
        if command.best:
            self._snapshot_at = time.monotonic()
            self._run.record("best", round=directory.round, metric=watch.metric, value=command.score)
        self._run.handle(protocol.ScoreKept(now=time.monotonic()))


def _mean_loss(losses: Mapping[int, float], staged: Sequence[tuple[int, int]]) -> float | None:
    """Return the mean of the subnets' losses, weighted by their steps; None if none is known."""
    known = [(losses[k], steps) for k, steps in staged if k in losses]
    return sum(loss * steps for loss, steps in known) / sum(steps for _, steps in known) if known else None
