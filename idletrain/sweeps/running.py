"""Run a sweep's trials, some side by side, by a function that its caller gives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from idletrain.errors import IdletrainError, JobError, shortened
from idletrain.job import Job
from idletrain.observe.records import DONE_STATUSES, Record
from idletrain.observe.summary import summary_of
from idletrain.sweeps.grid import SweepTrial, changed_paths, decisive_settings
from idletrain.sweeps.pruning import Halving, check_optuna
from idletrain.sweeps.trial_results import DIVERGED, PRUNED, ResultsFile, SweepResult

STOPPED = "stopped"
UNTRIED = ("waiting", "not started")  # states of trials without a run
LEAST_USD = 0.01  # with less left no trial begins
PLAIN_SCORES = ("accuracy", "loss")  # the record of each round has them, other metrics only the events and the last
PROGRESS_SECONDS = 5.0  # between two lines on a trial
LENGTHS = ("training.rounds", "training.epochs")  # a trial that has not ended goes on with others, as its launch does
LOOKS_APART = 10.0  # times as long as a look at a run's events takes, so that looks take a tenth of the time


class TrialUnderWay(Protocol):
    """A trial's run."""

    def records(self) -> AsyncIterator[dict[str, Any]]:
        """Yield its summary after each round and at its end, as `idletrain launch --json` prints it."""
        ...

    def interrupt(self) -> None:
        """Stop it so that it can be resumed."""
        ...

    async def wait(self) -> str:
        """Wait for its end; return why it failed, if it did."""
        ...


StartTrial = Callable[[Job], AbstractAsyncContextManager[TrialUnderWay]]
"""Runs a job, from where it was; what still runs ends with the context."""


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """How trials run.

    Attributes:
        start: Starts one.
        events_of: Returns the events of a trial's run so far; empty before its start.
        parallel: How many run at a time.
        watched: What tells a good trial: `loss`, `accuracy` or a metric's name.
        better: Which of two values of it is the better one.
        prune: Whether trials that others are far ahead of are stopped.
        budget_usd: What all of them together may cost, or None.
        cost_of: Returns what a run has cost, from its summary.
        report: Gets a line on what happens.
    """

    start: StartTrial
    events_of: Callable[[Job], list[Record]]
    parallel: int
    watched: str
    better: Literal["higher", "lower"]
    prune: bool
    budget_usd: float | None
    cost_of: Callable[[Mapping[str, Any]], float]
    report: Callable[[str], None]


