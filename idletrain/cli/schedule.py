"""Manage schedules: `idletrain schedule`. All arguments are checked before anything is written."""

from __future__ import annotations

import enum
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol
from zoneinfo import ZoneInfo

import typer

from idletrain.cli.printing import tell
from idletrain.errors import DamageError, IdletrainError, JobError, reading
from idletrain.schedules.cron import LocalTrigger

if TYPE_CHECKING:  # what a command needs is imported by it: `idletrain --help` stays quick
    from idletrain.job import Job
    from idletrain.providers.protocol import CloudSchedules
    from idletrain.schedules.cron import Execution, Schedule
    from idletrain.schedules.store import ScheduleStore

LAST_SHOWN = 3
MINUTES_FROM = 120.0  # seconds: longer durations are printed in minutes
PROGRAM = (sys.executable, "-m", "idletrain")
app = typer.Typer(no_args_is_help=True, help="Run jobs repeatedly, at set times.")


class IfRunning(enum.StrEnum):
    """Rule for a run that is due while the one before still trains."""

    skip = "skip"
    queue = "queue"


class Trigger(Protocol):
    """A program on this machine that runs a command at given minutes of every hour."""

    def fault(self) -> str | None: ...
    def install(self, name: str, minutes: Sequence[int], command: Sequence[str]) -> None: ...
    def remove(self, name: str) -> None: ...


ScheduleName = Annotated[str, typer.Argument(help="The schedule's name.", show_default=False)]
Directory = Annotated[
    Path | None, typer.Option(help="The directory of the schedules.", show_default="~/.config/idletrain/schedules")
]


@app.command()
def add(
    name: ScheduleName,
    job: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    cron: Annotated[str, typer.Option(help="minute hour day-of-month month day-of-week.", show_default=False)],
    tz: Annotated[str | None, typer.Option(help="The time zone (Europe/Paris); the machine's otherwise.")] = None,
    cloud: Annotated[
        str | None, typer.Option(help="The provider of nodes (local, sandbox, aws, ...); local, or aws with --on aws.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="What starts the runs: crontab, systemd, loop, or a cloud (aws); crontab if there is one.",
            show_default=False,
        ),
    ] = None,
    if_running: Annotated[IfRunning, typer.Option(help="What to do if the run before still trains.")] = IfRunning.skip,
    varied: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A setting and its values: train with each, as `idletrain sweep` does; repeat for more.",
            metavar="PATH=A,B",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="USD that the runs of --set may cost each time.", metavar="5usd", show_default=False),
    ] = None,
    directory: Directory = None,
) -> None:
    """Run a job at set times, such as --cron "0 2 * * *" --tz Europe/Paris for every night at two."""
    from idletrain.schedules import cron as times
    from idletrain.schedules.execute import machine_zone, utc_now

    store = _store(directory)
    faults: list[str] = []
    trigger = on or _default_trigger(faults)
    schedule = times.Schedule(
        name=name,
        cron=cron,
        tz=machine_zone(os.environ.get("TZ", "")) if tz is None else tz,
        job=str(job.absolute()),
        directory=str(Path.cwd()),
        cloud=cloud or ("local" if trigger in set(LocalTrigger) else trigger),
        on=trigger,
        if_running=if_running.value,
        created=utc_now(),
        varied=tuple(varied or ()),
        budget=budget or "",
    )
    if budget and not varied:
        faults.append("--budget: is of the runs of --set; write nodes.budget_usd into the job")
    settings = _checked(schedule, store, faults)
    _add(schedule, settings, store)
    following = next(times.times(cron, schedule.tz, schedule.created))
    typer.echo(f"{name}: next on {_local(following, schedule)}, by {trigger}")
    if trigger == LocalTrigger.loop:
        typer.echo(f"keep `idletrain schedule run{_option(store)}` running: it starts what is due")
    if trigger == LocalTrigger.systemd:
        typer.echo("it runs while you are logged in; for always: loginctl enable-linger")


