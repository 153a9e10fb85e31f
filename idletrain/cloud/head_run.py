"""Train a run's job on its head node and mirror its state below the run's prefix, until it ends or meets a limit.

Apart from `head_node` because it needs torch: while that is imported, which takes seconds, nodes boot already.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client

from idletrain.autotune import choose
from idletrain.autotune.probe import probe_fleet
from idletrain.cloud.controller import FleetController
from idletrain.cloud.reconcile import Limits, why_stop
from idletrain.cloud.record import MODEL_KEY, REPORT_KEY, SUMMARY_KEY, RunRecord, update
from idletrain.cloud.workdir import RUNS, unpack
from idletrain.cluster.identity import Identity
from idletrain.errors import RefusedError, RunError
from idletrain.export import load_run, save
from idletrain.job import Job
from idletrain.nn.prepare import prepare_job
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.records import Recorder, Sink, read_records
from idletrain.observe.report import PastRun, report_page
from idletrain.observe.summary import Summary
from idletrain.providers.scheduler import RunningCluster
from idletrain.rounds.coordinator import RunOutcome
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import Mirror
from idletrain.run import Composition, OnStart, RunOptions, compose
from idletrain.storage import S3Prefix, make_private

logger = logging.getLogger(__name__)
LIMIT_POLL_SECONDS = 1.0
FIRST_NODE_SECONDS, OTHER_NODES_SECONDS = 180.0, 30.0  # to wait for nodes before they are measured


@dataclass(frozen=True)
class RunHooks:
    """Functions that are called while a run trains.

    Attributes:
        sinks: Called with every event.
        on_start: Called once it has started, with a function that stops it and one that records an event.
        on_end: Called once nothing more can be recorded.
        summary: Accumulates its events, each before the sinks get it.
    """

    sinks: tuple[Sink, ...] = ()
    on_start: OnStart = lambda _stop, _record: None
    on_end: Callable[[], None] = lambda: None
    summary: Summary = field(default_factory=Summary)


async def lead_run(
    run: RunRecord, prefix: S3Prefix, controller: FleetController, identity: Identity, scheduler: str
) -> None:
    """Train a run's job on the nodes that a controller keeps.

    Args:
        run: The run.
        prefix: Where its durable state is copied to.
        controller: Gets every event, and records its own in the run.
        identity: The head's certificates.
        scheduler: The scheduler's address.
    """
    await unpack_code(prefix)
    limits: list[asyncio.Task[None]] = []

    def on_start(stop: Callable[[], None], record: Recorder) -> None:
        controller.attach(record)
        limits.append(asyncio.ensure_future(watch_limits(run, controller, stop, record)))

    try:
        await train(run, prefix, identity, scheduler, RunHooks((controller,), on_start, controller.detach))
    finally:
        for task in limits:
            task.cancel()
        await asyncio.gather(*limits, return_exceptions=True)


async def unpack_code(prefix: S3Prefix) -> None:
    """Make the user's own code importable, which a launch has packed below a run's prefix."""
    await asyncio.to_thread(unpack, prefix, Path.cwd())
    sys.path.insert(0, "")


async def train(run: RunRecord, prefix: S3Prefix, identity: Identity, scheduler: str, hooks: RunHooks) -> None:
    """Train a run's job to its end and mirror its state; begin with the state that its prefix holds.

    Args:
        run: The run.
        prefix: Where its durable state is copied to.
        identity: The head's certificates.
        scheduler: The address of a scheduler whose nodes train it.
        hooks: Functions that are called meanwhile.
    """
    job = Job.model_validate({**run.job, "checkpoint": {**run.job["checkpoint"], "to": str(RUNS.absolute())}})
    resumed = await asyncio.to_thread(s3_mirror.restore, prefix, job.run_dir)
    options = RunOptions(
        provider=RunningCluster(scheduler, identity.security()),
        resume=resumed,
        summary=hooks.summary,
        sinks=hooks.sinks,
        command=run.command,
        allow_control=run.allow_control,
    )
    composition = await _compose(job, options, identity, scheduler)
    make_private(job.run_dir)
    mirror = Mirror(job.run_dir, prefix)
    mirroring = asyncio.ensure_future(mirror.keep())
    try:
        outcome = await composition.launch(on_start=hooks.on_start)
    finally:
        hooks.on_end()  # before anything is awaited: the recorder is closed
        mirroring.cancel()
        await asyncio.gather(mirroring, return_exceptions=True)
        await asyncio.to_thread(mirror.copy)
    await asyncio.to_thread(_keep_results, job, prefix, outcome)


async def _compose(job: Job, options: RunOptions, identity: Identity, scheduler: str) -> Composition:
    """Compose the run in a thread, so that nodes are kept meanwhile; measure the fleet on this event loop."""
    loop = asyncio.get_running_loop()
    choices: list[Future[tuple[Job, ForecastTracker | None]]] = []

    def decide(settled: Job) -> tuple[Job, ForecastTracker | None]:
        if options.resume or not choose.leaves_open(settled):
            return settled, None
        choices.append(asyncio.run_coroutine_threadsafe(_choose_settings(settled, identity, scheduler), loop))
        return choices[0].result()

    try:
        return await asyncio.to_thread(compose, job, options, decide=decide, report=logger.info)
    except asyncio.CancelledError:
        for choice in choices:  # else the thread would wait for nodes, and the process for the thread
            choice.cancel()
        raise


async def _choose_settings(job: Job, identity: Identity, scheduler: str) -> tuple[Job, ForecastTracker | None]:
    """Choose the settings that the job leaves open, for the nodes that join first; keep the job if none can be
    measured.
    """
    prepare = choose.remembering(prepare_job)
    try:
        async with Client(scheduler, asynchronous=True, security=identity.security(), set_as_default=False) as client:
            with contextlib.suppress(TimeoutError):  # then those that joined are measured
                await client.wait_for_workers(1, FIRST_NODE_SECONDS)
                await client.wait_for_workers(job.nodes.count, OTHER_NODES_SECONDS)
            fleet = await probe_fleet(client, job, job.nodes.count, prepare)
    except (RunError, RefusedError, OSError) as error:  # a node was taken meanwhile, or the scheduler is gone
        logger.warning("the fleet cannot be measured (%s): the job runs with its default settings", error)
        return job, None
    job, choice = await asyncio.to_thread(choose.choose_settings, job, fleet, logger.info, prepare)
    for line in choose.choice_lines(choice):
        logger.info(line)
    return job, ForecastTracker(choice.expected.as_record(), choice.why)


async def watch_limits(
    run: RunRecord,
    controller: FleetController,
    stop: Callable[[], None],
    record: Recorder,
    needs_nodes: Callable[[], bool] = lambda: True,
) -> None:
    """Stop the run, resumably, at its deadline, at its budget, or when no node has worked for too long.

    Args:
        run: Its record.
        controller: Knows the nodes and what they have cost.
        stop: Stops it.
        record: Records why.
        needs_nodes: Whether it trains, so that time without a node counts.
    """
    nodes = run.job["nodes"]
    rules = Limits(run.deadline, nodes["budget_usd"], nodes["idle_duration"])
    while True:
        await asyncio.sleep(LIMIT_POLL_SECONDS)
        idle_seconds = controller.idle_seconds if needs_nodes() else 0.0
        if reason := why_stop(rules, controller.spent_usd, idle_seconds, time.time(), controller.waiting_for):
            record("stopping", reason=reason)
            stop()
            return


def _keep_results(job: Job, prefix: S3Prefix, outcome: RunOutcome) -> None:
    """Upload a run's results; a run that is done is done, whatever the cloud refuses: its snapshot has the network."""
    try:
        _upload_results(job, prefix, outcome)
    except Exception:
        logger.exception("the results of %s cannot be written", job.name)
        export = f"`idletrain export {job.name} --to model.safetensors` writes it from the run's snapshot"
        with contextlib.suppress(Exception):
            update(prefix, leftover=f"the model of {job.name} could not be written to {prefix.url}; {export}")


def _upload_results(job: Job, prefix: S3Prefix, outcome: RunOutcome) -> None:
    """Write the model, the run's summary and its report below the prefix, for the user to fetch."""
    path = job.run_dir / MODEL_KEY
    save(load_run(job.run_dir).module().state_dict(), path)
    prefix.put_file(MODEL_KEY, path)
    past = PastRun.of(job.name, list(read_records(job.run_dir / "events.jsonl")), time.time())
    prefix.put(SUMMARY_KEY, json.dumps(past.summary.as_record(), indent=1).encode())
    prefix.put(REPORT_KEY, report_page([past]).encode())
    logger.info("run %s: %s", job.name, outcome.status)