class Sweep:
    """The trials of a sweep under way.

    Args:
        trials: What to run.
        file: Where their results are kept.
        settings: How they run.

    Attributes:
        results: What they have come to, by name.

    Raises:
        JobError: they are to be pruned, and Optuna is not installed; or a result is of another job.
        DamageError: the file does not hold results.
    """

    def __init__(self, trials: Sequence[SweepTrial], file: ResultsFile, settings: SweepSettings) -> None:
        self._trials, self._file, self._settings = trials, file, settings
        self.results = file.read([trial.job.name for trial in trials])
        refuse_changed(trials, self.results)
        if settings.prune:
            check_optuna()
        self._reserved: dict[str, float] = {}  # budgets of those that run
        self._look_after: dict[str, float] = {}  # when the events of those that run may be read again
        self._halving: Halving | None = None
        self._begin_halving()

    def _begin_halving(self) -> None:
        """Begin to prune, if trials are to be pruned, once the rounds of a whole trial are known."""
        rounds = max(self.results[trial.job.name].rounds or _named_rounds(trial.job) for trial in self._trials)
        if self._halving or not rounds or not self._settings.prune:
            return
        self._halving = Halving(rounds, self._settings.better)
        for name, result in self.results.items():
            for at, value in result.values:
                self._halving.report(name, at, value)
            if result.ended:
                self._halving.end(name, None if result.state == PRUNED else result.value)

    async def run(self) -> None:
        """Run all trials that have not ended; stop those that run if this is cancelled."""
        waiting = [trial for trial in self._trials if not self.results[trial.job.name].ended]
        waiting.sort(key=lambda trial: self.results[trial.job.name].state == "failed")  # those may fail again
        if done := len(self._trials) - len(waiting):
            self._settings.report(f"{done} of {len(self._trials)} trials have ended before")
        slots = asyncio.Semaphore(self._settings.parallel)

        async def in_turn(trial: SweepTrial) -> None:
            async with slots:
                await self._run(trial)

        try:
            async with asyncio.TaskGroup() as tasks:
                for trial in waiting:
                    tasks.create_task(in_turn(trial))
        except BaseExceptionGroup as group:  # such as a full disk's
            raise group.exceptions[0] from None

    async def _run(self, trial: SweepTrial) -> None:
        name, result = trial.job.name, self.results[trial.job.name]
        job = self._within_budget(trial.job)
        if job is None:
            result.state, result.reason = "not started", "the budget is used up"
            return
        self._settings.report(f"{name} begins: {trial.text}")
        is_new = result.state in UNTRIED or (result.state == "failed" and not result.began)
        result.state, result.reason, result.record = "running", "", {}
        result.settings, result.run_dir = decisive_settings(trial.job), str(trial.job.run_dir)
        result.values, result.rounds = [], _named_rounds(trial.job)
        self._file.write(self.results)
        why = "" if not is_new and await self._has_ended(trial) else await self._train(trial, job)
        if result.state == "running":
            status = result.record.get("status", "")
            result.state = status if status in (*DONE_STATUSES, DIVERGED, STOPPED) else "failed"
        if result.state == DIVERGED:
            result.reason = "its values are no numbers any more; a lower learning rate may help"
        if result.state in ("failed", *DONE_STATUSES):  # such as a network that could not be stored
            result.reason = why
        self._reserved.pop(name, None)
        if result.record:
            with contextlib.suppress(IdletrainError):  # records that cannot be read have no cost
                result.usd = self._settings.cost_of(result.record)
        if self._halving:
            self._halving.end(name, result.value if result.state in DONE_STATUSES else None)
        self._file.write(self.results)
        why = f": {result.reason}" if result.reason else ""
        self._settings.report(f"{name}: {result.state}{why}" + _value_text(self._settings.watched, result.value))

    def _within_budget(self, job: Job) -> Job | None:
        """Return the job with its part of the sweep's budget; None if nothing is left."""
        if self._settings.budget_usd is None:
            return job
        spent = sum(result.usd for result in self.results.values()) + sum(self._reserved.values())
        free = self._settings.parallel - len(self._reserved)
        part = min((self._settings.budget_usd - spent) / free, job.nodes.budget_usd or self._settings.budget_usd)
        if part < LEAST_USD:
            return None
        self._reserved[job.name] = part
        return job.model_copy(update={"nodes": job.nodes.model_copy(update={"budget_usd": part})})

    async def _has_ended(self, trial: SweepTrial) -> bool:
        """Take note of what the run of a trial came to in an earlier session; return whether it has ended."""
        events = await asyncio.to_thread(self._settings.events_of, trial.job)
        self._take_events(trial.job.name, events)
        summary = summary_of(events)
        if summary.status not in (*DONE_STATUSES, DIVERGED):
            return False
        self._take_record(trial.job.name, summary.as_record())
        return True

    async def _train(self, trial: SweepTrial, job: Job) -> str:
        """Train a trial to its end, or until it is pruned; return why it failed, if it did."""
        result = self.results[trial.job.name]
        try:
            async with self._settings.start(job) as run:
                try:
                    await self._follow(trial, run)
                    return await run.wait()
                except asyncio.CancelledError:
                    run.interrupt()
                    await run.wait()
                    raise
        except asyncio.CancelledError:
            result.state = PRUNED if result.state == PRUNED else STOPPED
            raise
        finally:
            self._file.write(self.results)

    async def _follow(self, trial: SweepTrial, run: TrialUnderWay) -> None:
        """Take note of a run's records, to its end; interrupt it once it is pruned."""
        name, result, shown = trial.job.name, self.results[trial.job.name], time.monotonic()
        async for record in run.records():
            is_behind = await self._look(trial.job) if self._may_look(name, record) else False
            is_behind |= self._take_record(name, record)
            if record.get("status") in DONE_STATUSES:
                result.state = "running"  # it ended by itself before the stop
            elif is_behind and result.state == "running":
                result.state = PRUNED
                run.interrupt()
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self._file.write(self.results)
                done = f"{record['rounds']} of {result.rounds}" if result.rounds else str(record["rounds"])
                self._settings.report(f"{name}: {done} rounds" + _value_text(self._settings.watched, result.value))

    def _may_look(self, name: str, record: Mapping[str, Any]) -> bool:
        """Return whether to read a run's events, as its record of a round leaves out what the sweep needs."""
        result = self.results[name]
        is_new = (record.get("evaluated_rounds") or 0) > (result.values[-1][0] if result.values else 0)
        leaves_out = not result.rounds or (is_new and self._settings.watched not in PLAIN_SCORES)
        return leaves_out and ("status" in record or time.monotonic() >= self._look_after.get(name, 0.0))

    async def _look(self, job: Job) -> bool:
        """Take note of what the events of a run that trains say; return whether it is to be stopped."""
        began_at = time.monotonic()
        events: list[Record] = []
        with contextlib.suppress(IdletrainError, OSError):  # the next look may succeed
            events = await asyncio.to_thread(self._settings.events_of, job)
        now = time.monotonic()
        self._look_after[job.name] = now + LOOKS_APART * (now - began_at)
        return self._take_events(job.name, events)

    def _take_events(self, name: str, events: Sequence[Record]) -> bool:
        """Take note of a run's events; return whether the run is to be stopped."""
        result, started = self.results[name], [event for event in events if event["kind"] == "run_started"]
        if started:
            result.began, result.rounds = True, result.rounds or started[-1]["rounds"]
            self._begin_halving()
        evaluated = [event for event in events if event["kind"] == "evaluated"]
        is_behind = [self._take(name, event["round"], event) for event in evaluated]  # each is taken
        return any(is_behind)

    def _take_record(self, name: str, record: dict[str, Any]) -> bool:
        """Take note of a run's record; return whether the run is to be stopped."""
        result = self.results[name]
        result.began = True
        if "status" in record:
            result.record = record
        return self._take(name, record.get("evaluated_rounds"), record)

    def _take(self, name: str, at: int | None, scores: Mapping[str, Any]) -> bool:
        """Take note of the scores after so many rounds; return whether the run is to be stopped."""
        values, watched = self.results[name].values, self._settings.watched
        value = (scores if watched in PLAIN_SCORES else scores.get("metrics", {})).get(watched)
        if value is None or at is None or (values and at <= values[-1][0]):
            return False
        values.append((at, value))
        return self._halving is not None and self._halving.report(name, at, value)


def refuse_changed(trials: Sequence[SweepTrial], results: Mapping[str, SweepResult]) -> None:
    """Refuse results of other settings than the trials have.

    Raises:
        JobError: a trial has such a result.
    """
    for trial in trials:
        result = results[trial.job.name]
        if not result.settings or result.state == "failed":  # its launch decides whether it goes on
            continue
        changed = changed_paths(trial.job, result.settings, () if result.ended else LENGTHS)
        if changed:
            how, which = "ended" if result.ended else "began", shortened(", ".join(changed))
            raise JobError(
                f"name: trial {trial.job.name} {how} with other settings ({which}); give the sweep another --name"
            )


def _named_rounds(job: Job) -> int:
    """Return the rounds that a job names; 0 where the run counts them by its data."""
    return job.training.rounds if "rounds" in job.training.model_fields_set else 0


def _value_text(watched: str, value: float | None) -> str:
    return "" if value is None else f", {watched} {value:.4f}"