@app.command(name="list")
def list_(directory: Directory = None) -> None:
    """Show the schedules, when each is next due, and how its last runs ended."""
    store = _store(directory)
    for name in store.names():
        try:
            _show(store.get(name), store)
        except DamageError as error:  # one that cannot be read must not hide the other schedules
            typer.echo(f"{name}: damaged: {error}")
    if not store.names():
        typer.echo("there are no schedules; `idletrain schedule add` makes one")


def _show(schedule: Schedule, store: ScheduleStore) -> None:
    """Print a schedule, when it is next due, and how its last runs ended."""
    from idletrain.schedules.cron import times
    from idletrain.schedules.execute import utc_now

    try:
        last = [_execution_text(execution, schedule, is_running) for execution, is_running in _last(schedule, store)]
    except IdletrainError as error:  # an account that cannot be reached must not hide the other schedules
        last = [f"unknown: {error}"]
    following = next(times(schedule.cron, schedule.tz, utc_now()))
    typer.echo(f"{schedule.name}: {schedule.cron} {schedule.tz}, {schedule.cloud} nodes, started by {schedule.on}")
    typer.echo(f"  job   {' '.join((schedule.job, *schedule.varied))}")
    typer.echo(f"  next  {_local(following, schedule)}")
    for label, line in zip_longest(("last",), reversed(last or ["never"]), fillvalue=""):
        typer.echo(f"  {label:<5} {line}")


@app.command()
def remove(name: ScheduleName, directory: Directory = None) -> None:
    """Remove a schedule and its trigger; a run that trains now continues."""
    store = _store(directory)
    try:
        schedule = store.get(name)
    except DamageError:
        _uninstall_damaged(name, store)
    else:
        _uninstall(schedule, store)
    store.remove(name)
    typer.echo(f"{name}: removed")


@app.command()
def run(
    name: Annotated[
        str | None, typer.Argument(help="A schedule to run now; all schedules when they are due otherwise.")
    ] = None,
    if_due: Annotated[
        bool, typer.Option("--if-due", help="Run only if a scheduled time has come or was missed.")
    ] = False,
    directory: Directory = None,
) -> None:
    """Run one schedule now; or, without a name, wait and run whatever is due."""
    from idletrain.cluster.shutdown import on_ending
    from idletrain.schedules.cron import result
    from idletrain.schedules.execute import execute, serve_schedules, utc_now

    store = _store(directory)
    if name is None:
        stop = threading.Event()
        typer.echo(f"{len(store.names())} schedules in {store.directory}; Ctrl-C ends this and what it started")
        with on_ending(stop.set):
            serve_schedules(store, lambda due: _command(due, store), stop)
        return
    if not if_due:
        store.get(name)
        typer.echo(f"{name}: runs now; its output goes to {store.path(name, 'log')}")
    done = execute(store, name, PROGRAM, utc_now(), if_due=if_due)
    if done is None:
        return
    schedule = store.get(name) if name in store.names() else None
    typer.echo(f"{name}: {done.run}: {result(done, running=False)}")
    if done.exit_code:
        typer.echo(f"its output is in {store.path(name, 'log')}" if schedule else "its schedule was removed meanwhile")
        raise typer.Exit(done.exit_code)
    if done.note and not if_due:
        raise typer.Exit(1)


