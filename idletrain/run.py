"""Puts a run together: the run directory, a cluster with its workers, the round manager; and takes it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from distributed import Client
from distributed.core import rpc
from distributed.security import Security

from idletrain.cluster import dask_scheduler, dask_settings, local
from idletrain.errors import JobError, RunError
from idletrain.job import OPEN_SETTINGS, Job, resume_faults
from idletrain.nn.data.extreme import SparseFiles
from idletrain.nn.memory import HEAD_RESERVE_BYTES
from idletrain.nn.prepare import Prepared
from idletrain.observe.dashboard_feed import page_of, publishing
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.provenance import provenance
from idletrain.observe.records import Recorder, Sink, read
from idletrain.observe.sinks import WatchSettings, watching
from idletrain.observe.summary import Summary
from idletrain.rounds.coordinator import Coordinator, RunOutcome
from idletrain.rounds.durable.recovery import read_history
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.storage import CrashPoint, only_head, write_whole
from idletrain.worker.memory_limits import available_bytes

Baseline = Callable[[Callable[[], None], Recorder], None]
CLUSTER_CONNECT_SECONDS = 10
LOOPBACK = ("127.", "localhost", "[::1]")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a job, beside the job itself.

    Attributes:
        scheduler: Address of a Dask cluster to use; None starts workers on this machine.
        cluster: Address and certificates of a cluster that is the run's own.
        begun: Called with what stops the run and what records an event, once there is a run.
        resume: Go on with the run of that name.
        churn_seconds: Take a local worker this often, or never.
        summary: Sums up the run's events, those of earlier sittings too, each before the sinks get it.
        sinks: Called with every event.
        watch: Who else is told.
        allow_control: Whether the dashboard's page may drain and kill workers.
        command: What was called, for the records.
        expectation: Completes the records of rounds.
        reached: Called at named points around durable writes.
    """

    scheduler: str | None = None
    cluster: tuple[str, Security] | None = None
    on_begun: Baseline = lambda _stop, _record: None
    resume: bool = False
    churn_seconds: float | None = None
    summary: Summary = field(default_factory=Summary)
    sinks: Iterable[Sink] = ()
    watch: WatchSettings = WatchSettings()
    allow_control: bool = False
    command: str = ""
    forecast: ForecastTracker = field(default_factory=ForecastTracker)
    reached: CrashPoint = field(default=lambda _name: None)


def check_run(job: Job, options: RunOptions) -> None:
    """Refuse what cannot start, before anything is made.

    Raises:
        JobError: the run exists (or does not, with `resume`), or is another job's.
    """
    faults = []
    if job.checkpoint.to.startswith("s3://"):
        faults.append(f"checkpoint.to: {job.checkpoint.to} is for runs in a cloud, with --spot; name a directory here")
    exists = (job.run_dir / "wal").exists()
    if exists and not options.resume:
        faults.append(f"name: run {job.name} exists in {job.run_dir}; add --resume to go on with it or name another")
    if options.resume and not exists:
        faults.append(f"name: there is no run {job.name} in {job.checkpoint.to} to resume; leave out --resume")
    if exists and options.resume:
        faults += _resume_faults(job)
    if options.scheduler:
        faults += _scheduler_faults(options.scheduler)
    faults += options.watch.faults()
    if options.scheduler and options.churn_seconds:
        faults.append("--churn: takes workers on this machine; leave it out with --scheduler")
    if faults:
        raise JobError(faults)


def settle(job: Job) -> Job:
    """The job as its run began, where it leaves open what was decided then; else with its sampler decided by a minute's
    trial, where it says `auto`.

    Raises:
        JobError: the job does not fit together.
    """
    if (job.run_dir / "wal").exists():
        return _as_started(job, Job.model_validate_json((job.run_dir / "job.json").read_text()))
    if job.model.args.get("sampler") != "auto":
        return job
    from idletrain.autotune import sampler_trial  # and with it Numba, which other jobs do not need

    sampler, _ = sampler_trial.choose_sampler(job.model, job.data, job.training)
    return _with_sampler(job, sampler)


def _with_sampler(job: Job, sampler: object) -> Job:
    model = job.model.model_copy(update={"args": {**job.model.args, "sampler": sampler}})
    return job.model_copy(update={"model": model})


def _as_started(job: Job, then: Job) -> Job:
    """The job with the sampler that its run began with, where it says `auto`, and with what it does not say of how to
    train as that was.
    """
    auto = job.model.args.get("sampler") == "auto" and "sampler" in then.model.args
    job = _with_sampler(job, then.model.args["sampler"]) if auto else job
    left = {name: getattr(then.training, name) for name in OPEN_SETTINGS if name not in job.training.model_fields_set}
    return job.model_copy(update={"training": job.training.model_copy(update=left)})


async def launch(job: Job, prepared: Prepared, options: RunOptions) -> RunOutcome:
    """Run a job to its end.

    Raises:
        JobError: it cannot start as asked.
        RunError: it cannot go on.
    """
    check_run(job, options)
    dask_settings.apply()
    dask_settings.lift_file_limit()
    if options.scheduler:
        await check_reachable(options.scheduler)
    with _opened(job, options) as record:
        journal = _journal(job, prepared, record, options.reached)
        with contextlib.closing(journal):
            async with (
                _cluster(job, options, record) as (address, security),
                Client(address, asynchronous=True, security=security, set_as_default=False) as client,
            ):
                page = await page_of(
                    client, first_port=dask_scheduler.DASHBOARD_PORT if options.scheduler is None else None
                )
                told = provenance(job, options.command, *page) | _rows_of(prepared)
                runner = Coordinator(job, prepared, journal, client, record, told)
                options.on_begun(runner.stop, record)
                async with publishing(client, options.summary, allow_control=options.allow_control):
                    with _stopping(runner.stop), _failing(record, journal):
                        return await runner.run(job.nodes.count)


