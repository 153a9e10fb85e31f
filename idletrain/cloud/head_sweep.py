"""Train a sweep's trials on its head node, in turn on the same nodes, until all have ended or a limit is met.

Each trial is a run with a prefix and a record of its own beside the sweep's, so that every command finds it. What the
machines do and cost is recorded in the sweep's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from idletrain.cloud import record
from idletrain.cloud.controller import FleetController
from idletrain.cloud.head_run import RunHooks, train, unpack_code, watch_limits
from idletrain.cloud.record import RUN_RECORD_KEY, RunRecord
from idletrain.cloud.workdir import RUNS
from idletrain.cluster.identity import Identity
from idletrain.errors import IdletrainError
from idletrain.job import Job
from idletrain.observe.records import Record, Recorder
from idletrain.observe.summary import Summary
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import SWEEP_RESULTS, Mirror
from idletrain.storage import S3Prefix, make_private
from idletrain.sweeps.grid import from_plain
from idletrain.sweeps.running import Sweep, SweepSettings, TrialUnderWay
from idletrain.sweeps.trial_results import ResultsFile, SweepResult

logger = logging.getLogger(__name__)


async def lead_sweep(
    run: RunRecord, prefix: S3Prefix, controller: FleetController, identity: Identity, scheduler: str
) -> None:
    """Train a sweep's trials on the nodes that a controller keeps.

    Args:
        run: The sweep's record.
        prefix: Its prefix; those of its trials are beside it.
        controller: Gets every event, and records its own in the sweep's.
        identity: The head's certificates.
        scheduler: The scheduler's address.
    """
    assert run.sweep
    await unpack_code(prefix)
    directory = RUNS / run.run
    await asyncio.to_thread(s3_mirror.restore, prefix, directory)
    make_private(directory)

    def start(job: Job, _again: bool) -> contextlib.AbstractAsyncContextManager[TrialUnderWay]:
        return _started(lambda hooks: _train_trial(run, prefix, job, (identity, scheduler), hooks), controller)

    with contextlib.closing(Recorder(directory / s3_mirror.EVENTS)) as log:
        file = ResultsFile(directory / SWEEP_RESULTS)
        settings = SweepSettings(
            start=start,
            events_of=lambda job: s3_mirror.events(sibling(prefix, job.name)),
            parallel=1,
            watched=run.sweep.watched,
            better=run.sweep.better,
            prune=run.sweep.prune,
            budget_usd=None,  # the limits are those of all trials together
            cost_of=_costs(controller, run),
            report=lambda text: log("trial", text=text),
        )
        sweep = Sweep(from_plain(run.sweep.trials), file, settings)
        file.write(sweep.results)  # before the mirror's first copy: a restored sweep has both
        controller.attach(log)
        await _run(sweep, run, controller, Mirror(directory, prefix), log)


def sibling(prefix: S3Prefix, run: str) -> S3Prefix:
    """Return the prefix of a run beside another one's."""
    parent, _, _ = prefix.url.rstrip("/").rpartition("/")
    return S3Prefix.at(f"{parent}/{run}", prefix.client)


async def _run(sweep: Sweep, run: RunRecord, controller: FleetController, mirror: Mirror, log: Recorder) -> None:
    """Run a sweep until it has ended or a limit is met; record how it ended."""
    working = asyncio.ensure_future(sweep.run())

    def stop() -> None:
        working.cancel()

    limits = asyncio.ensure_future(watch_limits(run, controller, stop, log))
    mirroring = asyncio.ensure_future(mirror.keep())
    try:
        await asyncio.wait((working,))
        if not working.cancelled():
            working.result()
    finally:
        working.cancel()  # where this head is to end
        controller.detach()
        for task in (limits, mirroring):
            task.cancel()
        await asyncio.gather(working, limits, mirroring, return_exceptions=True)
        log("run_ended", run_dir=str(RUNS / run.run), params_sha256=None, **_outcome(sweep.results))
        await asyncio.to_thread(mirror.copy)


def _outcome(results: Mapping[str, SweepResult]) -> dict[str, Any]:
    """Return how a sweep ended, for its last record."""
    left = [name for name, result in results.items() if not result.ended]
    rounds = sum(result.values[-1][0] for result in results.values() if result.values)
    if not left:
        return {"status": "completed", "rounds": rounds}
    return {"status": "stopped", "rounds": rounds, "reason": f"{len(left)} of {len(results)} trials did not end"}


def _costs(controller: FleetController, run: RunRecord) -> Callable[[Mapping[str, Any]], float]:
    """Return a function that tells what the machines have cost since its last call, or since the sweep's start."""
    before = run.spent_usd

    def cost_of(_record: Mapping[str, Any]) -> float:
        nonlocal before
        since, before = before, controller.spent_usd
        return before - since

    return cost_of


async def _train_trial(
    run: RunRecord, prefix: S3Prefix, job: Job, cluster: tuple[Identity, str], hooks: RunHooks
) -> None:
    """Train a trial as a run below a prefix of its own, whose record names the sweep."""
    own = sibling(prefix, job.name)
    trial = replace(run, run=job.name, job=job.as_tree(), sweep=None, of_sweep=run.run)
    await asyncio.to_thread(own.put, RUN_RECORD_KEY, trial.as_json())
    failure = ""
    try:
        await train(trial, own, *cluster, hooks)
    except IdletrainError as error:
        failure = str(error)
        raise
    finally:
        await asyncio.to_thread(record.update, own, state="ended", failure=failure)


@contextlib.asynccontextmanager
async def _started(
    train_with: Callable[[RunHooks], Coroutine[Any, Any, None]], controller: FleetController
) -> AsyncIterator[TrialUnderWay]:
    """Train a trial beside this task; end it at once if it outlives the context."""
    trial = HeadTrial(train_with, controller)
    try:
        yield trial
    finally:
        await trial.end()


class HeadTrial:
    """A trial that trains in this process (see `TrialUnderWay`).

    Args:
        train_with: Trains it with hooks.
        controller: Gets every event.
    """

    def __init__(
        self, train_with: Callable[[RunHooks], Coroutine[Any, Any, None]], controller: FleetController
    ) -> None:
        self._summary = Summary()
        self._records: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._training = asyncio.ensure_future(
            train_with(RunHooks((controller, self._take), self._on_start, summary=self._summary))
        )
        self._stop: Callable[[], object] = self._training.cancel
        self._training.add_done_callback(lambda _: self._records.put_nowait(None))

    async def records(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its summary after each round and at its end."""
        while (taken := await self._records.get()) is not None:
            yield taken

    def interrupt(self) -> None:
        """Stop it so that it can be resumed."""
        self._stop()

    async def wait(self) -> str:
        """Wait for its end; return why it failed, if it did."""
        await asyncio.wait((self._training,))
        if self._training.cancelled():
            return "it was stopped before it began"
        error = self._training.exception()
        if error and not isinstance(error, IdletrainError):
            logger.error("a bug", exc_info=error)
            return f"the head met a bug, not your fault: {error!r}"
        return str(error) if error else ""

    async def end(self) -> None:
        """End it at once, if it still trains."""
        self._training.cancel()
        await asyncio.gather(self._training, return_exceptions=True)

    def _on_start(self, stop: Callable[[], None], _record: Recorder) -> None:
        self._stop = stop

    def _take(self, event: Record) -> None:
        if event["kind"] == "round_committed":
            self._records.put_nowait(self._summary.round_record(event))
        elif event["kind"] == "run_ended":
            self._records.put_nowait(self._summary.as_record())