def _checked(schedule: Schedule, store: ScheduleStore, faults: list[str]) -> Job:
    """Return the schedule's job after checking both.

    Raises:
        JobError: with every fault of either.
    """
    from idletrain.job_file import load_job
    from idletrain.schedules.cron import cron_fault, name_fault, zone_fault

    faults += [
        f for f in (name_fault(schedule.name, schedule.varied), cron_fault(schedule.cron), zone_fault(schedule.tz)) if f
    ]
    if schedule.name in store.names():
        faults.append(f"NAME: there is a schedule {schedule.name}; remove it first, or choose another name")
    job = None
    try:
        job = load_job(Path(schedule.job))
    except JobError as error:
        faults += error.faults
    if schedule.starts_in_cloud:
        if schedule.varied:
            faults.append(f"--set: {schedule.on} starts one run at a time; use --on crontab, systemd or loop")
        try:
            faults += _cloud_schedules(schedule.on).faults(schedule, job.cloud.image if job else "unknown")
        except JobError as error:
            faults += error.faults
    else:
        faults += _provider_faults(schedule, job)
        if schedule.on != LocalTrigger.loop and (fault := _triggers()[schedule.on].fault()):
            faults.append(fault)
    if faults or job is None:
        raise JobError(faults)
    if wrong := _job_faults(job, schedule.varied):
        raise JobError(wrong)
    return job


def _job_faults(job: Job, varied: Sequence[str]) -> Sequence[str]:
    """Return what is wrong with a job's model and data, those of a sweep's first trial."""
    from idletrain.cli.job_check import checking
    from idletrain.held_interrupts import notice_if_slow
    from idletrain.sweeps.grid import parse_varied, trials

    if varied:
        job = trials(job.model_dump(exclude_unset=True), [parse_varied(text) for text in varied])[0].job
    with notice_if_slow("reading the model and the data"), checking(job) as check:
        return check.faults()


def _provider_faults(schedule: Schedule, job: Job | None) -> Sequence[str]:
    """Return what the provider of a schedule's nodes refuses."""
    from idletrain.cli.sweep import sweep_faults
    from idletrain.providers.protocol import LaunchRequest
    from idletrain.providers.table import provider_named

    try:
        provider = provider_named(schedule.cloud, LaunchRequest())
    except JobError as error:
        return error.faults
    if job and schedule.varied:
        return sweep_faults(provider, job, schedule.varied, schedule.budget)
    return provider.faults(job) if job else ()


def _add(schedule: Schedule, job: Job, store: ScheduleStore) -> None:
    """Store a schedule and install what starts it; if that fails, leave neither, or both until they can be removed."""
    kept = None
    if schedule.starts_in_cloud:
        schedule, job = _cloud_schedules(schedule.on).resolved(schedule, job)
        kept = json.dumps(job.as_tree())  # the job that the cloud runs from now on
    store.add(schedule, kept)
    try:
        _install(schedule, job, store)
    except BaseException:
        _withdraw(schedule, store)
        raise


def _withdraw(schedule: Schedule, store: ScheduleStore) -> None:
    """Remove a schedule that could not be added; keep it if what starts it may be left, so that it can be seen."""
    try:
        _uninstall(schedule, store)
    except (IdletrainError, KeyboardInterrupt) as error:
        why = f" ({error})" if str(error) else ""
        tell(
            f"something that starts {schedule.name} may be left{why}; "
            f"repeat `idletrain schedule remove {schedule.name}{_option(store)}`"
        )
    else:
        store.remove(schedule.name)


def _install(schedule: Schedule, job: Job, store: ScheduleStore) -> None:
    from idletrain.schedules.cron import wake_minutes

    if schedule.starts_in_cloud:
        from importlib.metadata import version

        _cloud_schedules(schedule.on).install(schedule, job, _packed(job), version("idletrain"))
    elif schedule.on != LocalTrigger.loop:
        _triggers()[schedule.on].install(schedule.name, wake_minutes(schedule.cron), _command(schedule.name, store))


def _uninstall(schedule: Schedule, store: ScheduleStore) -> None:
    if schedule.starts_in_cloud:
        _cloud_schedules(schedule.on).remove(schedule, _job_in_cloud(schedule, store))
    elif schedule.on != LocalTrigger.loop:
        _triggers()[schedule.on].remove(schedule.name)


