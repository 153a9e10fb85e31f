"""Launch a run in a cloud: show the plan, ask, start the machines, follow the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from idletrain import storage
from idletrain.cli import kept_rehearsal
from idletrain.cli.cloud_records import (
    UNFINISHED_STATES,
    as_seen_from_here,
    bill_of,
    named_prefix,
    read_events,
    run_prefix,
)
from idletrain.cli.job_check import JobCheck, checking
from idletrain.cli.places import Place, note_launch
from idletrain.cli.printing import show, tell
from idletrain.errors import DIVERGED, JobError, RunError
from idletrain.held_interrupts import notice_if_slow
from idletrain.observe.records import Sink
from idletrain.providers.protocol import CloudProvider

if TYPE_CHECKING:
    from idletrain.cloud.record import RunRecord
    from idletrain.job import Job
    from idletrain.observe.sinks import WatchSettings


@dataclass(frozen=True)
class SpotOptions:
    """Settings of the command line for a run in a cloud, beside those of its provider.

    Attributes:
        job_file: The job's file.
        cloud: The cloud's name.
        resume: Continue the run of that name.
        yes: Start machines that cost money without asking.
        detach: Return once the run has started.
        as_json: Print JSON.
        watch: Hooks and trackers that get the events while this command follows the run.
        allow_control: True if the dashboard's page may drain and kill workers.
    """

    job_file: Path
    cloud: str
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
    end_in_order()
    with contextlib.ExitStack() as stack:
        if not options.as_json:
            tell("reading the model and the data")
        check = stack.enter_context(checking(job))
        stack.enter_context(provider.opened())
        account = stack.enter_context(provider.account(provider.launch_region(job)))
        _run(job, provider, account, options, check)


def end_in_order() -> None:
    """Let a SIGTERM, and the end of the terminal unless nohup ignores it, do what Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def plan_machines(job: Job, provider: CloudProvider, account: Any, check: JobCheck, *, resumed: bool) -> Any:
    """Plan a run's machines.

    Args:
        job: What to run.
        provider: Where.
        account: The account that pays.
        check: The check of the job's model and data.
        resumed: Whether the run has cost something before.

    Raises:
        JobError: the account lacks something, no machine fits, or the job is wrong.
    """
    from idletrain.cloud import launcher

    prefix = run_prefix(account, job)
    missing = (provider.bucket_fault(account, prefix.bucket), provider.image_fault(account, provider.image(job)))
    if account_faults := [fault for fault in missing if fault]:
        raise JobError(account_faults)
    spent = launcher.spent_usd(account, prefix, job.name) if resumed else 0.0
    plan = launcher.make_spot_plan(job, account, storage.cache_folder(), spent)
    if faults := check.faults():
        raise JobError(faults)
    return plan


def _confirm(plan: Any, provider: CloudProvider, options: SpotOptions) -> None:
    """Show a plan, and ask for confirmation if it costs money."""
    from idletrain.cli.offers import show_quote

    if not options.as_json:
        show_quote(plan.quote, plan.estimate)
    if not options.yes and provider.costs_money:
        typer.confirm("Start it?", abort=True)


def _run(job: Job, provider: CloudProvider, account: Any, options: SpotOptions, check: JobCheck) -> None:
    """Start the run and follow it to its end, unless the options say to detach."""
    from rich.console import Console

    from idletrain.cloud import launcher
    from idletrain.cloud.follow import leftover_after
    from idletrain.observe import display
    from idletrain.observe.provenance import command_line
    from idletrain.observe.summary import Summary

    prefix = run_prefix(account, job)
    plan = plan_machines(job, provider, account, check, resumed=options.resume)
    _confirm(plan, provider, options)
    run = launcher.start(
        plan,
        account,
        prefix,
        image=provider.pinned_image(account, provider.image(job)),
        resume=options.resume,
        command=command_line(sys.argv),
        allow_control=options.allow_control,
        report=tell,
    )
    own = prefix.url if prefix.url != named_prefix(account, job.name).url else run.run
    process = None if provider.outlives_command else os.getpid()
    note_launch(Place(own, options.cloud, None if process else account.region, process))
    address = own + (f" --region {account.region}" if provider.launch_region(job) else "")
    if options.detach:
        typer.echo(f"{run.run} goes on by itself: idletrain logs {address} -f, idletrain down {address}")
        return
    kept = kept_rehearsal.free_directory(job.name) if process else None
    if kept and kept.name != job.name:
        tell(f"runs/ has a run {job.name}; this one will be {kept}")
    shown = display.choose_display(options.as_json, Console(), Summary(run=run.run))
    try:
        from idletrain.observe.sinks import watching

        with watching(options.watch, shown.summary, None) as watcher, shown:
            ended = _follow(run, provider, account, prefix, str(kept or prefix.url), shown, watcher)
        if ended:
            leftover = leftover_after(account, ended)
    except KeyboardInterrupt:
        ended = None
    finally:
        is_kept = kept is not None and kept_rehearsal.keep(account, prefix, kept)
    here = kept if is_kept else None
    further = kept_rehearsal.further(job, options.job_file, here) if here else ""
    if ended is None:
        typer.echo(provider.interrupted_text(run.run, str(here or "") if kept else address) + further, err=True)
        raise KeyboardInterrupt
    if leftover:
        tell(leftover)
    _conclude(shown.summary, prefix, job, here, options, _next_step(kept, here, further))


