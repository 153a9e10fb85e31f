"""Decide whether a run can be resumed with a job: what must not change, because it decides the run's bits."""

from __future__ import annotations

from pydantic import BaseModel

from idletrain.errors import FinishedError, JobError, shortened
from idletrain.job import Job
from idletrain.phases import PhaseSettings

FIXED_SETTINGS = (
    "model",
    "data",
    "training.method",
    "training.mode",
    "training.subnets",
    "training.copies",
    "training.slack",
    "training.local_steps",
    "training.finish_whole",
    "training.batch_size",
    "training.micro_batch",
    "training.ghost_batches",
    "training.loss",
    "training.label_smoothing",
    "training.ema",
    "training.optimizer",
    "training.outer_optimizer",
    "training.buffers",
    "training.precision",
    "training.compile",
    "training.exchange.pull",
    "training.exchange.push",
    "training.seed",
    "memory.compile",
    "preemption.policy",
)


def check_resumption(job: Job, original: Job, status: str | None, rounds: int) -> None:
    """Refuse to resume a run with settings that must stay and have changed, or one that has reached its end.

    Args:
        job: The job to resume it with.
        original: The job that the run began with.
        status: How the run ended last time.
        rounds: How many rounds are done.

    Raises:
        FinishedError: It has reached its end, and the job does not ask for more.
        JobError: Settings have changed.
    """
    if end := _end(job, original, status, rounds):
        raise FinishedError(end)
    if faults := _changes(job, original):
        raise JobError(faults)


def _end(job: Job, original: Job, status: str | None, rounds: int) -> str | None:
    """Return why a run has nothing left to do."""
    # How many rounds epochs are, or the data are worth, is known once they are read; a copy of the job then has them.
    counted = "rounds" in job.training.model_fields_set
    if status == "completed" and job.training.rounds <= rounds and counted:
        return f"training.rounds: run {job.name} is complete after {rounds} rounds; ask for more to go on"
    if status == "reached" and job.stop == original.stop:
        return f"stop.accuracy: run {job.name} reached {job.stop.accuracy}; ask for more to go on"
    if status == "stopped-early" and job.stop == original.stop:
        reason = f"stopped early: no better {job.stop.watched} in {job.stop.patience} evaluations"
        return f"stop.patience: run {job.name} {reason}; raise it, or leave it out, to go on"
    return None


def _changes(job: Job, original: Job) -> list[str]:
    """Return which settings have changed that decide the run's bits."""
    counted = "rounds" in job.training.model_fields_set
    faults = []
    if _fixed_part(job.training.phases) != _fixed_part(original.training.phases):
        faults.append("training.phases: are not those that the run began with; only the last may have other rounds")
    follows = original.training.optimizer.ends or original.training.finish_whole  # lr, or when networks are whole
    by_rounds = ("training.rounds",) if follows and counted else ()
    by_share = ("training.epochs",) if original.training.finish_whole else ()
    by_memory = _of_micro_batches(job, original)
    for path in dict.fromkeys((*FIXED_SETTINGS, *by_rounds, *by_share, *by_memory)):
        old: object = original
        new: object = job
        for part in path.split("."):
            old, new = getattr(old, part), getattr(new, part)
        if old != new:
            for where, was, now in _differences(path, old, new):
                faults.append(f"{where}: {now} is not what the run began with, {was}; take that or another name")
    return faults


def _of_micro_batches(job: Job, original: Job) -> tuple[str, ...]:
    """Return the memory settings that micro-batches follow from."""
    size, budgets = original.training.micro_batch, (original.memory.budget, job.memory.budget)
    if size is None and any(budgets):
        modes = {original.memory.out_of_core, job.memory.out_of_core}
        return ("memory.budget", "memory.out_of_core") if "auto" in modes else ()
    return ("memory.budget",) if size == "auto" else ()


def _differences(path: str, old: object, new: object) -> list[tuple[str, str, str]]:
    """Return the settings within two values that differ, each with both of its values."""
    if isinstance(old, BaseModel) and isinstance(new, type(old)):
        names = type(old).model_fields
        return [d for name in names for d in _differences(f"{path}.{name}", getattr(old, name), getattr(new, name))]
    return [] if old == new else [(path, shortened(str(old)), shortened(str(new)))]


def _fixed_part(phases: tuple[PhaseSettings, ...]) -> tuple[PhaseSettings, ...]:
    """Return what a resumed run must not change of its phases: all but the rounds of the last."""
    return phases and (*phases[:-1], phases[-1].model_copy(update={"rounds": 1}))
