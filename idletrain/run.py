"""Compose a run: the job as it is to be trained, the run directory, the provider's workers and the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distributed import Client
from distributed.security import Security

from idletrain.cluster import dask_settings, prompt_thread
from idletrain.data_files import changed_files, file_digests
from idletrain.end_signals import Ending, ended_by_signals
from idletrain.epochs import with_rounds
from idletrain.errors import DamageError, IdletrainError, JobError, RunError, reading, user_code_fails
from idletrain.job import OPEN_SETTINGS, Job
from idletrain.nn.data.extreme import SparseFiles
from idletrain.nn.prepare import Prepared, prepare_job
from idletrain.nn.program import Program
from idletrain.nn.rolling import check_rolling
from idletrain.observe.dashboard_feed import page_of, publishing
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.provenance import provenance
from idletrain.observe.records import Recorder, Sink, read_records
from idletrain.observe.sinks import WatchSettings, watching
from idletrain.observe.summary import Summary
from idletrain.own_code import changes, own_code
from idletrain.ownership import write_signed
from idletrain.providers.local import LocalProcesses
from idletrain.providers.protocol import WorkerProvider
from idletrain.resume import check_resumption
from idletrain.rounds.coordinator import Coordinator, RunOutcome
from idletrain.rounds.durable.history import former_format, holds_run, read_history
from idletrain.rounds.durable.recovery import read_job
from idletrain.rounds.durable.rolling_directory import RollingDirectory
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.rounds.evaluation import OnEvaluate, watch_of
from idletrain.storage import NO_SPACE_ERRORS, CrashPoint, make_private, only_head

OnStart = Callable[[Callable[[], None], Recorder], None]
Decide = Callable[[Job], tuple[Job, ForecastTracker | None]]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of a run, beside the job.

    Attributes:
        provider: Where the workers come from.
        on_start: Called once the run has started, with a function that stops it and one that records an event.
        resume: Continue the run of that name.
        summary: Accumulates the run's events, those from before a resumption too, each before the sinks get it.
        sinks: Called with every event.
        watch: Hooks and trackers that get the events as well.
        allow_control: True if the dashboard's page may drain and kill workers.
        command: The command line, for the records.
        forecast: Adds the forecast to the records of rounds.
        reached: Called at named points around durable writes.
        on_evaluate: Called with a copy of each network that is evaluated, and its scores.
    """

    provider: WorkerProvider = field(default_factory=LocalProcesses)
    on_start: OnStart = lambda _stop, _record: None
    resume: bool = False
    summary: Summary = field(default_factory=Summary)
    sinks: Iterable[Sink] = ()
    watch: WatchSettings = WatchSettings()
    allow_control: bool = False
    command: str = ""
    forecast: ForecastTracker = field(default_factory=ForecastTracker)
    reached: CrashPoint = field(default=lambda _name: None)
    on_evaluate: OnEvaluate | None = None


@dataclass(frozen=True)
class Composition:
    """A run that is checked and prepared, before anything of it is written.

    Attributes:
        job: The job with all settings decided.
        prepared: Its network and data.
        options: How to run it.
    """

    job: Job
    prepared: Prepared
    options: RunOptions

    async def launch(self, *, sinks: Iterable[Sink] = (), on_start: OnStart | None = None) -> RunOutcome:
        """Train to the end.

        Args:
            sinks: Called with every event, after the options' own.
            on_start: Replaces the options' own.

        Raises:
            JobError: the provider's workers cannot be reached.
            RunError: the run cannot continue.
            KeyboardInterrupt: a second signal has ended it at once.
        """
        options = replace(self.options, sinks=(*self.options.sinks, *sinks))
        options = replace(options, on_start=on_start) if on_start else options
        return await _train(self.job, self.prepared, options)


