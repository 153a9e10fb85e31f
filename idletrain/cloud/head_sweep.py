"""Train a sweep's trials on its head node, in turn on the same nodes, until all have ended or a limit is met.

Each trial is a run with a prefix and a record of its own beside the sweep's, so that every command finds it. What the
machines do and cost is recorded in the sweep's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from typing import Any

from idletrain.cloud.controller import FleetController
from idletrain.cloud.head_run import unpack_code, watch_limits
from idletrain.cloud.head_trial import HeadTrial, train_trial
from idletrain.cloud.record import RUN_RECORD_KEY, RunRecord
from idletrain.cloud.workdir import RUNS
from idletrain.cluster.identity import Identity
from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.observe.records import Record, Recorder
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import SWEEP_RESULTS, Mirror
from idletrain.storage import S3Prefix, make_private
from idletrain.sweeps.grid import from_plain
from idletrain.sweeps.running import Sweep, SweepSettings, TrialUnderWay
from idletrain.sweeps.trial_results import ResultsFile, SweepResult


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
    await unpack_code(prefix)
    directory = RUNS / run.run
    if not await asyncio.to_thread(prefix.names, SWEEP_RESULTS):  # of a head that ended before its first copy
        await asyncio.to_thread(prefix.put, SWEEP_RESULTS, b"{}")
    await asyncio.to_thread(s3_mirror.restore, prefix, directory)
    make_private(directory)
    with contextlib.closing(Recorder(directory / s3_mirror.EVENTS)) as log:
        head = HeadSweep(run, prefix, controller, (identity, scheduler), log)
        controller.attach(log)
        await head.run(Mirror(directory, prefix))


class HeadSweep:
    """A sweep on its head node.

    Args:
        run: Its record.
        prefix: Its prefix.
        controller: Keeps the nodes.
        cluster: The head's certificates and the scheduler's address.
        log: Records its events.

    Raises:
        RunError: it is to prune trials, and Optuna is not in the image.
    """

    def __init__(
        self,
        run: RunRecord,
        prefix: S3Prefix,
        controller: FleetController,
        cluster: tuple[Identity, str],
        log: Recorder,
    ) -> None:
        assert run.sweep
        if run.sweep.prune and importlib.util.find_spec("optuna") is None:
            raise RunError("--prune: needs Optuna; name optuna in the image's more-requirements.txt, or leave it out")
        self._record, self._prefix, self._controller = run, prefix, controller
        self._cluster, self._log = cluster, log
        self._working: asyncio.Future[None] | None = None
        self._trial: HeadTrial | None = None
        settings = SweepSettings(
            start=self._started,
            events_of=self._events_of,
            parallel=1,
            watched=run.sweep.watched,
            better=run.sweep.better,
            prune=run.sweep.prune,
            budget_usd=None,  # the limits are those of all trials together
            cost_of=self._cost_of,
            report=lambda text: log("trial", text=text),
        )
        self._file = ResultsFile(RUNS / run.run / SWEEP_RESULTS)
        self._sweep = Sweep(from_plain(run.sweep.trials), self._file, settings)
        self._file.write(self._sweep.results)  # before the mirror's first copy: a restored sweep has both

    async def run(self, mirror: Mirror) -> None:
        """Run the sweep until it has ended or a limit is met; record how it ended, unless another head leads it."""
        working = self._working = asyncio.ensure_future(self._sweep.run())
        beside = [asyncio.ensure_future(task) for task in (mirror.keep(), self._watch_limits())]
        try:
            await asyncio.wait((working,))
        finally:
            working.cancel()
            self._controller.detach()
            for task in beside:
                task.cancel()
            await asyncio.gather(working, *beside, return_exceptions=True)
        self._log("run_ended", run_dir=str(RUNS / self._record.run), params_sha256=None, **outcome(self._sweep.results))
        await asyncio.to_thread(mirror.copy)
        if not working.cancelled():
            working.result()

    async def _watch_limits(self) -> None:
        def trains() -> bool:
            return self._trial is not None and self._trial.trains

        await watch_limits(self._record, self._controller, self._stop, self._log, trains)

    def _give_up(self, reason: str) -> None:
        """Stop the sweep; the trial that trains ends in order."""
        self._log("stopping", reason=reason)
        self._stop()

    def _stop(self) -> None:
        if self._working:
            self._working.cancel()

    @contextlib.asynccontextmanager
    async def _started(self, job: Job) -> AsyncIterator[TrialUnderWay]:
        """Train a trial beside this task; end it at once if it outlives the context."""
        trial = self._trial = HeadTrial(
            lambda hooks: train_trial(self._record, self._prefix.beside(job.name), job, *self._cluster, hooks),
            self._controller,
            self._give_up,
            self._record.job["nodes"]["idle_duration"],
        )
        try:
            yield trial
        finally:
            await trial.end()

    def _cost_of(self, record: Mapping[str, Any]) -> float:
        """Return what a trial has cost: what the machines have, less what the others have."""
        others = (result.usd for name, result in self._sweep.results.items() if name != record["run"])
        return max(0.0, self._controller.spent_usd - sum(others) - self._file.usd_of_others)

    def _events_of(self, job: Job) -> list[Record]:
        """Return the events of a trial's run so far; none if a run has its name that is no trial of this sweep."""
        prefix = self._prefix.beside(job.name)
        stored = prefix.get(RUN_RECORD_KEY)
        is_ours = stored is not None and RunRecord.from_json(stored.content).of_sweep == self._record.run
        return s3_mirror.events(prefix) if is_ours else []


def outcome(results: Mapping[str, SweepResult]) -> dict[str, Any]:
    """Return how a sweep ended, for its last record."""
    left = [name for name, result in results.items() if not result.ended]
    rounds = sum(result.values[-1][0] for result in results.values() if result.values)
    if not left:
        return {"status": "completed", "rounds": rounds}
    return {"status": "stopped", "rounds": rounds, "reason": f"{len(left)} of {len(results)} trials did not end"}
