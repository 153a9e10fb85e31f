"""`idletrain node` in the role of a worker: measures its machine, joins the head, and leaves when the cloud wants it.

All it needs it learns from its metadata; it knows nothing of rounds. When it ends, its machine's boot script shuts the
machine down, so a node that lost its use costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.metadata import Announcement, Metadata, NoMetadataError
from idletrain.cloud.aws.requests import TAG
from idletrain.cloud.workdir import unpack
from idletrain.cluster.identity import Identity
from idletrain.cluster.local import LocalFleet
from idletrain.errors import RunError
from idletrain.storage import S3Prefix

logger = logging.getLogger(__name__)
NOTICE_POLL_SECONDS = (
    1.0  # a notice is best effort, and two minutes at most; aws-node-termination-handler asks as often
)
NODE_POLL_SECONDS = 0.1
SCHEDULER_SECONDS = 300.0  # a head that boots beside us
SCHEDULER_CONNECT_SECONDS = 5.0
DRAIN_SECONDS = 90.0  # of the 120 of a notice
NODE_RESERVED_BYTES = 700 << 20  # the operating system, Docker and this process


async def serve(metadata: Metadata, memory_bytes: int | None, slots: int | None) -> None:
    """Lend this machine to its run until the run ends or the machine is taken.

    Args:
        metadata: What the machine knows of itself.
        memory_bytes: RAM to use; all but the system's when None.
        slots: Worker processes; as many as cores and RAM allow and the run makes use of when None.

    Raises:
        RunError: the head does not come up.
    """
    tags = metadata.tags()
    scheduler, run = tags[TAG + "scheduler"], tags[TAG + "run"]
    account = Account(metadata.region())
    identity = account.identity(run, "worker")
    place = Path.cwd()
    unpack(S3Prefix.at(tags[TAG + "prefix"], account.s3), place)
    memory_bytes = memory_bytes or psutil.virtual_memory().total - NODE_RESERVED_BYTES
    count = slots or slots_in(memory_bytes, int(tags[TAG + "slot-bytes"]), int(tags[TAG + "slots"]))
    options = write_identity(identity, place / "identity")
    await _reachable(scheduler)
    fleet = LocalFleet(scheduler, memory_bytes // count, place / "logs", metadata.instance_id(), options)
    try:
        fleet.start(count)
        await _until_taken(fleet, metadata, count)
    finally:
        await fleet.close()


def write_identity(identity: Identity, place: Path) -> tuple[str, ...]:
    """Certificates as files that nobody else can read; returns the options of `idletrain worker` that name them."""
    place.mkdir(mode=0o700, exist_ok=True)
    options: tuple[str, ...] = ()
    for option, text in (("ca-file", identity.ca), ("cert", identity.cert), ("key", identity.key)):
        with os.fdopen(os.open(place / option, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        options += (f"--tls-{option}", str(place / option))
    return options


def slots_in(memory_bytes: int, slot_bytes: int, max_slots: int) -> int:
    """Subnets that train here at the same time."""
    return max(1, min(max_slots, memory_bytes // slot_bytes, psutil.cpu_count() or 1))


async def _until_taken(fleet: LocalFleet, metadata: Metadata, count: int) -> None:
    """Watch the workers and what the cloud announces; returns once there is nothing left to do here."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    watching = asyncio.ensure_future(_watch(metadata, fleet, asked))
    try:
        while len(fleet.alive()) == count and not asked.is_set():
            await asyncio.sleep(NODE_POLL_SECONDS)
        fleet.notice(
            fleet.alive()
        )  # of several workers, one that ended by itself is the end of all: a new machine comes
        for _ in range(round(DRAIN_SECONDS / NODE_POLL_SECONDS)):
            if not fleet.alive():
                return
            await asyncio.sleep(NODE_POLL_SECONDS)
    finally:
        watching.cancel()


async def _watch(metadata: Metadata, fleet: LocalFleet, stop: asyncio.Event) -> None:
    """Turn an interruption notice into a drain, and the first rebalance recommendation into a warning to the head."""
    warned = False
    while not stop.is_set():
        said = Announcement()
        with suppress(NoMetadataError):  # it was there at boot; an answer that is late comes the next time
            said = await asyncio.to_thread(metadata.announced)
        if said.notice:
            logger.info("this machine will be taken: the running subnets go home")
            stop.set()
        elif said.rebalance and not warned:
            warned = True
            fleet.warn(fleet.alive())
        await asyncio.sleep(NOTICE_POLL_SECONDS)


async def _reachable(scheduler: str) -> None:
    host, _, port = scheduler.removeprefix("tls://").rpartition(":")
    until = time.monotonic() + SCHEDULER_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):  # where the address is gone, nothing answers at all: TimeoutError is one, too
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), SCHEDULER_CONNECT_SECONDS)
            writer.close()
            return
        await asyncio.sleep(NODE_POLL_SECONDS)
    raise RunError(f"the head at {scheduler} did not come up in {SCHEDULER_SECONDS:.0f} s; see `idletrain logs`")
