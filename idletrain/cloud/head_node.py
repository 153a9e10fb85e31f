"""`idletrain node` in the role of the head: leads one run in a cloud from start to end, on a machine that is not taken.

Nobody needs to watch it. What is durable lies below the run's prefix; the fleet is its own to keep and to end; it stops
at its deadline, at the budget, and when no node comes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging

from idletrain.cloud import record, teardown
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.metadata import Metadata
from idletrain.cloud.aws.requests import TAG
from idletrain.cloud.controller import FleetController
from idletrain.cloud.leader_lease import LeaderLease
from idletrain.cloud.record import RunRecord
from idletrain.cloud.workdir import RUNS
from idletrain.cluster import dask_scheduler
from idletrain.cluster.identity import Identity
from idletrain.errors import IdletrainError, RefusedError
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
PORT = 8786  # Dask's own; each head has an address to itself


async def serve_head(metadata: Metadata) -> None:
    """Lead the run that this machine's tags name, then take everything of it down but this machine.

    Raises:
        RefusedError: another head leads it.
        IdletrainError: it cannot go on; the reason is in the run's record, too.
    """
    tags = metadata.tags()
    account, me = Account(metadata.region()), metadata.instance_id()
    prefix = S3Prefix.at(tags[TAG + "prefix"], account.s3)
    run = record.read(prefix)
    lease = LeaderLease(prefix, me)
    await lease.acquire()
    if (run := record.read(prefix)).state != "running":  # its launcher gave up while we booted
        raise RefusedError(f"run {run.run} was ended before its head came up; start it again with --resume")
    address = f"tls://{metadata.private_address()}:{PORT}"
    identity = account.identity(run.run, "head")
    keeper = FleetController(account, run, address)
    try:
        await _lead(run, prefix, keeper, identity, metadata.private_address(), lease)
    except RefusedError:  # the run is another head's now, and so are its machines
        raise
    except Exception as error:
        if not isinstance(error, IdletrainError):
            logger.exception("a bug")
        try:
            record.update(prefix, failure=_explained(error, run.run, me))
        finally:  # whatever is the matter with the record: machines cost money
            await _end(account, run, prefix, me, lease)
        raise
    else:
        await _end(account, run, prefix, me, lease)


def _explained(error: Exception, run: str, me: str) -> str:
    """Why a run failed, for its record: a bug's own words would say nothing to its user."""
    if isinstance(error, IdletrainError):
        return str(error)
    return f"the head met a bug, not your fault: {error!r}; please send what `idletrain logs {run} --node {me}` shows"


async def _end(account: Account, run: RunRecord, prefix: S3Prefix, me: str, lease: LeaderLease) -> None:
    await asyncio.to_thread(teardown.down, account, run.run, prefix, me)
    await lease.release()


async def _lead(
    run: RunRecord, prefix: S3Prefix, controller: FleetController, identity: Identity, host: str, lease: LeaderLease
) -> None:
    """Do the run's work beside everything that has to go on meanwhile; whatever of that fails, ends it.

    Nodes and scheduler start first: what the work itself needs takes seconds to import.
    """
    await controller.check()
    run_dir = RUNS / run.run
    run_dir.mkdir(parents=True, exist_ok=True)
    async with dask_scheduler.started(run_dir, host, PORT, identity) as address:
        keeping = [asyncio.ensure_future(controller.run()), asyncio.ensure_future(lease.renew())]
        lead = await asyncio.to_thread(importlib.import_module, "idletrain.cloud.head_run")
        working = asyncio.ensure_future(lead.work(run, prefix, controller, identity, address))
        try:
            done, _ = await asyncio.wait((working, *keeping), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (working, *keeping):
                task.cancel()
            await asyncio.gather(working, *keeping, return_exceptions=True)