def compose(
    job: Job,
    options: RunOptions,
    *,
    prepare: Callable[[Job], Prepared] = prepare_job,
    decide: Decide = lambda job: (job, None),
    report: Callable[[str], None] = lambda _text: None,
) -> Composition:
    """Check a job, settle what it leaves open, and prepare its network and data.

    Preparing comes before deciding, so that a fault of the model or the data shows before seconds of measuring; it is
    repeated only if the decision changes the job.

    Args:
        job: What to train.
        options: How to run it, with the provider of its workers.
        prepare: Builds the network and opens the data.
        decide: Chooses the settings that the job leaves open; returns the job with them, and a forecast of its rounds.
        report: Called with a line before each step that takes seconds.

    Raises:
        FinishedError: the run should be resumed, and has reached its end.
        JobError: the job cannot start; nothing was made.
    """
    check_run(job, options)
    if job.model.args.get("sampler") == "auto":
        report("trying samplers, for two minutes at most")
    settled = settle(job)
    report("reading the model and the data")
    prepared = prepare(settled)
    for note in (*prepared.notes, *([prepared.fallback] if prepared.fallback else [])):
        report(note)
    settled = _as_prepared(settled, prepared)
    decided, forecast = decide(settled)
    if decided != settled:
        del prepared  # else memory would hold two networks
        prepared = prepare(decided)
        decided = _as_prepared(decided, prepared)
    if decided.preemption.policy == "rolling":
        check_rolling(prepared.program)
    decided, prepared = with_rounds(decided, prepared)
    if options.resume:
        _check_resumption(decided)  # now that its rounds are known
        past = read_history(decided.run_dir)
        if past.status == "completed":
            rounds = decided.training.rounds
            report(f"run {decided.name} was complete after {past.rounds} rounds; it goes on to {rounds}")
    watch_of(decided.stop, prepared)  # refuses what is not measured
    return Composition(decided, prepared, replace(options, forecast=forecast) if forecast else options)


async def launch(job: Job, prepared: Prepared, options: RunOptions) -> RunOutcome:
    """Run a job as it is, without settling anything; for callers that prepare it themselves.

    Raises:
        JobError: it cannot start.
        RunError: it cannot continue.
    """
    check_run(job, options)
    return await _train(job, prepared, options)


def _as_prepared(job: Job, prepared: Prepared) -> Job:
    """Return the job with the method that suits its model, which its record has to say: a later search, on a busier
    machine, may end otherwise; and with the batch size that its data say.
    """
    return job.model_copy(update={"training": prepared.program.training})


def check_run(job: Job, options: RunOptions) -> None:
    """Refuse what cannot start, before anything is made.

    Raises:
        FinishedError: it should be resumed, and has reached its end.
        JobError: the run exists (or does not, with `resume`), is another job's, or its provider refuses it.
    """
    faults = []
    if job.checkpoint.to.startswith("s3://"):
        faults.append(f"checkpoint.to: {job.checkpoint.to} is for runs in a cloud, with --spot; name a directory here")
    if former := former_format(job.run_dir):
        raise JobError(f"name: {former}")
    exists = holds_run(job.run_dir)
    if exists and not options.resume:
        faults.append(f"name: run {job.name} exists in {job.run_dir}; add --resume to go on with it or name another")
    if options.resume and not exists:
        faults.append(f"name: there is no run {job.name} in {job.checkpoint.to} to resume; leave out --resume")
    faults += options.provider.faults(job)
    faults += options.watch.faults()
    if faults:
        raise JobError(faults)
    if exists:
        _check_resumption(job)


def settle(job: Job) -> Job:
    """Return the job with what its run decided at its start, if it has a run; else with its sampler chosen by
    trials if it says `auto`.

    Raises:
        JobError: the job does not fit together.
    """
    if holds_run(job.run_dir):
        return _as_started(job, _first_job(job))
    if job.model.args.get("sampler") != "auto":
        return job
    from idletrain.autotune import sampler_trial  # and with it Numba, which other jobs do not need

    sampler, _ = sampler_trial.choose_sampler(job.model, job.data, job.training)
    return _with_sampler(job, sampler)


def _with_sampler(job: Job, sampler: object) -> Job:
    model = job.model.model_copy(update={"args": {**job.model.args, "sampler": sampler}})
    return job.model_copy(update={"model": model})


