"""A head's work proper: the job, beside its copy below the run's prefix, until it ends or meets a limit.

Apart from `head` because it needs torch, whose import takes seconds in which nodes can boot already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from idletrain.export import load_run, save
from idletrain.fleet.identity import Identity
from idletrain.fleet.keeper import Keeper
from idletrain.fleet.reconcile import Limits, why_stop
from idletrain.fleet.record import SUMMARY, Record
from idletrain.fleet.workdir import RUNS, unpack
from idletrain.job import Job
from idletrain.launch import Options, launch, settle
from idletrain.nn.prepare import from_settings
from idletrain.observe.records import Recorder, read
from idletrain.observe.report import Past, page
from idletrain.rounds import mirror
from idletrain.rounds.mirror import Mirror
from idletrain.rounds.runner import Ending
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
LIMIT_POLL_SECONDS = 1.0
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
    resumed = await asyncio.to_thread(mirror.restore, prefix, job.run_dir)
    await asyncio.to_thread(unpack, prefix, Path.cwd())
    sys.path.insert(0, "")  # the user's own factories
    job = await asyncio.to_thread(settle, job)
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
            ),
        )
    finally:
        keeper.detach()  # before anything is awaited: the records are closed
        for task in (copying, *limits):
            task.cancel()
        await asyncio.gather(copying, *limits, return_exceptions=True)
        await asyncio.to_thread(copy.copy)
    await asyncio.to_thread(_bring_home, job, prefix, ending)


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
