"""Measure how fast subnets travel, and whether the scheduler's memory grows with them.

A worker process pulls and pushes a 100 MB subnet through the real Store and StoreClient over loopback, without and
with TLS; a push is inspected and written as a run does it (payload, then ledger). Then a real run of 20 rounds with
four subnets of 26 MB, with the scheduler's resident memory sampled at every commit.

    python -m benchmarks.exchange [--tiny] [--json FILE]

Targets: 1.5 GB/s without TLS, 0.55 GB/s with it; the scheduler grows by less than 10 MB.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from distributed.security import Security
from torch import Tensor

from benchmarks.report import Figure, at_least, at_most, report, with_preset
from benchmarks.runs import noise_data, of_kind, run, scheduler_pid, temporary_job
from idletrain.cluster import dask_settings
from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import (
    AcceptanceRule,
    Activity,
    LeaseId,
    LockstepGroup,
    PushHeader,
    Receipt,
    Reply,
    checksum,
    inspect,
)
from idletrain.exchange.parts import Parts
from idletrain.exchange.store import StoreServer
from idletrain.observe.records import Record
from idletrain.rounds.durable import updates
from idletrain.rounds.durable.write_ahead_log import WriteAheadLog

MB, GB = 1e6, 1e9
LEASE = LeaseId("bench", 1, 0, 0, 1)
RATE_TARGETS = {"tcp": 1.5, "tls": 0.55}  # GB/s


@dataclass(frozen=True)
class Preset:
    """Sizes and repetitions."""

    subnet_bytes: int = 100_000_000
    repeats: int = 15
    hidden: int = 32_768  # of the run whose scheduler is watched: 4 subnets of 26 MB
    rounds: int = 20


TINY = Preset(subnet_bytes=1_000_000, repeats=2, hidden=256, rounds=3)


class BenchHead:
    """A head with one subnet to lease, which makes every push durable as `rounds.durable.run_directory` does."""

    def __init__(self, folder: Path, flat: Tensor) -> None:
        self._path, self._flat, self._wal = folder / "updates", flat, WriteAheadLog(folder / "wal")
        self._parts = Parts()

    def program(self) -> bytes:
        """See `Head`."""
        return b""

    async def pull(self, lease: LeaseId, start: int, stop: int | None, at: int | None) -> tuple[int, Tensor] | Reply:  # noqa: ARG002
        """See `Head`."""
        return 0, self._flat[start:stop]

    def part(self, header: PushHeader, start: int, frames: Sequence[memoryview]) -> Reply:
        """See `Head`."""
        held = self._parts.hold(header.lease.attempt, (header.steps, True), start, frames, self._flat.nbytes)
        return Reply.ACCEPTED if held else Reply.WRONG_SHAPE

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `Head`."""
        frames = frames or self._parts.payload(header.lease.attempt, (header.steps, True))
        fault = await asyncio.to_thread(inspect, header, frames, self._flat.nbytes)
        if fault is None:
            await asyncio.to_thread(updates.write, self._path, 0, frames)
            await asyncio.to_thread(self._wal.append, "stage", checksum=header.checksum)
        self._parts.drop(header.lease.attempt)
        return Receipt(fault or Reply.ACCEPTED)

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:  # noqa: ARG002
        """See `Head`."""
        return AcceptanceRule(size, 1.0)

    def part_arrived(self, *_: Any) -> bool:
        """See `Head`."""
        return True

    def stream_position(self, lease: LeaseId) -> str:  # noqa: ARG002
        return ""

    async def late_rows(self, lease: LeaseId, frames: Sequence[memoryview]) -> Reply:  # noqa: ARG002
        """See `Head`; no payload is ever lacking."""
        return Reply.NOT_LEASED

    def beat(self, lease: LeaseId, steps: int, doing: Activity) -> Reply:  # noqa: ARG002 (Head's)
        """See `Head`."""
        return Reply.ACCEPTED

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:  # noqa: ARG002
        """See `Head`; no worker of this bench trains in lockstep."""
        return Reply.STALE_ROUND

    def close(self) -> None:
        """Close the ledger."""
        self._wal.close()


def worker_side(address: str, security: Security, repeats: int, answers: multiprocessing.connection.Connection) -> None:
    """Pull and push in turn; sends back the seconds of each. Runs in a process of its own."""
    dask_settings.apply()
    answers.send(asyncio.run(pull_and_push(address, security, repeats)))


async def pull_and_push(address: str, security: Security, repeats: int) -> list[tuple[float, float]]:
    """Return the seconds of each pull and of each push; the first pair, which opens the connection, is left out."""
    client = StoreClient(address, security.get_connection_args("worker"))
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        _, flat = await client.pull(LEASE)
        pulled = time.perf_counter()
        digest = await asyncio.to_thread(checksum, [flat.numpy().data.cast("B")])
        receipt = await client.push(PushHeader(LEASE, 1, 0.0, digest), flat)
        pushed = time.perf_counter()
        assert receipt.reply is Reply.ACCEPTED
        seconds.append((pulled - started, pushed - pulled))
    await client.close()
    return seconds[1:]


async def serve(preset: Preset, security: Security) -> list[tuple[float, float]]:
    """Return the seconds of every pull and push of a worker process."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        head = BenchHead(Path(folder), torch.rand(preset.subnet_bytes // 4))
        store = StoreServer(head, security)
        address = await store.listen("127.0.0.1")
        process = context.Process(target=worker_side, args=(address, security, preset.repeats, child_end))
        process.start()
        child_end.close()
        seconds: list[tuple[float, float]] = await asyncio.to_thread(parent_end.recv)
        await asyncio.to_thread(process.join)
        await store.close()
        head.close()
    return seconds


def scheduler_bytes(preset: Preset) -> list[int]:
    """Return the scheduler's resident bytes after every round of a real run."""
    seen: list[int] = []
    tree = {
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [784, preset.hidden, 10], "norm": None}},
        "data": noise_data(samples=64, inputs=784),
        "training": {
            "optimizer": {"name": "sgd", "lr": 0.1},
            "local_steps": 1,
            "rounds": preset.rounds,
            "batch_size": 8,
            "evaluate_every": preset.rounds,
        },
    }
    with temporary_job(tree) as job:

        def sample(event: Record) -> None:
            if of_kind([event], "round_committed"):
                seen.append(psutil.Process(scheduler_pid(job)).memory_info().rss)

        asyncio.run(run(job, [sample]))
    return seen


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    dask_settings.apply()
    figures: list[Figure] = []
    for scheme, security in (("tcp", Security()), ("tls", Security.temporary())):
        seconds = asyncio.run(serve(preset, security))
        size = preset.subnet_bytes / GB
        pulls, pushes = [size / pull for pull, _ in seconds], [size / push for _, push in seconds]
        both = [2 * size / (pull + push) for pull, push in seconds]
        for what, rates in (("pull", pulls), ("push", pushes), ("pull, then push", both)):
            name = f"{what}, {preset.subnet_bytes / MB:g} MB, {scheme}"
            figures.append(at_least(name, statistics.median(rates), "GB/s", RATE_TARGETS[scheme], rates))
    resident = [size / MB for size in scheduler_bytes(preset)]
    name = f"scheduler's growth over {preset.rounds} rounds"
    figures.append(at_most(name, max(resident) - resident[0], "MB", 10.0, resident))
    return report("exchange", options, figures, subnet_bytes=preset.subnet_bytes)


if __name__ == "__main__":
    main()