def _as_started(job: Job, first: Job) -> Job:
    """Return the job with what its run decided: the sampler if it says `auto`, what it does not say of `training`, and
    the method that suits the model.
    """
    auto = job.model.args.get("sampler") == "auto" and "sampler" in first.model.args
    job = _with_sampler(job, first.model.args["sampler"]) if auto else job
    given = job.training.model_fields_set
    unset = {name: getattr(first.training, name) for name in (*OPEN_SETTINGS, "batch_size") if name not in given}
    if not given & {"rounds", "epochs", "phases"}:
        unset["rounds"] = first.training.rounds
    training = job.training.model_copy(update=unset)
    if first.training.instead_of == training.method:
        training = training.as_local_sgd()
    return job.model_copy(update={"training": training})


async def _train(job: Job, prepared: Prepared, options: RunOptions) -> RunOutcome:
    """Train a checked job to its end: take the run directory, connect to the workers, and coordinate the rounds."""
    with ended_by_signals() as ending:
        return await _train_until(ending, job, prepared, options)


async def _train_until(ending: Ending, job: Job, prepared: Prepared, options: RunOptions) -> RunOutcome:
    """Train to the end, or until `ending` stops the coordinator or cancels this task."""
    provider = options.provider
    dask_settings.apply()
    dask_settings.lift_file_limit()
    await provider.check()
    helpers = ThreadPoolExecutor(thread_name_prefix="head", initializer=prompt_thread.wake_soon)
    asyncio.get_running_loop().set_default_executor(helpers)  # a worker on this machine must not make others wait
    with prompt_thread.prompt(), _quiet_client(), _opened(job, options) as record, _having_room(job):
        directory = _run_directory(job, prepared, record, options.reached)
        with contextlib.closing(directory):
            async with (
                provider.cluster(job, record) as (address, security),
                _connected(address, security, directory.round) as client,
            ):
                with _scheduler_needed(directory.round):
                    page = await page_of(client, first_port=provider.dashboard_port)
                facts = provenance(job, options.command, *page) | {"better": prepared.better} | _row_census(prepared)
                facts |= {"code": _code_of(prepared.program), "data_files": file_digests(job.data.paths)}
                if options.resume:
                    _warn_of_changes(job, facts, directory.round, record)
                coordinator = Coordinator(job, prepared, directory, client, record, facts, options.on_evaluate)
                options.on_start(coordinator.stop, record)
                async with publishing(client, options.summary, allow_control=options.allow_control):
                    with _stopping(ending, coordinator.stop, record), _recording_failure(record, directory):
                        return await coordinator.run(job.nodes.count)


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """Silence the log of Dask's client: it prints tracebacks of a lost scheduler, of which the run's error tells."""
    log = logging.getLogger("distributed.client")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.asynccontextmanager
async def _connected(address: str, security: Security, rounds: int) -> AsyncIterator[Client]:
    """Yield a client of the scheduler of a run that has trained some rounds."""
    async with contextlib.AsyncExitStack() as stack:
        with _scheduler_needed(rounds):
            client = Client(address, asynchronous=True, security=security, set_as_default=False)
            await stack.enter_async_context(client)
        yield client


@contextlib.contextmanager
def _scheduler_needed(rounds: int) -> Iterator[None]:
    """Raise RunError where the scheduler does not answer any more: it did before the run began."""
    try:
        yield
    except OSError:
        raise RunError(f"the Dask scheduler is gone after round {rounds}; start the job again with --resume") from None


@contextlib.contextmanager
def _having_room(job: Job) -> Iterator[None]:
    """Raise RunError where a start finds no room: a run that trains waits for some."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE_ERRORS:
            raise
        raise _unwritable(job, error) from None


@contextlib.contextmanager
def _opened(job: Job, options: RunOptions) -> Iterator[Recorder]:
    """Lock the run directory for this head, write the job into it, and yield the recorder of events."""
    with contextlib.ExitStack() as stack:
        try:
            make_private(job.run_dir)
            stack.enter_context(only_head(job.run_dir))
            record = stack.enter_context(_recorder(job, options))
            write_signed(job.run_dir / "job.json", job.model_dump_json(indent=1).encode())
        except OSError as error:
            raise _unwritable(job, error) from None
        yield record


@contextlib.contextmanager
def _recorder(job: Job, options: RunOptions) -> Iterator[Recorder]:
    """Yield the recorder of the run's events: to its file, its summary, the sinks and the watchers."""
    path, summary = job.run_dir / "events.jsonl", options.summary
    with contextlib.suppress(IdletrainError), reading(path, ""):  # records never block a run
        for event in read_records(path):
            summary.add(event)
            options.forecast.recall(event)
    with (
        watching(options.watch, summary, job.run_dir) as watcher,
        contextlib.closing(Recorder(path, (summary.add, *options.sinks, watcher), options.forecast)) as record,
    ):
        yield record


