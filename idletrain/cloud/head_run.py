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
from idletrain.autotune.probe import survey
from idletrain.cloud.controller import Keeper
from idletrain.cloud.reconcile import Limits, why_stop
from idletrain.cloud.record import SUMMARY, Record
from idletrain.cloud.workdir import RUNS, unpack
from idletrain.cluster.identity import Identity
from idletrain.errors import RefusedError, RunError
from idletrain.export import load_run, save
from idletrain.job import Job
from idletrain.nn.prepare import from_settings
from idletrain.observe.forecast_record import Expectation
from idletrain.observe.records import Recorder, read
from idletrain.observe.report import Past, page
from idletrain.rounds.coordinator import Ending
from idletrain.rounds.durable import s3_mirror
from idletrain.rounds.durable.s3_mirror import Mirror
from idletrain.run import Options, launch, settle
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
LIMIT_POLL_SECONDS = 1.0
FIRST_NODE_SECONDS, OTHER_NODES_SECONDS = 180.0, 30.0  # that a fleet is waited for, to be looked at
MODEL = "model.safetensors"
REPORT = "report.html"


async def work(run: Record, prefix: S3Prefix, keeper: Keeper, identity: Identity, scheduler: str) -> None:
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
    expectation = Expectation()
    if not resumed and choose.leaves_open(job):
        job, expectation = await _decided(job, identity, scheduler)
    prepared = await asyncio.to_thread(from_settings, job.model, job.data, job.training, job.memory)
    limits: list[asyncio.Task[None]] = []

    def begun(stop: Callable[[], None], tell: Recorder) -> None:
        keeper.attach(tell)
        limits.append(asyncio.ensure_future(_watch_limits(run, keeper, stop, tell)))

    job.run_dir.mkdir(parents=True, exist_ok=True)
    copy = Mirror(job.run_dir, prefix)
    copying = asyncio.ensure_future(copy.keep())
    try:
        ending = await launch(
            job,
            prepared,
            Options(
                resume=resumed,
                cluster=(scheduler, identity.security()),
                begun=begun,
                sinks=(keeper,),
                command=run.command,
                allow_control=run.allow_control,
                expectation=expectation,
            ),
        )
    finally:
        keeper.detach()  # before anything is awaited: the records are closed
        for task in (copying, *limits):
            task.cancel()
        await asyncio.gather(copying, *limits, return_exceptions=True)
        await asyncio.to_thread(copy.copy)
    await asyncio.to_thread(_bring_home, job, prefix, ending)


async def _decided(job: Job, identity: Identity, scheduler: str) -> tuple[Job, Expectation]:
    """The job with what it leaves open chosen for the nodes that come first; as it is, if none can be looked at."""
    async with Client(scheduler, asynchronous=True, security=identity.security(), set_as_default=False) as client:
        try:
            with contextlib.suppress(TimeoutError):  # of those who are there it is known
                await client.wait_for_workers(1, FIRST_NODE_SECONDS)
                await client.wait_for_workers(job.nodes.count, OTHER_NODES_SECONDS)
            fleet = await survey(client, job, job.nodes.count)
        except (RunError, RefusedError) as error:  # a node was taken meanwhile
            logger.warning("the fleet cannot be looked at (%s): the job is taken as it is", error)
            return job, Expectation()
    job, choice = await asyncio.to_thread(choose.chosen, job, fleet)
    for line in choose.lines(choice):
        logger.info(line)
    return job, Expectation(choice.expected.as_record(), choice.why)


async def _watch_limits(run: Record, keeper: Keeper, stop: Callable[[], None], tell: Recorder) -> None:
    """Stop the run, in a state to go on from, when it has had its time or its money, or nobody works for it."""
    nodes = run.job["nodes"]
    rules = Limits(run.deadline, nodes["budget_usd"], nodes["idle_duration"])
    while True:
        await asyncio.sleep(LIMIT_POLL_SECONDS)
        idle_seconds = time.monotonic() - keeper.idle_since if keeper.idle_since is not None else 0.0
        if reason := why_stop(rules, keeper.spent_usd, idle_seconds, time.time()):
            tell("stopping", reason=reason)
            stop()
            return


def _bring_home(job: Job, prefix: S3Prefix, ending: Ending) -> None:
    """What the user takes away: the model, the run's summary and its report, below the prefix."""
    path = job.run_dir / MODEL
    save(load_run(job.run_dir).module(), path)
    prefix.put(MODEL, path.read_bytes())
    past = Past.of(job.name, list(read(job.run_dir / "events.jsonl")), time.time())
    prefix.put(SUMMARY, json.dumps(past.summary.as_record(), indent=1).encode())
    prefix.put(REPORT, page([past]).encode())
    logger.info("run %s: %s", job.name, ending.status)
