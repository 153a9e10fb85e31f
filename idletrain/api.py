"""Training from Python: an `nn.Module` and data go in, the trained `nn.Module` comes out."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from idletrain.autotune import choose
from idletrain.autotune.choose import Prepare
from idletrain.autotune.forecast import FleetFigures
from idletrain.autotune.local_fleet import local_figures, steps_here
from idletrain.autotune.probe import probe_fleet
from idletrain.cluster.access import with_link
from idletrain.errors import (
    DIVERGED,
    FinishedError,
    RefusedError,
    RunError,
    in_python,
    stopped,
    user_code,
    user_code_fails,
)
from idletrain.export import finished_module
from idletrain.fabric.measuring.cluster import existing_cluster
from idletrain.fabric.measuring.nodes import occupied
from idletrain.fit_arguments import check_arguments, named_as_arguments
from idletrain.fit_result import FitResult
from idletrain.held_interrupts import notice_if_slow
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn import travel
from idletrain.nn.data.datasets import check_classes
from idletrain.nn.data.run_files import RunData
from idletrain.nn.data.seeding import seeded
from idletrain.nn.ist.groups import to_meta
from idletrain.nn.lightning import Callbacks, WholeBatches, callbacks_of, is_lightning, optimizer_of, plain, stepping
from idletrain.nn.module_checks import unwrapped
from idletrain.nn.optim import from_torch
from idletrain.nn.optim.schedule import Schedule
from idletrain.nn.precision import as_given
from idletrain.nn.prepare import Prepared, prepare
from idletrain.nn.program import Loss, Program
from idletrain.observe.display import choose_display
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.records import Record, Recorder, Sink, read_records
from idletrain.observe.sinks import WatchSettings
from idletrain.observe.summary import Summary
from idletrain.ownership import write_signed
from idletrain.providers.local import LocalProcesses, worker_bytes
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler, check_reachable
from idletrain.rounds.coordinator import RunOutcome
from idletrain.rounds.durable.history import holds_run
from idletrain.rounds.durable.recovery import Restored, load_result
from idletrain.run import Composition, RunOptions, compose, settle

SCORES = ("accuracy", "loss", "calibration_error", "temperature", "metrics")  # of an evaluation


@in_python
def fit(  # noqa: PLR0913 (one argument a choice that most calls make; the rest are sections)
    module: nn.Module,
    train: Any,
    test: Any = None,
    *,
    loss: str | Loss | None = None,
    method: str | None = None,
    subnets: int | Mapping[str, int] = 4,
    copies: int = 1,
    local_steps: int = 50,
    rounds: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    optimizer: str | Mapping[str, Any] | Optimizer | None = None,
    seed: int = 0,
    evaluate_every: int = 10,
    metrics: Mapping[str, Any] | None = None,
    workers: int = 4,
    name: str | None = None,
    run_dir: str | Path = "runs",
    resume: bool = False,
    scheduler: str | None = None,
    on_event: Callable[[Record], None] | None = None,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
    on_evaluate: Callable[[nn.Module, Mapping[str, float | None]], object] | None = None,
    log_to: str | Sequence[str] = (),
    **sections: Mapping[str, Any],
) -> FitResult:
    """Train a module by independent subnets (or local SGD) on workers that may come and go.

    Args:
        module: Any module with parameters of float32, bfloat16 or float16; its class may stand in a script or
            notebook. Left unchanged. Of a DataParallel, the module in it is trained and returned. Of a LightningModule,
            `training_step` computes the loss and `configure_optimizers` names the optimizer; what `validation_step`
            logs is measured at each evaluation, and EarlyStopping and ModelCheckpoint of `configure_callbacks` become
            settings of `stop`, those of EarlyStopping where they watch several values.
        train: A pair (inputs `[N, ...]`, labels `[N, ...]`) of arrays, tensors, DataFrames or SciPy's sparse matrices;
            a dict of arrays by the names that the module's forward takes; a map-style Dataset, of torch or Hugging
            Face, whose items are pairs, longer tuples that end in the label, or dicts or dataclasses; an
            IterableDataset; or a DataLoader, whose Dataset, batch size, collate_fn, order and num_workers are used.
        test: The same, for evaluation, or None.
        loss: `cross_entropy`, `bce_with_logits`, `mse`, `model` for the one that the module returns with its outputs
            (`outputs.loss`), `package.module:function`, or a function `(outputs, labels) -> scalar`, which gets the
            whole batch instead of labels if samples are dicts. If None, the module's own where it returns one for
            dicts, else `cross_entropy`.
        method: `ist` or `local-sgd`. If None, chosen by a forecast of the rounds and, in long runs, a trial of both on
            the data for 2 % of the time: `ist` where it learns as well or the network does not fit a worker's memory.
        subnets: Independent subnets in a round; `{"start": 8, "end": 2}` for phases of 8, 4 and 2.
        copies: Number of them that every neuron is in, up to all: the dial from independent subnets to local SGD.
        local_steps: Steps of each between two exchanges.
        rounds: Rounds to train. If neither they nor epochs are given, 120, or as many as 50 passes over the data take
            where these are fewer, but at least 10.
        epochs: Passes over the training data, in place of rounds: all subnets together draw as many samples.
        batch_size: Samples a step and subnet; the DataLoader's if None, or 128.
        collate_fn: Makes a batch from a list of a Dataset's items, as a DataLoader's, for samples of several lengths:
            `(inputs, labels)`, or a dict or dataclass. A transformers `DataCollatorWithPadding` is one.
        optimizer: As in a job file, such as `{"name": "adamw", "lr": 1e-3}`, where `schedule` may be a function
            `(step, steps) -> factor`; a name such as `adamw`, with torch's default settings; or an instance of a class
            of `torch.optim` that holds the module's parameters. AdamW with lr 0.001 if None.
        seed: Seed of every random number.
        evaluate_every: Rounds between two evaluations on `test`, the first of which follows round 1. Without `stop` no
            round waits for one: what comes due while another is going on is left out; and before the last round, if
            neither `metrics` nor `on_evaluate` is given, 2,048 samples of `test` are used.
        metrics: By name, metrics that each evaluation measures on `test`, too: a torchmetrics metric, or a pair of a
            metric or function and which value is better, such as `(mean_error, "lower")`. A function gets the outputs
            `[N, ...]` and labels `[N, ...]` of all test data at once and returns a number.
        workers: Worker processes to start here, or to wait for with `scheduler`.
        name: The run's name; derived from the time if None.
        run_dir: Directory of runs.
        resume: Continue the run of that name. If it has reached its end, its result is returned.
        scheduler: Address of a Dask cluster whose workers train.
        on_event: Called with every event as it happens; the run waits for it.
        on_round: Called with a summary after a committed round, from a thread of its own; a slow one misses rounds. Its
            accuracy and loss are those of the network after `evaluated_rounds`.
        on_evaluate: Called after every evaluation, as a part of it, with a copy of the network and its scores by name
            (`round`, `loss`, `accuracy` and the metrics). Training goes on meanwhile (see `evaluate_every`).
        log_to: `mlflow` and/or `wandb`, for the curves.
        sections: Further sections of a job file: `stop`, `nodes`, `memory`, `preemption`, `checkpoint`, `model`,
            and of `training` what has no argument here (`exchange`, `phases`, `finish_whole`, ...).

    Raises:
        JobError: module, data and settings do not fit together; nothing was started.
        RunError: the run cannot continue now; try again with `resume`.
        KeyboardInterrupt: it was stopped, by Ctrl-C or SIGTERM; the text says how to go on.
    """
    check_arguments(locals(), _defaults())
    module = unwrapped(module)
    lightning, callbacks, held, factors = is_lightning(module), Callbacks(), module, None
    if lightning:
        module = stepping(module)
        if optimizer is None:
            (optimizer, factors), held = optimizer_of(module), module
        callbacks = callbacks_of(module, None if test is None else WholeBatches(RunData(test, Path(), collate_fn)))
    optimizer_fields, schedule = _optimizer(optimizer, held, factors)
    training = {
        "subnets": subnets,
        "local_steps": local_steps,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "method": method,
        "rounds": rounds,
        "epochs": epochs,
        "batch_size": batch_size,
        "copies": copies if copies != 1 else None,  # said, it would settle the method
        "optimizer": optimizer_fields or None,
        "loss": loss if isinstance(loss, str) else None,
    }
    given = {field: value for field, value in training.items() if value is not None}
    tree = {
        "name": f"fit-{time.time_ns():x}" if name is None else name,
        "data": {},
        **sections,
        "training": _section(given, sections.get("training", {})),
        "model": _section({"factory": type(module).__qualname__}, sections.get("model", {})),
        "nodes": _section({"count": workers}, sections.get("nodes", {})),
        "checkpoint": _section({"to": str(run_dir)}, sections.get("checkpoint", {})),
        "stop": _section(callbacks.stop, sections.get("stop", {})),
    }
    with named_as_arguments(sections):
        job = parse_job(tree)
    trackers = (log_to,) if isinstance(log_to, str) else log_to
    watch, summary = WatchSettings(on_round=on_round, log_to=trackers), Summary()
    provider = ExistingScheduler(LaunchRequest(scheduler=scheduler)) if scheduler else LocalProcesses()
    source, test_source = _sources(job, train, test, collate_fn)

    def prepare_module(job: Job) -> Prepared:
        prepared = prepare(
            module,
            WholeBatches(source) if lightning else source,
            WholeBatches(test_source) if lightning and test_source else test_source,
            loss,
            job.training,
            exclude=job.model.exclude,
            table=job.model.groups,
            fixed=job.model.fixed,
            split=job.model.split,
            memory=job.memory,
            schedule=schedule,
            metrics=metrics,
        )
        return replace(prepared, logged_better=callbacks.better)

    options = RunOptions(provider=provider, resume=resume, watch=watch, summary=summary, on_evaluate=on_evaluate)
    remembered = choose.remembering(prepare_module)
    records: list[Record] = []
    try:
        with notice_if_slow("reading the module and the data"), named_as_arguments(sections):
            composition = compose(job, options, prepare=remembered, decide=partial(_decide, scheduler, remembered))
    except FinishedError as end:
        _tell(f"{end}; this is its result")
        prepared = remembered(settle(job))
        result = _ended(job, prepared.program, summary, records)
    else:
        prepared = composition.prepared
        for note in (*prepared.notes, *callbacks.notes, prepared.fallback):
            if note:
                _tell(note)
        result = _trained(composition, source, test_source, records, on_event)
    trained = as_given(finished_module(prepared, result.network), module)
    trained = plain(trained) if lightning else trained
    scores = _scores_after(result.rounds, records)
    return FitResult(trained, tuple(records), {**summary.as_record(), **scores}, job.run_dir, result.rounds)


def _sources(job: Job, train: Any, test: Any, collate_fn: Any) -> tuple[RunData, RunData | None]:
    """Return the training data and the test data, whose classes must have the same numbers."""
    check_classes(train, test)
    folder = job.run_dir / "data"
    source = RunData(train, folder / "train", collate_fn)
    return source, None if test is None else RunData(test, folder / "test", collate_fn)


def _ended(job: Job, program: Program, summary: Summary, records: list[Record]) -> Restored:
    """Read the records of a run that has ended, and return its network."""
    with contextlib.suppress(OSError, RunError):  # records are not what a run goes on from
        for event in read_records(job.run_dir / "events.jsonl"):
            summary.add(event)
            records.append(event)
    return load_result(job.run_dir, program, job.stop.watched)


def _scores_after(rounds: int, records: Sequence[Record]) -> dict[str, Any]:
    """Return the scores of the network that is returned, which may be an earlier one than that of the last round."""
    found = [event for event in records if event["kind"] == "evaluated" and event["round"] == rounds]
    return {name: found[-1][name] for name in SCORES if name in found[-1]} if found else {}


def _trained(
    composition: Composition,
    source: RunData,
    test_source: RunData | None,
    records: list[Record],
    on_event: Callable[[Record], None] | None,
) -> Restored:
    """Write the program and the data once the run directory is the run's, train to the end, and return the network."""
    job, prepared, summary = composition.job, composition.prepared, composition.options.summary
    travel.dumps(
        (prepared.program, test_source, prepared.metrics),
        {**prepared.program.parts, "data.test": test_source, "metrics": prepared.metrics},
    )

    def write() -> None:
        for arrays in (source, test_source):
            if arrays:
                arrays.write()
        pickled = travel.dumps(replace(prepared, module=to_meta(prepared.module, frozen=False), network=()))
        write_signed(job.run_dir / "program.pkl", pickled)

    display = choose_display(False, Console(), summary)
    sinks = (records.append, with_link(job.run_dir, display), *([_called(on_event)] if on_event else []))
    further = f"the same call with name={job.name!r}, resume=True goes on"
    try:
        with display:
            outcome = _run(composition, sinks, write)
    except KeyboardInterrupt:  # the second one
        raise stopped(f"ended at once; {further}" if holds_run(job.run_dir) else "ended at once") from None
    if outcome.status == "stopped":
        raise stopped(f"stopped after round {outcome.rounds}; {further}")
    if outcome.status == "diverged":
        raise RunError(DIVERGED)
    if outcome.status == "stopped-early":
        _tell(f"stopped early: {summary.note}")
    return load_result(job.run_dir, prepared.program, job.stop.watched)


