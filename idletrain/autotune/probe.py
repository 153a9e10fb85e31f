"""Measure a fleet for the forecast in under ten seconds, and cache the result for a day."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from distributed.utils import get_ip

from idletrain.autotune import choose, forecast, step_tasks
from idletrain.autotune.choose import Prepare, Variant
from idletrain.autotune.forecast import FleetFigures
from idletrain.fabric.analysis import statistics
from idletrain.fabric.analysis.samples import Point
from idletrain.fabric.measuring import presets, tasks
from idletrain.fabric.measuring.comms import ProbeServers
from idletrain.fabric.measuring.nodes import MeasuredNodes, NodeSilentError
from idletrain.fabric.measuring.presets import QUICK
from idletrain.fabric.measuring.sockets import SocketAddress
from idletrain.fabric.measuring.tasks import LinkProbe
from idletrain.job import Job
from idletrain.nn import travel
from idletrain.nn.prepare import prepare_job
from idletrain.worker import tasks as worker_tasks
from idletrain.worker.lease_spec import version

PROBE_CACHE_SECONDS = 24 * 3600.0
SINGLE_REPEATS = 3  # nodes whose links are measured one by one
CALLS = 5
PROBE_OPEN_SECONDS = 300.0  # a worker may have to fetch the data first
STEP_SECONDS = 1.5  # for the steps of all variants together, of each at least one
CONCURRENT_REPEATS = 18  # transfers of each node at once; with so many, the call's own time matters little
FIRST_BYTES, GROWTH = 64 * presets.KB, 4  # the first transfer, and the factor until one lasts long enough to time
COMMIT_BYTES, COMMITS = 4_000_000, 3  # size and number of the updates that time a commit
HEAD_NODE = -1
NO_PORT = 0  # of plain sockets, which report CPU seconds; the forecast needs none


async def probe_fleet(
    client: Client, job: Job, nodes: int | None = None, prepare: Prepare = prepare_job, *, timed: bool = True
) -> FleetFigures:
    """Measure how fast a cluster's workers pull, push and compute a job's subnets.

    Args:
        client: An asynchronous client of the cluster.
        job: The job to train.
        nodes: Number of nodes to forecast for; as many as there are workers if None.
        prepare: Builds the network and opens the data of a job with other settings.
        timed: Whether the workers also time steps of the networks that the job names.

    Raises:
        RunError: There is no worker, or one fails.
        RefusedError: Workers run other versions.
        JobError: The job's settings contradict each other in every way that it leaves open.
    """
    workers = await MeasuredNodes.of(client)
    token = secrets.token_hex(16)
    host = get_ip(client.scheduler.address.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]"))
    servers = ProbeServers(token)
    try:
        await servers.open(host, client.security)
        probes = [
            LinkProbe(node, HEAD_NODE, SocketAddress(host, NO_PORT, servers.addresses), token)
            for node in range(len(workers))
        ]
        alone = {transport: await _alone(workers, probes, transport) for transport in ("pull", "push")}
        # All together are at least as fast as one alone, in turns; small concurrent payloads may measure less.
        together = {
            transport: max(rate, await _together(workers, probes, transport, rate)) for transport, rate in alone.items()
        }
    finally:
        await servers.close()
    calls = [await _timed(lambda: workers.call(0, tasks.unused_port, "127.0.0.1")) for _ in range(CALLS)]
    memory_bytes = min(node["memory_bytes"] for node in await workers.call_all(worker_tasks.describe))
    count = nodes or len(workers)
    variants = await asyncio.to_thread(choose.variants, job, count, memory_bytes, prepare) if timed else []
    return FleetFigures(
        count,
        alone["pull"],
        alone["push"],
        together["pull"],
        together["push"],
        statistics.median(calls),
        await asyncio.to_thread(commit_rate),
        memory_bytes,
        await _step_seconds(workers, variants),
    )


async def _alone(workers: MeasuredNodes, probes: list[LinkProbe], transport: str) -> float:
    """Return the bytes a second of one node alone, the median of a few nodes."""
    rates = []
    for probe in probes[:SINGLE_REPEATS]:
        size = FIRST_BYTES
        while True:
            (point,) = await _points(workers, probe, transport, size, QUICK.transfers)
            if size >= QUICK.transfer_most or size / statistics.rate(point) > QUICK.transfer_seconds / GROWTH:
                break
            size = min(GROWTH * size, QUICK.transfer_most)
        rates.append(statistics.rate(point))
    return statistics.median(rates)


async def _together(workers: MeasuredNodes, probes: list[LinkProbe], transport: str, alone: float) -> float:
    """Return the bytes a second of all nodes at once, from the first call to the last answer: a node that starts early
    or ends late has the link to itself, so its own rate would be too high.
    """
    size, started = presets.transfer_bytes(QUICK, alone / len(probes)), time.perf_counter()
    results = await asyncio.gather(*(_points(workers, probe, transport, size, CONCURRENT_REPEATS) for probe in probes))
    return sum(point.moved_bytes for (point,) in results) / (time.perf_counter() - started)


async def _points(
    workers: MeasuredNodes, probe: LinkProbe, transport: str, size: int, repeats: int
) -> tuple[Point, ...]:
    result: tasks.ProbeResult = await workers.call(probe.source, tasks.transfers, probe, transport, size, repeats)
    if result.fault:
        raise NodeSilentError(
            f"{workers.names[probe.source]} cannot reach {probe.address.host}, this machine ({result.fault}); "
            "let TCP through"
        )
    return result.points


async def _step_seconds(workers: MeasuredNodes, variants: list[Variant]) -> dict[str, float]:
    """Return the seconds of a local step on the slowest node while all compute, for each variant that fits."""
    seconds: dict[str, float] = {}
    fitting = [variant for variant in variants if variant.fits]
    for variant in fitting:
        try:
            await workers.call_all(
                step_tasks.open_work, travel.dumps(variant.prepared.program), seconds=PROBE_OPEN_SECONDS
            )
            paces = await workers.call_all(step_tasks.work_pace, STEP_SECONDS / len(fitting))
            seconds[variant.key] = forecast.slowest(paces)
        finally:
            await workers.call_each(step_tasks.close_work, [(node, ()) for node in range(len(workers))])
    return seconds


def commit_rate() -> float:
    """Measure the bytes a second at which written updates are synced, read and added to the network."""
    update = np.random.default_rng(0).random(COMMIT_BYTES // 4, dtype=np.float32)
    network, seconds = np.zeros_like(update), []
    with tempfile.TemporaryDirectory(prefix="idletrain-survey-") as folder:
        for probe in range(COMMITS):
            path = Path(folder) / str(probe)
            with path.open("wb") as file:
                file.write(update.data)  # not timed: in a run, updates are written before the round ends
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
            network += np.fromfile(path, dtype=np.float32)
            seconds.append(time.perf_counter() - started)
    return COMMIT_BYTES / statistics.median(seconds)


async def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def fleet_key(*arguments: object) -> str:
    """Return a fleet's key in the cache, from the arguments that identify it and idletrain's version."""
    return hashlib.sha256(json.dumps([version(), *map(str, arguments)]).encode()).hexdigest()[:16]


def load_figures(folder: Path, key: str, now: float) -> FleetFigures | None:
    """Return a fleet's figures measured within a day before `now` (Unix seconds), or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        tree = json.loads((folder / f"{key}.json").read_text())
        if 0 <= now - tree["seen"] < PROBE_CACHE_SECONDS:
            return FleetFigures(**tree["fleet"])
    return None


def save_figures(folder: Path, key: str, fleet: FleetFigures, now: float) -> None:
    """Cache a fleet's figures; if the disk has no room, they are measured again next time."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.json"):
            if now - file.stat().st_mtime > PROBE_CACHE_SECONDS:
                file.unlink()
        (folder / f"{key}.json").write_text(json.dumps({"seen": now, "fleet": asdict(fleet)}))
