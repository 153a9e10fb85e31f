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
    UNDONE,
    Cloud,
    account_of,
    as_seen_from_here,
    bill_of,
    in_sandbox,
    opened,
    prefix_of,
    read_events,
    run_prefix,
    sandbox,
)
from idletrain.errors import JobError, RunError
from idletrain.job import NO_IMAGE, Job
from idletrain.observe.sinks import Watch, watching

SANDBOX_IMAGE = "idletrain"  # the sandbox runs what is installed, whatever the name
SHOWN_TYPES = 5  # of those that are asked for, the best
SANDBOX_NOTICE = "5s"  # two minutes are AWS'; a rehearsal shows the same in less
_BOOTING = {
    Cloud.sandbox: "for its head to boot, which takes some seconds",
    Cloud.aws: "for its head to boot and to fetch its image, which takes a minute or two",
}
_INTERRUPTED = {
    Cloud.sandbox: "idletrain: stopped; nothing is left of the rehearsal",
    Cloud.aws: "{run} goes on by itself; end it with: idletrain down {called}",
}


@dataclass(frozen=True)
class SpotOptions:
    """What the command line asks of a run in a cloud."""

    cloud: Cloud
    resume: bool
    yes: bool
    detach: bool
    as_json: bool
    churn_seconds: float | None
    trace: Path | None
    speed: float
    watch: Watch
    allow_control: bool


def launch_spot(job: Job, asked: SpotOptions) -> None:
    """Run a job in a cloud.

    Raises:
        JobError: the job cannot run there; nothing was made.
        RunError: it cannot go on.
    """
    _refuse(job, asked)
    with contextlib.ExitStack() as stack:
        if not asked.as_json:
            typer.echo("idletrain: reading the model and the data", err=True)
        # In a process of its own while the cloud answers: both take seconds, and importing torch holds the interpreter.
        beside = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _ignore_interrupts)
        checking = beside.submit(_faults, job)
        beside.shutdown(wait=False)  # it ends with its one task
        if asked.cloud is Cloud.sandbox and not in_sandbox():
            opened(stack.enter_context(sandbox(_takings(asked))))
        region = None if asked.cloud is Cloud.sandbox else job.cloud.region  # which plays one region, whatever its name
        account = stack.enter_context(account_of(asked.cloud, region))
        _run(job, account, asked, checking)


def _plan(job: Job, account: Any, asked: SpotOptions, image: str, checking: Future[tuple[str, ...]]) -> Any:
    """What the run would be made of, shown and agreed to."""
    from rich.console import Console

    from idletrain.cli.offers import plan_lines, table
    from idletrain.cloud import launcher
    from idletrain.cloud.aws import doctor

    prefix = run_prefix(account, job)
    missing = [doctor.missing_bucket(account, prefix.bucket)]
    if asked.cloud is Cloud.aws:  # a rehearsal runs what is installed here
        missing.append(doctor.missing_image(account, image))
    if faults := [fault for fault in missing if fault]:
        raise JobError(faults)
    spent = launcher.spent_usd(account, prefix, job.name) if asked.resume else 0.0
    plan = launcher.make_plan(job, account, CACHE, spent)
    if wrong := checking.result():
        raise JobError(wrong)
    if not asked.as_json:
        Console().print(table(plan.quote.preferred.offers, plan.estimate, SHOWN_TYPES))
        for line in plan_lines(plan.quote, plan.estimate):
            typer.echo(line)
    if not asked.yes and asked.cloud is Cloud.aws:
        typer.confirm("Start it?", abort=True)
    return plan


def _run(job: Job, account: Any, asked: SpotOptions, checking: Future[tuple[str, ...]]) -> None:
    from rich.console import Console

    from idletrain.cloud import launcher
    from idletrain.observe import display
    from idletrain.observe.provenance import command_line
    from idletrain.observe.summary import Summary

    prefix = run_prefix(account, job)
    image = job.cloud.image or SANDBOX_IMAGE
    plan = _plan(job, account, asked, image, checking)
    made = launcher.start(
        plan,
        account,
        prefix,
        image=image,
        resume=asked.resume,
        command=command_line(sys.argv),
        allow_control=asked.allow_control,
    )
    called = prefix.url if prefix.url != prefix_of(account, job.name).url else made.run
    called += f" --region {account.region}" if job.cloud.region and asked.cloud is Cloud.aws else ""
    if asked.detach:
        typer.echo(f"{made.run} goes on by itself: idletrain logs {called} -f, idletrain down {called}")
        return
    shown = display.choose(asked.as_json, Console(), Summary(run=made.run))
    try:
        with watching(asked.watch, shown.summary, None) as tell, shown:
            followed = _follow(made, account, prefix, shown, tell, asked)
        if followed:
            launcher.outlive(account, made.run)
    except KeyboardInterrupt:
        followed = False
    if not followed:
        typer.echo(_INTERRUPTED[asked.cloud].format(run=made.run, called=called), err=True)
        raise KeyboardInterrupt
    _conclude(shown.summary, prefix, job, asked)


def _follow(made: Any, account: Any, prefix: Any, shown: Any, tell: Any, asked: SpotOptions) -> bool:
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
    sink({"kind": "waiting", "s": 0.0, "t": made.created, "reason": _BOOTING[asked.cloud]})
    try:
        launcher.follow(prefix, as_seen_from_here(asked.cloud, sink), account)
    except KeyboardInterrupt:
        if asked.cloud is Cloud.sandbox:
            raise
        return False
    if summary.status in UNDONE or summary.updated <= made.created:  # the head did not say that it was done
        summary.status = "taken down"
        tell({"kind": "run_ended", "rounds": summary.rounds, "t": summary.updated})
    return True


def _conclude(summary: Any, prefix: Any, job: Job, asked: SpotOptions) -> None:
    """Say how a run ended.

    Raises:
        RunError: not as it should.
    """
    from idletrain.observe import display
    from idletrain.observe.report import cost_line

    done = summary.status in ("completed", "reached")
    place = f"{prefix.url}model.safetensors" if summary.status != "taken down" else prefix.url
    summary.run_dir = f"{place} (gone with its cloud)" if asked.cloud is Cloud.sandbox else place
    if not asked.as_json:
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


def _refuse(job: Job, asked: SpotOptions) -> None:
    faults = asked.watch.faults()
    if asked.detach and asked.watch != Watch():
        faults.append("--on-round, --webhook, --log-to: are told by this command while it follows; leave out --detach")
    if asked.cloud is Cloud.aws:
        if job.cloud.image is None:
            faults.append(NO_IMAGE)
        if asked.churn_seconds or asked.trace:
            faults.append("--churn, --trace: take nodes in the sandbox alone; use `idletrain interrupt` on AWS")
    elif not in_sandbox() and any(path.startswith("s3://") for path in job.data.paths):
        faults.append("data: the sandbox begins with an empty bucket; name files of this machine to rehearse")
    elif asked.detach:
        faults.append("--detach: the sandbox ends with this command; leave it out")
    if asked.trace and not asked.trace.is_file():
        faults.append(f"--trace: {asked.trace} is not a file; name one with lines `milliseconds,add|remove,node`")
    if faults:
        raise JobError(faults)


def _takings(asked: SpotOptions) -> list[str]:
    """How the sandbox takes nodes back, as its process' arguments."""
    arguments = ["--notice", SANDBOX_NOTICE]
    if asked.churn_seconds:
        arguments += ["--churn", f"{asked.churn_seconds}s"]
    if asked.trace:
        arguments += ["--trace", str(asked.trace), "--speed", str(asked.speed)]
    return arguments