def _next_step(kept: Path | None, here: Path | None, further: str) -> str:
    """Return what the user can do with a run that was not done: in a cloud, or of a rehearsal, which may be kept."""
    if here:
        return f"what it has trained is in {here}{further}"
    return "nothing of it is left" if kept else "go on with --resume"


def _follow(
    run: Any, provider: CloudProvider, account: Any, prefix: Any, run_dir: str, shown: Any, watcher: Sink
) -> RunRecord | None:
    """Show a run's events and pass them to the watchers until it has ended; return its record.

    Returns:
        None if the user interrupts a run that goes on without this command.
    """
    from idletrain.cloud.follow import earlier_events, follow
    from idletrain.observe import display

    summary, ending, is_over = shown.summary, contextlib.ExitStack(), False

    def notice_end(event: dict[str, Any]) -> None:
        nonlocal is_over
        if event["kind"] == "run_ended":
            is_over = True
            ending.enter_context(notice_if_slow("ending the run's machines"))

    try:
        for event in earlier_events(prefix, run):
            as_seen_from_here(provider, account, run_dir, summary.add)(event)
        sink = display.folding(summary, shown, watcher, notice_end)
        sink({"kind": "waiting", "s": 0.0, "t": run.created, "reason": provider.boot_reason})
        with ending:
            ended = follow(prefix, as_seen_from_here(provider, account, run_dir, sink), account)
    except KeyboardInterrupt:
        if not provider.outlives_command:
            raise
        return None
    if not is_over or summary.status in UNFINISHED_STATES:  # the head recorded no end
        summary.status = "taken down"
        watcher({"kind": "run_ended", "rounds": summary.rounds, "t": summary.updated})
    return ended


def _conclude(summary: Any, prefix: Any, job: Job, kept: Path | None, options: SpotOptions, next_step: str) -> None:
    """Print how a run ended; `kept` is the directory of a rehearsal, and `next_step` what to do if it is not done.

    Raises:
        RunError: it did not complete.
    """
    from idletrain.observe import display
    from idletrain.observe.records import DONE_STATUSES
    from idletrain.observe.report import cost_line

    done = summary.status in DONE_STATUSES
    folder = f"{kept}/" if kept else prefix.url
    summary.run_dir = f"{folder}model.safetensors" if summary.status != "taken down" else folder
    if not options.as_json:
        for line in display.final_lines(summary, f"{summary.status}: {kept.name if kept else job.name}"):
            show(line)
        typer.echo(f"  {cost_line(bill_of(read_events(prefix), time.time()))}")
    if summary.status == "diverged":
        raise RunError(f"run {job.name}: {DIVERGED}")
    if not done:
        why = f" ({summary.note})" if summary.note else ""
        raise RunError(f"run {job.name} ended before it was done: {summary.status}{why}; {next_step}")


def _refuse(job: Job, provider: CloudProvider, options: SpotOptions) -> None:
    faults = options.watch.faults()
    from idletrain.cloud.workdir import unsent
    from idletrain.observe.sinks import WatchSettings

    if options.detach and options.watch != WatchSettings():
        faults.append(
            "--on-round, --webhook, --log-to: work only while this command follows the run; leave out --detach"
        )
    faults += provider.faults(job)
    faults += unsent(job)
    if faults:
        raise JobError(faults)
