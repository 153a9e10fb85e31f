"""`idletrain launch --spot`: show the plan, ask, start, follow; in a cloud or in its rehearsal."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from idletrain.cli.cloud import (
    CACHE,
    UNFINISHED_STATES,
    CloudName,
    account_of,
    as_seen_from_here,
    bill_of,
    in_sandbox,
    prefix_of,
    read_events,
    run_prefix,
    sandbox,
    sandbox_address,
)
from idletrain.errors import JobError, RunError
from idletrain.job import NO_IMAGE, Job
from idletrain.observe.sinks import WatchSettings, watching

SANDBOX_IMAGE = "idletrain"  # the sandbox runs what is installed, whatever the name
SHOWN_TYPES = 5  # of those that are asked for, the best
SANDBOX_NOTICE = "5s"  # two minutes are AWS'; a rehearsal shows the same in less
_BOOTING = {
    CloudName.sandbox: "for its head to boot, which takes some seconds",
    CloudName.aws: "for its head to boot and to fetch its image, which takes a minute or two",
}
_INTERRUPTED = {
    CloudName.sandbox: "idletrain: stopped; nothing is left of the rehearsal",
    CloudName.aws: "{run} goes on by itself; end it with: idletrain down {called}",
}


@dataclass(frozen=True)
class SpotOptions:
    """What the command line asks of a run in a cloud."""

    cloud: CloudName
    resume: bool
    yes: bool
    detach: bool
    as_json: bool
    churn_seconds: float | None
    trace: Path | None
    speed: float
    watch: WatchSettings
    allow_control: bool


def launch_spot(job: Job, options: SpotOptions) -> None:
    """Run a job in a cloud.

    Raises:
        JobError: the job cannot run there; nothing was made.
        RunError: it cannot go on.
    """
    _refuse(job, options)
    with contextlib.ExitStack() as stack:
        if not options.as_json:
            typer.echo("idletrain: reading the model and the data", err=True)
        # In a process of its own while the cloud answers: both take seconds, and importing torch holds the interpreter.
        beside = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _ignore_interrupts)
        checking = beside.submit(_faults, job)
        beside.shutdown(wait=False)  # it ends with its one task
        if options.cloud is CloudName.sandbox and not in_sandbox():
            sandbox_address(stack.enter_context(sandbox(_reclaim_policy(options))))
        region = (
            None if options.cloud is CloudName.sandbox else job.cloud.region
        )  # which plays one region, whatever its name
        account = stack.enter_context(account_of(options.cloud, region))
        _run(job, account, options, checking)


def _plan(job: Job, account: Any, options: SpotOptions, image: str, checking: Future[tuple[str, ...]]) -> Any:
    """What the run would be made of, shown and agreed to."""
    from rich.console import Console

    from idletrain.cli.offers import spot_plan_lines, table
    from idletrain.cloud import launcher
    from idletrain.cloud.aws import doctor

    prefix = run_prefix(account, job)
    missing = [doctor.missing_bucket(account, prefix.bucket)]
    if options.cloud is CloudName.aws:  # a rehearsal runs what is installed here
        missing.append(doctor.missing_image(account, image))
    if faults := [fault for fault in missing if fault]:
        raise JobError(faults)
    spent = launcher.spent_usd(account, prefix, job.name) if options.resume else 0.0
    plan = launcher.make_spot_plan(job, account, CACHE, spent)
    if wrong := checking.result():
        raise JobError(wrong)
    if not options.as_json:
        Console().print(table(plan.quote.preferred.offers, plan.estimate, SHOWN_TYPES))
        for line in spot_plan_lines(plan.quote, plan.estimate):
            typer.echo(line)
    if not options.yes and options.cloud is CloudName.aws:
        typer.confirm("Start it?", abort=True)
    return plan


def _run(job: Job, account: Any, options: SpotOptions, checking: Future[tuple[str, ...]]) -> None:
    from rich.console import Console

    from idletrain.cloud import launcher
    from idletrain.observe import display
    from idletrain.observe.provenance import command_line
    from idletrain.observe.summary import Summary

    prefix = run_prefix(account, job)
    image = job.cloud.image or SANDBOX_IMAGE
    plan = _plan(job, account, options, image, checking)
    made = launcher.start(
        plan,
        account,
        prefix,
        image=image,
        resume=options.resume,
        command=command_line(sys.argv),
        allow_control=options.allow_control,
    )
    called = prefix.url if prefix.url != prefix_of(account, job.name).url else made.run
    called += f" --region {account.region}" if job.cloud.region and options.cloud is CloudName.aws else ""
    if options.detach:
        typer.echo(f"{made.run} goes on by itself: idletrain logs {called} -f, idletrain down {called}")
        return
    shown = display.choose_display(options.as_json, Console(), Summary(run=made.run))
    try:
        with watching(options.watch, shown.summary, None) as tell, shown:
            followed = _follow(made, account, prefix, shown, tell, options)
        if followed:
            launcher.outlive(account, made.run)
    except KeyboardInterrupt:
        followed = False
    if not followed:
        typer.echo(_INTERRUPTED[options.cloud].format(run=made.run, called=called), err=True)
        raise KeyboardInterrupt
    _conclude(shown.summary, prefix, job, options)


def _follow(made: Any, account: Any, prefix: Any, shown: Any, tell: Any, options: SpotOptions) -> bool:
    """Show a sitting until the run has ended, and tell who else watches; False if the user looks away from a run that
    goes on without.
    """
    from idletrain.cloud import launcher
    from idletrain.observe import display

    summary = shown.summary

    def of_now(event: dict[str, Any]) -> None:
        if event.get("t", 0.0) >= made.created:
            shown(event)
            tell(event)

    sink = display.folding(summary, of_now)
    sink({"kind": "waiting", "s": 0.0, "t": made.created, "reason": _BOOTING[options.cloud]})
    try:
        launcher.follow(prefix, as_seen_from_here(options.cloud, sink), account)
    except KeyboardInterrupt:
        if options.cloud is CloudName.sandbox:
            raise
        return False
    if summary.status in UNFINISHED_STATES or summary.updated <= made.created:  # the head did not say that it was done
        summary.status = "taken down"
        tell({"kind": "run_ended", "rounds": summary.rounds, "t": summary.updated})
    return True


def _conclude(summary: Any, prefix: Any, job: Job, options: SpotOptions) -> None:
    """Say how a run ended.

    Raises:
        RunError: not as it should.
    """
    from idletrain.observe import display
    from idletrain.observe.report import cost_line

    done = summary.status in ("completed", "reached")
    place = f"{prefix.url}model.safetensors" if summary.status != "taken down" else prefix.url
    summary.run_dir = f"{place} (gone with its cloud)" if options.cloud is CloudName.sandbox else place
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle


def _faults(job: Job) -> tuple[str, ...]:
    """Read the model and the data as machines will: what is wrong with them costs nothing here."""
    sys.path.insert(0, "")
    from idletrain.nn.prepare import from_settings

    try:
        from_settings(job.model, job.data, job.training)
    except JobError as error:
        return error.faults
    return ()


def _refuse(job: Job, options: SpotOptions) -> None:
    faults = options.watch.faults()
    if options.detach and options.watch != WatchSettings():
        faults.append("--on-round, --webhook, --log-to: are told by this command while it follows; leave out --detach")
    if options.cloud is CloudName.aws:
        if job.cloud.image is None:
            faults.append(NO_IMAGE)
        if options.churn_seconds or options.trace:
            faults.append("--churn, --trace: take nodes in the sandbox alone; use `idletrain interrupt` on AWS")
    elif not in_sandbox() and any(path.startswith("s3://") for path in job.data.paths):
        faults.append("data: the sandbox begins with an empty bucket; name files of this machine to rehearse")
    elif options.detach:
        faults.append("--detach: the sandbox ends with this command; leave it out")
    if options.trace and not options.trace.is_file():
        faults.append(f"--trace: {options.trace} is not a file; name one with lines `milliseconds,add|remove,node`")
    if faults:
        raise JobError(faults)


def _reclaim_policy(options: SpotOptions) -> list[str]:
    """How the sandbox takes nodes back, as its process' arguments."""
    arguments = ["--notice", SANDBOX_NOTICE]
    if options.churn_seconds:
        arguments += ["--churn", f"{options.churn_seconds}s"]
    if options.trace:
        arguments += ["--trace", str(options.trace), "--speed", str(options.speed)]
    return arguments