def _called(on_event: Callable[[Record], None]) -> Sink:
    """Return a sink that calls a function until it raises, which ends the run."""
    works = True

    def sink(event: Record) -> None:
        nonlocal works
        if works:
            works = False  # unless it returns
            with user_code_fails("; mend on_event and go on with resume=True"):
                on_event(event)
            works = True

    return sink


def _defaults() -> dict[str, Any]:
    """Return what each of the arguments of `fit` is where a call leaves it out."""
    parameters = inspect.signature(fit).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}


def _section(own: Mapping[str, Any], given: Any) -> Any:
    """Return a section of the job with a call's own settings in it; what is no mapping is left for the job's checks."""
    return {**own, **given} if isinstance(given, Mapping) else given


def _tell(text: str) -> None:
    console = Console(stderr=True)  # which breaks lines between words, where there is a screen
    console.print(f"idletrain: {text}", markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _optimizer(optimizer: Any, module: nn.Module, factors: Schedule | None) -> tuple[dict[str, Any], Schedule | None]:
    """Return the job's optimizer, and its schedule if that is given as a function; the job then has its name alone."""
    fields = {} if optimizer is None else from_torch.settings_of(optimizer, module)
    schedule = factors or fields.get("schedule")
    if not callable(schedule):
        return fields, None
    place = getattr(schedule, "__module__", "fit"), getattr(schedule, "__qualname__", type(schedule).__name__)
    return fields | {"schedule": ":".join(place)}, schedule


def _decide(scheduler: str | None, prepare: Prepare, job: Job) -> tuple[Job, ForecastTracker | None]:
    """Choose the method where the call does not say it, for workers on this machine or those of a Dask scheduler.

    A cluster that is busy or has no worker yet is not measured, and the method stays `ist`.
    """
    if not choose.leaves_open(job):
        return job, None
    measured = None
    if scheduler is not None:
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own
            measured = thread.submit(asyncio.run, _measured(scheduler, job)).result()
        if measured is None:
            return job, None
    fails = user_code("model or data: a step of training fails (", ")")
    with fails, seeded(job.training.seed), torch.enable_grad():  # whatever the caller's mode, as on workers
        if measured is None:
            fleet = local_figures(job, worker_bytes(job), prepare)
        else:
            fleet = replace(measured, step_seconds=steps_here(job, measured.memory_bytes, prepare))
        decided, choice = choose.choose_settings(job, fleet, _tell, prepare)
    _tell(f"trained by {choice.name}, as method is not given: {choice.why[0]}")
    return decided, ForecastTracker(choice.expected.as_record(), choice.why)


async def _measured(scheduler: str, job: Job) -> FleetFigures | None:
    """Return the rates and the memory of a cluster's workers, or None if they cannot be measured now."""
    await check_reachable(scheduler)
    async with existing_cluster(scheduler) as client:
        try:
            return None if await occupied(client) else await probe_fleet(client, job, job.nodes.count, timed=False)
        except (RunError, RefusedError) as error:
            _tell(f"the cluster cannot be measured ({error}): trained by ist, as method is not given")
            return None


def _run(composition: Composition, sinks: Sequence[Sink], write: Callable[[], None]) -> RunOutcome:
    """Train to the end, also where an event loop runs already (a notebook): there Ctrl-C stops it too.

    Args:
        composition: The run.
        sinks: Called with every event.
        write: Called once the run directory is this run's.
    """
    stops: list[Callable[[], object]] = []

    def on_start(stop: Callable[[], None], _record: Recorder) -> None:
        write()
        stops.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop))

    training = composition.launch(sinks=sinks, on_start=on_start)
    if not _in_an_event_loop():
        return asyncio.run(training)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, training)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                if running.done():
                    raise
                for stop in stops:
                    stop()


def _in_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