@contextlib.contextmanager
def _opened(job: Job, options: RunOptions) -> Iterator[Recorder]:
    """The run directory, held for this head, with the job in it, and what takes the run's events."""
    with contextlib.ExitStack() as held:
        try:
            job.run_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(only_head(job.run_dir))
            record = held.enter_context(_recorder(job, options))
            write_whole(job.run_dir / "job.json", job.model_dump_json(indent=1).encode())
        except OSError as error:
            raise _unwritable(job, error) from None
        yield record


@contextlib.contextmanager
def _recorder(job: Job, options: RunOptions) -> Iterator[Recorder]:
    """What takes the run's events: its file, its summary, and everybody who is told."""
    path, summary = job.run_dir / "events.jsonl", options.summary
    if path.exists():
        for event in read(path):
            summary.add(event)
            options.forecast.recall(event)
    with (
        watching(options.watch, summary, job.run_dir) as tell,
        contextlib.closing(Recorder(path, (summary.add, *options.sinks, tell), options.forecast)) as record,
    ):
        yield record


@contextlib.contextmanager
def _failing(record: Recorder, directory: RunDirectory) -> Iterator[None]:
    """Tell whoever watches that the run is over when it cannot go on."""
    try:
        yield
    except RunError as error:
        unknown = {"accuracy": None, "loss": None, "params_sha256": None}
        told = {"rounds": directory.round, "run_dir": str(directory.run_dir), "reason": str(error)}
        record("run_ended", status="failed", **unknown, **told)
        raise


def _unwritable(job: Job, error: OSError) -> RunError:
    return RunError(f"{job.run_dir} cannot be written ({error.strerror}); make room or set checkpoint.to")


def _journal(job: Job, prepared: Prepared, record: Recorder, reached: CrashPoint) -> RunDirectory:
    try:
        return RunDirectory(job.run_dir, prepared, record, reached, job.checkpoint.keep)
    except OSError as error:
        raise _unwritable(job, error) from None


async def check_reachable(address: str) -> dict[str, Any]:
    """Refuse a scheduler that is not there, or that asks for certificates; returns what it tells of itself.

    Raises:
        JobError: it cannot be used as it is named.
    """
    if faults := _scheduler_faults(address):
        raise JobError(faults)
    try:
        async with rpc(
            address, timeout=CLUSTER_CONNECT_SECONDS, connection_args=Security().get_connection_args("client")
        ) as remote:
            told: dict[str, Any] = await remote.identity()
    except (TypeError, RuntimeError) as error:  # how Dask says that it has no certificates
        raise JobError(
            f"--scheduler: {address} asks for TLS ({error}); name the client's certificates in Dask's configuration, "
            "distributed.comm.tls"
        ) from None
    except (OSError, ValueError) as error:
        raise JobError(
            f"--scheduler: {address} cannot be reached ({error}); check the address and that the scheduler runs"
        ) from None
    return told


@contextlib.asynccontextmanager
async def _cluster(job: Job, options: RunOptions, record: Recorder) -> AsyncIterator[tuple[str, Security]]:
    """The cluster that is there, or one of our own on loopback with local workers."""
    if options.cluster:
        yield options.cluster
        return
    if options.scheduler:
        yield options.scheduler, Security()
        return
    async with dask_scheduler.started(job.run_dir) as address:
        fleet = local.LocalFleet(address, worker_bytes(job), job.run_dir / "logs")
        tasks = [asyncio.ensure_future(local.keep_workers(fleet, job.nodes.count, record))]
        if options.churn_seconds:
            tasks.append(asyncio.ensure_future(local.churn(fleet, options.churn_seconds)))
        try:
            yield address, Security()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await fleet.close()


def _rows_of(prepared: Prepared) -> dict[str, Any]:
    """What there is of sparse rows, and what had to be done about some."""
    source = prepared.program.source
    return {"data": asdict(source.open().census)} if isinstance(source, SparseFiles) else {}


def worker_bytes(job: Job) -> int:
    """Bytes that each local worker may use: as the job says, or its share of what is free here."""
    if job.nodes.memory:
        return job.nodes.memory
    free = available_bytes() - HEAD_RESERVE_BYTES
    if torch.cuda.is_available():  # they all train on it
        free = min(free, torch.cuda.mem_get_info()[0])
    return max(free // job.nodes.count, 1)


@contextlib.contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run in order; a second one is Python's own."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM)

    def once() -> None:
        for number in caught:
            loop.remove_signal_handler(number)
        stop()

    try:
        for number in caught:
            loop.add_signal_handler(number, once)
    except (ValueError, RuntimeError):  # not the main thread: a notebook's signals are the notebook's
        pass
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in caught:
                loop.remove_signal_handler(number)


def _resume_faults(job: Job) -> list[str]:
    past = read_history(job.run_dir)
    then = Job.model_validate_json((job.run_dir / "job.json").read_text())
    return resume_faults(_as_started(job, then), then, past.status, past.rounds)


def _scheduler_faults(address: str) -> list[str]:
    scheme, _, host = address.partition("://")
    if scheme not in ("tcp", "tls") or not host:
        return [f"--scheduler: {address!r} should be tcp://HOST:PORT on this machine or tls://HOST:PORT"]
    if scheme == "tcp" and not host.startswith(LOOPBACK):
        return [
            f"--scheduler: {address} is on another machine without TLS; use a tls:// address and Dask's certificates"
        ]
    return []