@contextlib.contextmanager
def _recording_failure(record: Recorder, directory: RunDirectory) -> Iterator[None]:
    """Record that the run has ended if it cannot continue, or if the user's own code raises something on the head."""
    try:
        with user_code_fails("; fix it, and go on with --resume"):
            yield
    except (RunError, DamageError) as error:
        unknown = {"accuracy": None, "loss": None, "params_sha256": None}
        known = {"rounds": directory.round, "run_dir": str(directory.run_dir), "reason": str(error)}
        record("run_ended", status="failed", **unknown, **known)
        raise


def _unwritable(job: Job, error: OSError) -> RunError:
    return RunError(f"{job.run_dir} cannot be written ({error.strerror}); make room or set checkpoint.to")


def _run_directory(job: Job, prepared: Prepared, record: Recorder, reached: CrashPoint) -> RunDirectory:
    try:
        kind = RollingDirectory if job.preemption.policy == "rolling" else RunDirectory
        return kind(job.run_dir, prepared, record, reached, job.checkpoint.keep, job.stop.watched)
    except OSError as error:
        raise _unwritable(job, error) from None


def _code_of(program: Program) -> dict[str, str]:
    return own_code(program.module, (program.loss, program.schedule))


def _warn_of_changes(job: Job, now: Mapping[str, Any], round_: int, record: Recorder) -> None:
    """Record a warning if the user's own code or data are not what the run's first rounds were trained by and on."""
    first: Mapping[str, Any] = {}
    with contextlib.suppress(OSError, RunError):  # records are not what a run goes on from
        events = read_records(job.run_dir / "events.jsonl")
        first = next((event for event in events if event["kind"] == "run_started"), first)
    code, files = (then if isinstance(then := first.get(name), dict) else now[name] for name in ("code", "data_files"))
    changed = changes(code, now["code"])
    for what in (f"the code of {', '.join(changed)}" if changed else "", *changed_files(files, now["data_files"])):
        if what:
            reason = f"{what} has changed since the run began; further rounds train what is new"
            record("warning", round=round_, reason=reason)


def _row_census(prepared: Prepared) -> dict[str, Any]:
    """Count a sparse data set's rows, and those that had to be repaired; nothing for other data."""
    source = prepared.program.source
    return {"data": asdict(source.open().census)} if isinstance(source, SparseFiles) else {}


@contextlib.contextmanager
def _stopping(ending: Ending, stop: Callable[[], None], record: Recorder) -> Iterator[None]:
    """Within the context, stop the run in order at the first signal, and record that."""

    def in_order() -> None:
        record("stopping", reason="workers end in order; Ctrl-C again ends all at once")
        stop()

    ending.stops_by(in_order)
    try:
        yield
    finally:
        ending.ended()


def _first_job(job: Job) -> Job:
    """Return the job that a run began with; this one if its record is damaged and this one leaves nothing open.

    Raises:
        DamageError: It is damaged, and this job leaves to it what it does not say.
    """
    try:
        return read_job(job.run_dir)
    except DamageError:
        given = job.training.model_fields_set | {"copies"}  # which are chosen only with the method
        settled = given.issuperset(OPEN_SETTINGS) and job.model.args.get("sampler") != "auto"
        if not settled:
            raise
        return job


def _check_resumption(job: Job) -> None:
    """Refuse to go on with a run that has reached its end, or with other settings.

    Raises:
        JobError: Of them.
    """
    past = read_history(job.run_dir)
    first = _first_job(job)
    check_resumption(_as_started(job, first), first, past.status, past.rounds)
