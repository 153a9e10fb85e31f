"""Run `idletrain node` in the role of a worker: size its worker processes, join the head node, leave upon a notice.

It reads all its settings from the instance metadata and knows nothing of rounds. When it ends, the machine's boot
script shuts the machine down, so an unused node costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from idletrain.cloud.account import Announcement, CloudMachine, NoMetadataError
from idletrain.cloud.machines import TAG
from idletrain.cloud.workdir import unpack
from idletrain.cluster import local
from idletrain.cluster.identity import Identity
from idletrain.errors import RunError
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
# A notice comes at most two minutes ahead, on best effort; aws-node-termination-handler polls as often.
NOTICE_POLL_SECONDS = 1.0
NODE_POLL_SECONDS = 0.1
SCHEDULER_SECONDS = 300.0  # the head node boots at the same time
SCHEDULER_CONNECT_SECONDS = 5.0
DRAIN_SECONDS = 90.0  # of the 120 s of a notice
NODE_RESERVED_BYTES = 700 << 20  # the operating system, Docker and this process


async def serve(machine: CloudMachine, memory_bytes: int | None, slots: int | None) -> None:
    """Run worker processes on this machine until the run ends or the machine is reclaimed.

    Args:
        machine: This machine.
        memory_bytes: RAM to use; None for all but the system's.
        slots: Worker processes; None for as many as cores and RAM allow and the run uses.

    Raises:
        RunError: the head node does not come up.
    """
    local.warm_up()  # while the head boots
    tags = machine.tags()
    scheduler, run = tags[TAG + "scheduler"], tags[TAG + "run"]
    account = machine.account()
    identity = account.identity(run, "worker")
    directory = Path.cwd()
    unpack(S3Prefix.at(tags[TAG + "prefix"], account.s3), directory)
    memory_bytes = memory_bytes or psutil.virtual_memory().total - NODE_RESERVED_BYTES
    count = slots or slots_in(memory_bytes, int(tags[TAG + "slot-bytes"]), int(tags[TAG + "slots"]))
    options = identity.write(directory / "identity")
    await _wait_for_scheduler(scheduler)
    fleet = local.LocalFleet(scheduler, memory_bytes // count, directory / "logs", machine.instance_id(), options)
    try:
        fleet.start(count)
        await _until_taken(fleet, machine, count)
        await _send_last_words(fleet.last_words(), scheduler, identity)
    finally:
        await fleet.close()


def slots_in(memory_bytes: int, slot_bytes: int, max_slots: int) -> int:
    """Return how many subnets this machine trains at the same time, one at least."""
    return max(1, min(max_slots, memory_bytes // slot_bytes, psutil.cpu_count() or 1))


async def _until_taken(fleet: local.LocalFleet, machine: CloudMachine, count: int) -> None:
    """Watch the workers and the cloud's notices; return once the workers have ended or are drained."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    watcher = asyncio.ensure_future(_watch(machine, fleet, stop))
    try:
        while len(fleet.alive()) == count and not stop.is_set():
            await asyncio.sleep(NODE_POLL_SECONDS)
        fleet.notice(fleet.alive())  # one worker that ended by itself ends all: a new machine replaces this one
        for _ in range(round(DRAIN_SECONDS / NODE_POLL_SECONDS)):
            if not fleet.alive():
                return
            await asyncio.sleep(NODE_POLL_SECONDS)
    finally:
        watcher.cancel()


async def _send_last_words(text_by_worker: Mapping[str, str], scheduler: str, identity: Identity) -> None:
    """Send the head the last lines of logs that end with this machine, and write them to its console."""
    if not text_by_worker:
        return
    from distributed.core import rpc  # with it Dask, which takes a second of a machine's start

    for name, text in text_by_worker.items():
        logger.error("worker %s ended by itself; the last lines of its log:\n%s", name, text)
    arguments = identity.security().get_connection_args("worker")
    with suppress(OSError):  # the head may have ended, and the workers with it
        async with rpc(scheduler, connection_args=arguments, timeout=SCHEDULER_CONNECT_SECONDS) as remote:
            for name, text in text_by_worker.items():
                await remote.log_event(topic="idletrain", msg={"action": "last-words", "name": name, "text": text})


async def _watch(machine: CloudMachine, fleet: local.LocalFleet, stop: asyncio.Event) -> None:
    """Set `stop` upon an interruption notice; report the first rebalance recommendation to the head node."""
    warned = False
    while not stop.is_set():
        announced = Announcement()
        with suppress(NoMetadataError):  # the service answered at boot; a late answer comes with the next poll
            announced = await asyncio.to_thread(machine.announced)
        if announced.notice:
            logger.info("this machine will be reclaimed: its subnets are uploaded")
            stop.set()
        elif announced.rebalance and not warned:
            warned = True
            fleet.warn(fleet.alive())
        await asyncio.sleep(NOTICE_POLL_SECONDS)


async def _wait_for_scheduler(scheduler: str) -> None:
    host, _, port = scheduler.removeprefix("tls://").rpartition(":")
    deadline = time.monotonic() + SCHEDULER_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):  # also TimeoutError, where nothing at all answers
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), SCHEDULER_CONNECT_SECONDS)
            writer.close()
            return
        await asyncio.sleep(NODE_POLL_SECONDS)
    raise RunError(f"the head at {scheduler} did not come up in {SCHEDULER_SECONDS:.0f} s; see `idletrain logs`")
