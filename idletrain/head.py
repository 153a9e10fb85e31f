"""`idletrain node` in the role of the head: leads one run in a cloud from start to end, on a machine that is not taken.

Nobody needs to watch it. What is durable lies below the run's prefix; the fleet is its own to keep and to end; it stops
at its deadline, at the budget, and when no node comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from distributed.security import Security

from idletrain.errors import RefusedError
from idletrain.export import load_run, save
from idletrain.fleet import cost, record, teardown
from idletrain.fleet.aws import Account
from idletrain.fleet.certificates import Identity
from idletrain.fleet.keeper import Keeper
from idletrain.fleet.lease import Lease
from idletrain.fleet.metadata import Metadata
from idletrain.fleet.node import unpack
from idletrain.fleet.record import Record
from idletrain.fleet.requests import TAG
from idletrain.job import Job
from idletrain.launch import Options, launch, local_scheduler
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.observe.records import Recorder, summarise
from idletrain.rounds import mirror
from idletrain.rounds.mirror import Mirror
from idletrain.rounds.runner import Ending
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
PORT = 8786  # Dask's own; each head has an address to itself
LIMIT_POLL_SECONDS = 1.0
LAST_MINUTES_SECONDS = 180.0  # before the deadline: time to write the last snapshot and to take the fleet down
MODEL = "model.safetensors"
SUMMARY = "summary.json"


async def serve(metadata: Metadata) -> None:
    """Lead the run that this machine's tags name, then take everything of it down but this machine.

    Raises:
        RefusedError: another head leads it.
        IdletrainError: it cannot go on; the reason is in the run's record, too.
    """
    tags = metadata.tags()
    account, me = Account(metadata.region()), metadata.instance_id()
    prefix = S3Prefix.at(tags[TAG + "prefix"], account.s3)
    run = record.read(prefix)
    lease = Lease(prefix, me)
    await lease.take()
    address = f"tls://{metadata.private_address()}:{PORT}"
    identity = account.identity(run.run, "head")
    keeper = Keeper(account, run, address)
    try:
        await _lead(run, prefix, keeper, identity, metadata.private_address(), lease)
    except RefusedError:  # the run is another head's now, and so are its machines
        raise
    except Exception as error:
        record.update(prefix, failure=str(error))
        await _end(account, run, prefix, me, lease)
        raise
    else:
        await _end(account, run, prefix, me, lease)


async def _end(account: Account, run: Record, prefix: S3Prefix, me: str, lease: Lease) -> None:
    await asyncio.to_thread(teardown.down, account, run.run, prefix, me)
    await lease.give_back()


async def _lead(run: Record, prefix: S3Prefix, keeper: Keeper, identity: Identity, host: str, lease: Lease) -> None:
    """Run the job beside everything that has to go on meanwhile; whatever of that fails, ends it."""
    place = Path.cwd()
    job = Job.model_validate({**run.job, "checkpoint": {**run.job["checkpoint"], "to": str(place / "runs")}})
    keeping = [asyncio.ensure_future(keeper.keep()), asyncio.ensure_future(lease.keep())]  # nodes boot while we prepare
    working = asyncio.ensure_future(_work(run, job, prefix, keeper, identity, host))
    try:
        done, _ = await asyncio.wait((working, *keeping), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (working, *keeping):
            task.cancel()
        await asyncio.gather(working, *keeping, return_exceptions=True)


async def _work(run: Record, job: Job, prefix: S3Prefix, keeper: Keeper, identity: Identity, host: str) -> None:
    resumed = await asyncio.to_thread(mirror.restore, prefix, job.run_dir)
    await asyncio.to_thread(unpack, prefix, Path.cwd())
    sys.path.insert(0, "")  # the user's own factories
    prepared = await asyncio.to_thread(_prepare, job)
    limits: list[asyncio.Task[None]] = []

    def begun(stop: Callable[[], None], tell: Recorder) -> None:
        keeper.attach(tell)
        limits.append(asyncio.ensure_future(_watch_limits(run, keeper, stop, tell)))

    @contextlib.asynccontextmanager
    async def cluster() -> AsyncIterator[tuple[str, Security]]:
        async with local_scheduler(job.run_dir, host, PORT, identity) as address:
            yield address, identity.security()

    job.run_dir.mkdir(parents=True, exist_ok=True)
    copy = Mirror(job.run_dir, prefix)
    copying = asyncio.ensure_future(copy.keep())
    try:
        ending = await launch(job, prepared, Options(resume=resumed, cluster=cluster, begun=begun, sinks=(keeper,)))
    finally:
        for task in (copying, *limits):
            task.cancel()
        await asyncio.gather(copying, *limits, return_exceptions=True)
        await asyncio.to_thread(copy.copy)
    await asyncio.to_thread(_bring_home, job, prefix, ending)


async def _watch_limits(run: Record, keeper: Keeper, stop: Callable[[], None], tell: Recorder) -> None:
    """Stop the run, in a state to go on from, when it has had its time or its money, or nobody works for it."""
    nodes = run.job["nodes"]
    while True:
        await asyncio.sleep(LIMIT_POLL_SECONDS)
        idle = time.monotonic() - keeper.idle_since if keeper.idle_since is not None else 0.0
        reasons = {
            "its deadline is near": time.time() > run.deadline - LAST_MINUTES_SECONDS,
            f"its budget of ${nodes['budget_usd']} is used up": cost.must_stop(keeper.spent_usd, nodes["budget_usd"]),
            f"no node came for {nodes['idle_duration']:.0f} s": idle > nodes["idle_duration"],
        }
        for reason, holds in reasons.items():
            if holds:
                tell("stopping", reason=reason)
                stop()
                return


def _prepare(job: Job) -> Prepared:
    return from_settings(job.model, job.data, job.training)


def _bring_home(job: Job, prefix: S3Prefix, ending: Ending) -> None:
    """What the user takes away: the model and the run's summary, below the prefix."""
    path = job.run_dir / MODEL
    save(load_run(job.run_dir).module(), path)
    prefix.put(MODEL, path.read_bytes())
    summary = summarise(job.run_dir / "events.jsonl").as_record()
    prefix.put(SUMMARY, json.dumps(summary, indent=1).encode())
    logger.info("run %s: %s", job.name, ending.status)
