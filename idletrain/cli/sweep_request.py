"""A sweep as the command line asks for it, and what a cloud's machines for it are like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from idletrain.cloud.record import SweepOrder
    from idletrain.job import Job
    from idletrain.sweeps.grid import SweepTrial

SHARED = ("nodes", "cloud", "checkpoint", "workdir")  # settings of the machines, which all trials in a cloud share


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A sweep.

    Attributes:
        name: Its name.
        trials: What to train.
        watched: What tells a good trial: `loss`, `accuracy` or a metric's name.
        better: Which of two values of it is the better one.
        prune: Whether trials that others are far ahead of are stopped.
        budget_usd: What all of them together may cost, or None.
    """

    name: str
    trials: Sequence[SweepTrial]
    watched: str
    better: Literal["higher", "lower"]
    prune: bool = False
    budget_usd: float | None = None

    @property
    def names(self) -> list[str]:
        """The trials' names."""
        return [trial.job.name for trial in self.trials]

    @property
    def order(self) -> SweepOrder:
        """Its trials and settings, for its record in a cloud."""
        from idletrain.cloud.record import SweepOrder
        from idletrain.sweeps.grid import as_plain

        return SweepOrder(trials=as_plain(self.trials), watched=self.watched, better=self.better, prune=self.prune)

    def job(self, trials_left: int) -> Job:
        """Return the job by which a cloud's machines are chosen: that of the most subnets, with time for all trials."""
        job = max(
            (trial.job for trial in self.trials),
            key=lambda job: max(phase.subnets for phase in job.training.every_phase),
        )
        nodes = job.nodes
        changes: dict[str, Any] = {"max_duration": nodes.max_duration * max(1, trials_left)}
        changes |= {"budget_usd": self.budget_usd} if self.budget_usd is not None else {}
        return job.model_copy(update={"name": self.name, "nodes": nodes.model_copy(update=changes)})

    def to_check(self) -> list[Job]:
        """Return the trials' jobs whose model and data are to be read: one where all have the same."""
        differ = any(path.startswith(("model", "data")) for path in self.trials[0].values)
        return [trial.job for trial in (self.trials if differ else self.trials[:1])]

    def cloud_faults(self, parallel: int) -> list[str]:
        """Return what a cloud cannot do, where all trials share the machines of one fleet."""
        faults = [
            f"--set: {path} is of the machines, which all trials in a cloud share; set it in the job"
            for path in self.trials[0].values
            if path.partition(".")[0] in SHARED
        ]
        if parallel > 1:
            faults.append("--parallel: trials in a cloud share its machines and train in turn; leave it out")
        return faults
