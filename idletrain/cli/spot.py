"""Launch a run in a cloud: show the plan, ask, start the machines, follow the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import typer

from idletrain.cli.cloud import (
    CACHE,
    UNFINISHED_STATES,
    as_seen_from_here,
    bill_of,
    prefix_of,
    read_events,
    run_prefix,
)
from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.observe.records import Sink
from idletrain.observe.sinks import WatchSettings, watching
from idletrain.providers.protocol import CloudProvider

SHOWN_TYPES = 5  # the best of those that may be requested


@dataclass(frozen=True)
class SpotOptions:
    """Settings of the command line for a run in a cloud, beside those of its provider.

    Attributes:
        resume: Continue the run of that name.
        yes: Start machines that cost money without asking.
        detach: Return once the run has started.
        as_json: Print JSON.
        watch: Hooks and trackers that get the events while this command follows the run.
        allow_control: True if the dashboard's page may drain and kill workers.
    """

    resume: bool
    yes: bool
    detach: bool
    as_json: bool
    watch: WatchSettings
    allow_control: bool


def launch_spot(job: Job, provider: CloudProvider, options: SpotOptions) -> None:
    """Run a job in a cloud.

    Raises:
        JobError: the job cannot run there; nothing was made.
        RunError: it cannot continue.
    """
    _refuse(job, provider, options)
    with contextlib.ExitStack() as stack:
        if not options.as_json:
            typer.echo("idletrain: reading the model and the data", err=True)
        # In a process of its own while the cloud answers: both take seconds, and importing torch holds the interpreter.
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _ignore_interrupts)
        job_faults = pool.submit(_faults, job)
        pool.shutdown(wait=False)  # it ends with its one task
        stack.enter_context(provider.opened())
        account = stack.enter_context(provider.account(provider.launch_region(job)))
        _run(job, provider, account, options, job_faults)


def _plan(
    job: Job, provider: CloudProvider, account: Any, options: SpotOptions, job_faults: Future[tuple[str, ...]]
) -> Any:
    """Plan the run's machines, show the plan, and ask for confirmation if they cost money."""
    from rich.console import Console

    from idletrain.cli.offers import spot_plan_lines, table
    from idletrain.cloud import launcher
    from idletrain.cloud.aws import doctor

    prefix = run_prefix(account, job)
    missing = (doctor.missing_bucket(account, prefix.bucket), provider.image_fault(account, provider.image(job)))
    if account_faults := [fault for fault in missing if fault]:
        raise JobError(account_faults)
    spent = launcher.spent_usd(account, prefix, job.name) if options.resume else 0.0
    plan = launcher.make_spot_plan(job, account, CACHE, spent)
    if faults := job_faults.result():
        raise JobError(faults)
    if not options.as_json:
        Console().print(table(plan.quote.preferred.offers, plan.estimate, SHOWN_TYPES))
        for line in spot_plan_lines(plan.quote, plan.estimate):
            typer.echo(line)
    if not options.yes and provider.costs_money:
        typer.confirm("Start it?", abort=True)
    return plan


def _run(
    job: Job, provider: CloudProvider, account: Any, options: SpotOptions, job_faults: Future[tuple[str, ...]]
) -> None:
    """Start the run and follow it to its end, unless the options say to detach."""
    from rich.console import Console

    from idletrain.cloud import launcher
    from idletrain.cloud.follow import wait_for_head_end
    from idletrain.observe import display
    from idletrain.observe.provenance import command_line
    from idletrain.observe.summary import Summary

    prefix = run_prefix(account, job)
    plan = _plan(job, provider, account, options, job_faults)
    run = launcher.start(
        plan,
        account,
        prefix,
        image=provider.image(job),
        resume=options.resume,
        command=command_line(sys.argv),
        allow_control=options.allow_control,
    )
    address = prefix.url if prefix.url != prefix_of(account, job.name).url else run.run
    address += f" --region {account.region}" if provider.launch_region(job) else ""
    if options.detach:
        typer.echo(f"{run.run} goes on by itself: idletrain logs {address} -f, idletrain down {address}")
        return
    shown = display.choose_display(options.as_json, Console(), Summary(run=run.run))
    try:
        with watching(options.watch, shown.summary, None) as watcher, shown:
            ended = _follow(run, provider, account, prefix, shown, watcher)
        if ended:
            wait_for_head_end(account, run.run)
    except KeyboardInterrupt:
        ended = False
    if not ended:
        typer.echo(provider.interrupted_text(run.run, address), err=True)
        raise KeyboardInterrupt
    _conclude(shown.summary, prefix, job, provider, options)


def _follow(run: Any, provider: CloudProvider, account: Any, prefix: Any, shown: Any, watcher: Sink) -> bool:
    """Show a run's events and pass them to the watchers until it has ended.

    Returns:
        False if the user interrupts a run that goes on without this command.
    """
    from idletrain.cloud.follow import follow
    from idletrain.observe import display

    summary = shown.summary

    def show_new(event: dict[str, Any]) -> None:
        if event.get("t", 0.0) >= run.created:  # earlier ones are from before a resumption
            shown(event)
            watcher(event)

    sink = display.folding(summary, show_new)
    sink({"kind": "waiting", "s": 0.0, "t": run.created, "reason": provider.boot_reason})
    try:
        follow(prefix, as_seen_from_here(provider, sink), account)
    except KeyboardInterrupt:
        if not provider.outlives_command:
            raise
        return False
    if summary.status in UNFINISHED_STATES or summary.updated <= run.created:  # the head recorded no end
        summary.status = "taken down"
        watcher({"kind": "run_ended", "rounds": summary.rounds, "t": summary.updated})
    return True


def _conclude(summary: Any, prefix: Any, job: Job, provider: CloudProvider, options: SpotOptions) -> None:
    """Print how a run ended.

    Raises:
        RunError: it did not complete.
    """
    from idletrain.observe import display
    from idletrain.observe.report import cost_line

    done = summary.status in ("completed", "reached")
    result = f"{prefix.url}model.safetensors" if summary.status != "taken down" else prefix.url
    summary.run_dir = result if provider.outlives_command else f"{result} (gone with its cloud)"
    if not options.as_json:
        for line in display.final_lines(summary, f"{summary.status}: {job.name}"):
            typer.echo(line)
        typer.echo(f"  {cost_line(bill_of(read_events(prefix)))}")
    if summary.status == "diverged":
        raise RunError(f"run {job.name} diverges (NaN in three attempts); lower training.optimizer.lr")
    if not done:
        why = f" ({summary.note})" if summary.note else ""
        raise RunError(f"run {job.name} was {summary.status} before it was done{why}; go on with --resume")


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C


def _faults(job: Job) -> tuple[str, ...]:
    """Read the model and the data as the machines will, and return their faults before anything costs money."""
    sys.path.insert(0, "")
    from idletrain.nn.prepare import from_settings

    try:
        from_settings(job.model, job.data, job.training)
    except JobError as error:
        return error.faults
    return ()


def _refuse(job: Job, provider: CloudProvider, options: SpotOptions) -> None:
    faults = options.watch.faults()
    if options.detach and options.watch != WatchSettings():
        faults.append(
            "--on-round, --webhook, --log-to: work only while this command follows the run; leave out --detach"
        )
    faults += provider.faults(job)
    if faults:
        raise JobError(faults)
