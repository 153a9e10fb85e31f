"""Run a sweep in a cloud: all trials train in turn on the machines of one run, which their head keeps."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from idletrain.cli import kept_rehearsal, spot
from idletrain.cli.arguments import RUNS
from idletrain.cli.cloud_records import named_prefix, run_prefix, stored_results
from idletrain.cli.job_check import JobCheck, checking
from idletrain.cli.places import Place, note_launch
from idletrain.cli.printing import tell
from idletrain.errors import JobError, reading
from idletrain.held_interrupts import notice_if_slow
from idletrain.providers.protocol import CloudProvider

if TYPE_CHECKING:
    from idletrain.cloud.record import RunRecord, SweepOrder
    from idletrain.job import Job
    from idletrain.observe.records import Record
    from idletrain.storage import S3Prefix
    from idletrain.sweeps.grid import SweepTrial
    from idletrain.sweeps.trial_results import SweepResult

SHARED = ("nodes", "cloud", "checkpoint", "workdir")  # settings of the machines, which all trials share
SHOWN = ("paused", "resumed", "stopping", "trial", "waiting", "worker_refused", "worker_sick")


@dataclass(frozen=True, kw_only=True)
class CloudSweep:
    """A sweep for a cloud.

    Attributes:
        name: Its name.
        trials: What to train.
        budget_usd: What all of them together may cost; None in a cloud that costs nothing.
        watched: What tells a good trial: `loss`, `accuracy` or a metric's name.
        better: Which of two values of it is the better one.
        prune: Whether trials that others are far ahead of are stopped.
    """

    name: str
    trials: Sequence[SweepTrial]
    budget_usd: float | None
    watched: str
    better: Literal["higher", "lower"]
    prune: bool

    @property
    def job(self) -> Job:
        """The job by which the machines are chosen: that of the most subnets, and time for all trials in turn."""
        job = max(
            (trial.job for trial in self.trials),
            key=lambda job: max(phase.subnets for phase in job.training.every_phase),
        )
        nodes = job.nodes
        changes: dict[str, Any] = {"max_duration": nodes.max_duration * len(self.trials)}
        changes |= {"budget_usd": self.budget_usd} if self.budget_usd is not None else {}
        return job.model_copy(update={"name": self.name, "nodes": nodes.model_copy(update=changes)})

    @property
    def order(self) -> SweepOrder:
        """What its record says of it."""
        from idletrain.cloud.record import SweepOrder
        from idletrain.sweeps.grid import as_plain

        return SweepOrder(trials=as_plain(self.trials), watched=self.watched, better=self.better, prune=self.prune)

    def faults(self, parallel: int) -> list[str]:
        """Return what is wrong with it."""
        paths = dict.fromkeys(path for trial in self.trials for path in trial.values)
        faults = [
            f"--set: {path} is of the machines, which all trials in a cloud share; set it in the job"
            for path in paths
            if path.partition(".")[0] in SHARED
        ]
        if parallel > 1:
            faults.append("--parallel: trials in a cloud share its machines and train in turn; leave it out")
        return faults


def sweep_in_cloud(sweep: CloudSweep, provider: CloudProvider, cloud: str) -> dict[str, SweepResult]:
    """Run a sweep's trials, or follow those that run already; return what they have come to.

    Raises:
        JobError: it cannot run there; nothing was made.
        RunError: it cannot continue.
    """
    from idletrain.cloud.workdir import unsent

    job = sweep.job
    if faults := [*provider.faults(job), *unsent(job)]:
        raise JobError(faults)
    spot.end_in_order()
    with contextlib.ExitStack() as stack:
        tell("reading the model and the data")
        check = stack.enter_context(checking(sweep.trials[0].job))
        stack.enter_context(provider.opened())
        account = stack.enter_context(provider.account(provider.launch_region(job)))
        prefix = run_prefix(account, job)
        run = _under_way(account, prefix, sweep) or _begun(sweep, provider, account, check)
        _note(sweep, provider, account, cloud)
        try:
            _follow(run, prefix, account)
        except KeyboardInterrupt:
            if provider.outlives_command:
                tell(f"{run.run} goes on by itself: the same command follows it, idletrain down {run.run} ends it")
            else:
                tell("stopped; the same command goes on where it was")
            raise
        finally:
            results = _taken_home(sweep, provider, account, prefix)
        return results


def show_sweep(prefix: S3Prefix, sweep: SweepOrder, as_json: bool) -> None:
    """Print what the trials of a sweep have come to so far."""
    from idletrain.cli.sweep_table import print_results
    from idletrain.sweeps.grid import from_plain

    trials = from_plain(sweep.trials)
    print_results(trials, stored_results(prefix, trials), sweep.watched, sweep.better, as_json=as_json)


def _under_way(account: Any, prefix: S3Prefix, sweep: CloudSweep) -> RunRecord | None:
    """Return the record of the sweep if it runs already.

    Raises:
        JobError: a run has its name, or it runs with other trials.
    """
    from idletrain.cloud import record
    from idletrain.cloud.follow import head_is_lost

    if not prefix.names(record.RUN_RECORD_KEY):
        return None
    run = record.read(prefix)
    if run.sweep is None:
        raise JobError(f"name: a run {run.run}, which is no sweep, is in {prefix.url}; name the sweep with --name")
    if run.state == "ended" or head_is_lost(account, run):
        return None
    if run.sweep.trials != sweep.order.trials:
        raise JobError(
            f"name: sweep {run.run} runs with other trials; wait for its end, end it with `idletrain down {run.run}`, "
            "or name this one with --name"
        )
    tell(f"sweep {run.run} runs already")
    return run


def _begun(sweep: CloudSweep, provider: CloudProvider, account: Any, check: JobCheck) -> RunRecord:
    """Start the machines; a sweep that was stopped goes on with the results that it has."""
    from idletrain.cloud import launcher, record
    from idletrain.observe.provenance import command_line
    from idletrain.rounds.durable.s3_mirror import SWEEP_RESULTS

    job = sweep.job
    prefix = run_prefix(account, job)
    again = bool(prefix.names(record.RUN_RECORD_KEY))
    plan = spot.plan_machines(job, provider, account, check, resumed=again)
    if not again and (home := _file(sweep.name)).exists():  # of a rehearsal, whose bucket is gone
        with reading(home, "delete it to begin the sweep again"):
            prefix.put(SWEEP_RESULTS, home.read_bytes())
    run = launcher.start(
        replace(plan, sweep=sweep.order),
        account,
        prefix,
        image=provider.pinned_image(account, provider.image(job)),
        resume=again,
        command=command_line(sys.argv),
        report=tell,
    )
    tell(f"waiting {provider.boot_reason}")
    return run


def _note(sweep: CloudSweep, provider: CloudProvider, account: Any, cloud: str) -> None:
    """Note where the sweep and its trials are, so that their names are enough for other commands."""
    process = None if provider.outlives_command else os.getpid()
    for job in (sweep.job, *(trial.job for trial in sweep.trials)):
        prefix = run_prefix(account, job).url
        own = prefix if prefix != named_prefix(account, job.name).url else job.name
        note_launch(Place(own, cloud, None if process else account.region, process))


def _follow(run: RunRecord, prefix: S3Prefix, account: Any) -> None:
    """Print what happens until the sweep and its machines have ended."""
    from idletrain.cloud.follow import follow, leftover_after
    from idletrain.observe.display import describe_event

    ending = contextlib.ExitStack()

    def show(event: Record) -> None:
        if event["kind"] in SHOWN and event.get("t", 0.0) >= run.created:  # earlier ones are from before a resumption
            tell(describe_event(event) or "")
        if event["kind"] == "run_ended":
            ending.enter_context(notice_if_slow("ending the sweep's machines"))

    with ending:
        ended = follow(prefix, show, account)
        left = leftover_after(account, ended)
    if left:
        tell(left)


def _taken_home(sweep: CloudSweep, provider: CloudProvider, account: Any, prefix: S3Prefix) -> dict[str, SweepResult]:
    """Keep the results on this machine, and of a rehearsal the ended runs as well, whose bucket ends with it."""
    from idletrain.sweeps.trial_results import ResultsFile

    results = stored_results(prefix, sweep.trials)
    ResultsFile(_file(sweep.name)).write(results)
    for trial in () if provider.outlives_command else sweep.trials:
        directory = RUNS / trial.job.name
        if results[trial.job.name].ended and not directory.exists():
            kept_rehearsal.keep(account, run_prefix(account, trial.job), directory)
    return results


def _file(name: str) -> Path:
    return RUNS / f"{name}.sweep.json"