def _uninstall_damaged(name: str, store: ScheduleStore) -> None:
    """Remove whatever may start a schedule whose file does not say it; tell what only a cloud's own tools remove."""
    for trigger in _triggers().values():
        if trigger.fault() is None:
            trigger.remove(name)
    if store.path(name, "job").exists():
        tell(f"a cloud may still start {name}; the guide 'Sweeps and schedules' says what to delete there")


def _packed(job: Job) -> bytes | None:
    """Return the archive of the user's own code, or None if the job has no `workdir`."""
    if job.workdir is None:
        return None
    from idletrain.cloud.workdir import pack

    return pack(Path(job.workdir))


def _job_in_cloud(schedule: Schedule, store: ScheduleStore) -> Job:
    """Return the job that a schedule in a cloud was added with."""
    from idletrain.job import Job

    path = store.path(schedule.name, "job")
    with reading(path, "remove the schedule and add it again"):
        return Job.model_validate_json(path.read_bytes())


def _cloud_schedules(name: str) -> CloudSchedules:
    """Return what starts scheduled runs in a cloud.

    Raises:
        JobError: there is no such cloud, or it starts none.
    """
    from idletrain.providers.table import cloud_named

    try:
        schedules = cloud_named(name).schedules()
    except JobError:
        schedules = None
    if schedules is None:
        raise JobError(f"--on: {name} starts no runs; use {', '.join(LocalTrigger)}, or a cloud such as aws")
    return schedules


def _triggers() -> dict[str, Trigger]:
    from idletrain.schedules import crontab
    from idletrain.schedules.systemd import SystemdTimers

    return {
        LocalTrigger.crontab.value: crontab,
        LocalTrigger.systemd.value: SystemdTimers(_config_home() / "systemd" / "user"),
    }


def _default_trigger(faults: list[str]) -> str:
    """Return the first trigger that works on this machine; add a fault if there is none."""
    for name, trigger in _triggers().items():
        if trigger.fault() is None:
            return name
    faults.append("--on: there is neither cron nor systemd for you here; use --on loop")
    return LocalTrigger.loop.value


def _command(name: str, store: ScheduleStore) -> list[str]:
    """Return the command that crontab, systemd and the loop call; with absolute paths, as it runs in any directory."""
    return [*PROGRAM, "schedule", "run", name, "--if-due", "--directory", str(store.directory)]


def _store(directory: Path | None) -> ScheduleStore:
    from idletrain.schedules.store import ScheduleStore

    folder = directory or _usual_directory()
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--directory: {folder} is a file; name a directory")
    return ScheduleStore(folder)


def _option(store: ScheduleStore) -> str:
    """Return the option that names a store's directory, after a space; empty for the usual one."""
    usual = _usual_directory().absolute()
    return "" if store.directory == usual else f" --directory {shlex.quote(str(store.directory))}"


def _usual_directory() -> Path:
    return _config_home() / "idletrain" / "schedules"


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _local(at: datetime, schedule: Schedule) -> str:
    return f"{at.astimezone(ZoneInfo(schedule.tz)):%Y-%m-%d %H:%M}"


def _last(schedule: Schedule, store: ScheduleStore) -> list[tuple[Execution, bool]]:
    """Return a schedule's last executions, each with True if it is still running."""
    from idletrain.schedules.execute import running

    if schedule.starts_in_cloud:
        return _cloud_schedules(schedule.on).history(schedule, _job_in_cloud(schedule, store), LAST_SHOWN)
    history, held = store.history(schedule.name), running(store, schedule.name)
    newest = next((e for e in reversed(history) if e.started), None)
    return [(e, held and e is newest) for e in history[-LAST_SHOWN:]]


def _execution_text(execution: Execution, schedule: Schedule, running: bool) -> str:
    from idletrain.schedules.cron import result

    took = ""
    if execution.started and execution.ended:
        seconds = (execution.ended - execution.started).total_seconds()
        took = f" in {seconds:.0f} s" if seconds < MINUTES_FROM else f" in {seconds / 60:.0f} min"
    return f"{_local(execution.due, schedule)} {result(execution, running=running)}{took}"
