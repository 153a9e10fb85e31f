"""A head's work proper: the job, beside its copy below the run's prefix, until it ends or meets a limit.

Apart from `head_node` because it needs torch, whose import takes seconds in which nodes can boot already.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from distributed import Client

from idletrain.autotune import choose
from idletrain.autotune.probe import probe_fleet
from idletrain.cloud.controller import FleetController
from idletrain.cloud.reconcile import Limits, why_stop
from idletrain.cloud.record import SUMMARY_KEY, RunRecord
from idletrain.cloud.workdir import RUNS, unpack
from idletrain.cluster.identity import Identity
from idletrain.errors import RefusedError, RunError
from idletrain.export import load_run, save
from idletrain.job import Job
from idletrain.nn.prepare import from_settings
from idletrain.observe.forecast_record import ForecastTracker
from idletrain.observe.records import Recorder, read
from idletrain.observe.report import PastRun, report_page
from idletrain.rounds.coordinator import RunOutcome
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import Mirror
from idletrain.run import RunOptions, launch, settle
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
LIMIT_POLL_SECONDS = 1.0
FIRST_NODE_SECONDS, OTHER_NODES_SECONDS = 180.0, 30.0  # that a fleet is waited for, to be looked at
MODEL_FILE = "model.safetensors"
REPORT_FILE = "report.html"


async def lead_run(
    run: RunRecord, prefix: S3Prefix, controller: FleetController, identity: Identity, scheduler: str
) -> None:
    """Run a run's job on the nodes that a keeper keeps.

    Args:
        run: The run.
        prefix: Where it is durable.
        keeper: Told of everything that happens.
        identity: The head's certificates.
        scheduler: The scheduler's address.
    """
    job = Job.model_validate({**run.job, "checkpoint": {**run.job["checkpoint"], "to": str(RUNS.absolute())}})
    resumed = await asyncio.to_thread(s3_mirror.restore, prefix, job.run_dir)
    await asyncio.to_thread(unpack, prefix, Path.cwd())
    sys.path.insert(0, "")  # the user's own factories
    job = await asyncio.to_thread(settle, job)
    expectation = ForecastTracker()
    if not resumed and choose.leaves_open(job):
        job, expectation = await _decided(job, identity, scheduler)
    prepared = await asyncio.to_thread(from_settings, job.model, job.data, job.training, job.memory)
    limits: list[asyncio.Task[None]] = []

    def begun(stop: Callable[[], None], report: Recorder) -> None:
        controller.attach(report)
        limits.append(asyncio.ensure_future(_watch_limits(run, controller, stop, report)))

    job.run_dir.mkdir(parents=True, exist_ok=True)
    copy = Mirror(job.run_dir, prefix)
    copying = asyncio.ensure_future(copy.keep())
    try:
        ending = await launch(
            job,
            prepared,
            RunOptions(
                resume=resumed,
                cluster=(scheduler, identity.security()),
                on_begun=begun,
                sinks=(controller,),
                command=run.command,
                allow_control=run.allow_control,
                forecast=expectation,
            ),
        )
    finally:
        controller.detach()  # before anything is awaited: the records are closed
        for task in (copying, *limits):
            task.cancel()
        await asyncio.gather(copying, *limits, return_exceptions=True)
        await asyncio.to_thread(copy.copy)
    await asyncio.to_thread(_upload_results, job, prefix, ending)


async def _decided(job: Job, identity: Identity, scheduler: str) -> tuple[Job, ForecastTracker]:
    """The job with what it leaves open chosen for the nodes that come first; as it is, if none can be looked at."""
    async with Client(scheduler, asynchronous=True, security=identity.security(), set_as_default=False) as client:
        try:
            with contextlib.suppress(TimeoutError):  # of those who are there it is known
                await client.wait_for_workers(1, FIRST_NODE_SECONDS)
                await client.wait_for_workers(job.nodes.count, OTHER_NODES_SECONDS)
            fleet = await probe_fleet(client, job, job.nodes.count)
        except (RunError, RefusedError) as error:  # a node was taken meanwhile
            logger.warning("the fleet cannot be looked at (%s): the job is taken as it is", error)
            return job, ForecastTracker()
    job, choice = await asyncio.to_thread(choose.choose_settings, job, fleet)
    for line in choose.choice_lines(choice):
        logger.info(line)
    return job, ForecastTracker(choice.expected.as_record(), choice.why)


async def _watch_limits(
    run: RunRecord, controller: FleetController, stop: Callable[[], None], report: Recorder
) -> None:
    """Stop the run, in a state to go on from, when it has had its time or its money, or nobody works for it."""
    nodes = run.job["nodes"]
    rules = Limits(run.deadline, nodes["budget_usd"], nodes["idle_duration"])
    while True:
        await asyncio.sleep(LIMIT_POLL_SECONDS)
        idle_seconds = time.monotonic() - controller.idle_since if controller.idle_since is not None else 0.0
        if reason := why_stop(rules, controller.spent_usd, idle_seconds, time.time()):
            report("stopping", reason=reason)
            stop()
            return


def _upload_results(job: Job, prefix: S3Prefix, ending: RunOutcome) -> None:
    """What the user takes away: the model, the run's summary and its report, below the prefix."""
    path = job.run_dir / MODEL_FILE
    save(load_run(job.run_dir).module(), path)
    prefix.put(MODEL_FILE, path.read_bytes())
    past = PastRun.of(job.name, list(read(job.run_dir / "events.jsonl")), time.time())
    prefix.put(SUMMARY_KEY, json.dumps(past.summary.as_record(), indent=1).encode())
    prefix.put(REPORT_FILE, report_page([past]).encode())
    logger.info("run %s: %s", job.name, ending.status)
