"""Run the head node of one run in a cloud: `idletrain node` in the role of the head, on an on-demand machine.

Nobody needs to watch it: its durable state is below the run's prefix, it starts and ends the run's nodes itself, and it
stops at the deadline, at the budget, and when no node comes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Sequence

from idletrain.cloud import record, teardown
from idletrain.cloud.account import CloudAccount, CloudMachine
from idletrain.cloud.controller import FleetController
from idletrain.cloud.leader_lease import LeaderLease
from idletrain.cloud.machines import TAG
from idletrain.cloud.record import RunRecord
from idletrain.cloud.workdir import RUNS
from idletrain.cluster import dask_scheduler
from idletrain.cluster.identity import Identity
from idletrain.errors import IdletrainError, RefusedError
from idletrain.storage import S3Prefix, make_private

logger = logging.getLogger(__name__)
PORT = 8786  # Dask's default; each head has an address of its own


async def serve_head(machine: CloudMachine) -> None:
    """Lead the run that this machine's tags name, then end all of its resources except this machine.

    Raises:
        RefusedError: another head leads it.
        IdletrainError: it cannot continue; the reason is written to the run's record as well.
    """
    tags = machine.tags()
    account, instance = machine.account(), machine.instance_id()
    prefix = S3Prefix.at(tags[TAG + "prefix"], account.s3)
    run = record.read(prefix)
    lease = LeaderLease(prefix, instance)
    await lease.acquire()
    if (run := record.read(prefix)).state != "running":  # its launcher gave up, or the user, while we booted
        await _end(account, run, prefix, instance, lease)
        raise RefusedError(f"run {run.run} was ended before its head came up; start it again with --resume")
    try:
        identity = account.identity(run.run, "head")
        controller = FleetController(account, run, f"tls://{machine.private_address()}:{PORT}")
        await _lead(run, prefix, controller, identity, machine.private_address(), lease)
    except RefusedError:  # another head leads the run now, and has its machines
        raise
    except Exception as error:
        if not isinstance(error, IdletrainError):
            logger.exception("a bug")
        try:
            record.update(prefix, failure=_explained(error, run.run, instance))
        finally:  # even if the record cannot be written: machines cost money
            await _end(account, run, prefix, instance, lease)
        raise
    else:
        await _end(account, run, prefix, instance, lease)


def _explained(error: Exception, run: str, instance: str) -> str:
    """Return a sentence on why a run failed, for its record; for a bug, how to report it."""
    if isinstance(error, IdletrainError):
        return str(error)
    return (
        f"the head met a bug, not your fault: {error!r}; "
        f"please send what `idletrain logs {run} --node {instance}` shows"
    )


async def _end(account: CloudAccount, run: RunRecord, prefix: S3Prefix, instance: str, lease: LeaderLease) -> None:
    """End the run's other resources; what survives is named in its record and does not change how the run ended."""
    try:
        await asyncio.to_thread(teardown.take_down, account, run.run, prefix, instance, run.head_session)
    except IdletrainError as error:
        logger.error("%s", error)
        if (await asyncio.to_thread(record.read, prefix)).head_session == run.head_session:
            await asyncio.to_thread(record.update, prefix, state="ended", leftover=str(error))
    await lease.release()


async def _lead(
    run: RunRecord, prefix: S3Prefix, controller: FleetController, identity: Identity, host: str, lease: LeaderLease
) -> None:
    """Train while the nodes are kept and the lease is renewed; end all of it as soon as one part fails.

    Nodes and scheduler start first, because importing torch takes seconds; nodes are missed from the first one on.
    """
    await controller.check()
    tasks = [asyncio.ensure_future(c) for c in (controller.run(), controller.follow_prices(), lease.renew())]
    run_dir = RUNS / run.run
    make_private(run_dir)
    try:
        async with dask_scheduler.started(run_dir, host, PORT, identity) as address:
            try:
                name = "idletrain.cloud.head_sweep" if run.sweep else "idletrain.cloud.head_run"
                work = await asyncio.to_thread(importlib.import_module, name)
                lead = work.lead_sweep if run.sweep else work.lead_run
                tasks.append(asyncio.ensure_future(lead(run, prefix, controller, identity, address)))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:  # before the scheduler, without which nodes end, and would be replaced
                await _cancel(tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
