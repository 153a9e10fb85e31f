"""A quick look at a fleet for the forecast: under ten seconds, kept for a day."""

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

import cloudpickle
import numpy as np
from distributed import Client
from distributed.utils import get_ip

from idletrain.autotune import choose, forecast, step_tasks
from idletrain.autotune.choose import Variant
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
from idletrain.worker import tasks as worker_tasks
from idletrain.worker.lease_spec import version

PROBE_KEPT_SECONDS = 24 * 3600.0
SINGLE_REPEATS = 3  # nodes whose links are tried one by one
CALLS = 5
PROBE_OPEN_SECONDS = 300.0  # a worker may have to fetch the data first
STEP_SECONDS = 3.0  # of all ways to train together: what is left of ten
CONCURRENT_REPEATS = 18  # transfers of all at once, beside which the call takes little
FIRST_BYTES, GROWTH = 64 * presets.KB, 4  # of transfers, which grow until they last long enough to tell the rate
PROBE_BYTES, PROBES = 4_000_000, 3  # of the commit
HEAD_NODE = -1
NO_PORT = 0  # of plain sockets: CPU seconds, for which they are, are of no use here


async def probe_fleet(client: Client, job: Job, nodes: int | None = None) -> FleetFigures:
    """How fast subnets get to a cluster's workers and back, and how fast they compute.

    Args:
        client: An asynchronous client of the cluster.
        job: What will be trained there.
        nodes: For how many, if not for as many as there are.

    Raises:
        RunError: there is no worker, or one fails.
        RefusedError: workers run other versions.
        JobError: the job does not fit together, in no way that it leaves open.
    """
    team = await MeasuredNodes.of(client)
    token = secrets.token_hex(16)
    host = get_ip(client.scheduler.address.split("://", 1)[-1].rsplit(":", 1)[0].strip("[]"))
    posts = ProbeServers(token)
    try:
        await posts.open(host, client.security)
        visits = [
            LinkProbe(node, HEAD_NODE, SocketAddress(host, NO_PORT, posts.addresses), token)
            for node in range(len(team))
        ]
        alone = {over: await _alone(team, visits, over) for over in ("pull", "push")}
        # What one gets all get, in turns: their small payloads at once may tell less.
        every = {over: max(rate, await _together(team, visits, over, rate)) for over, rate in alone.items()}
    finally:
        await posts.close()
    calls = [await _timed(lambda: team.call(0, tasks.free_port, "127.0.0.1")) for _ in range(CALLS)]
    memory_bytes = min(told["memory_bytes"] for told in await team.call_all(worker_tasks.describe))
    variants = await asyncio.to_thread(choose.variants, job, nodes or len(team), memory_bytes)
    return FleetFigures(
        nodes or len(team),
        alone["pull"],
        alone["push"],
        every["pull"],
        every["push"],
        statistics.median(calls),
        await asyncio.to_thread(commit_rate),
        memory_bytes,
        await _step_seconds(team, variants),
    )


async def _alone(workers: MeasuredNodes, probes: list[LinkProbe], transport: str) -> float:
    """What one node gets, the median of some."""
    rates = []
    for visit in probes[:SINGLE_REPEATS]:
        size = FIRST_BYTES
        while True:
            (point,) = await _points(workers, visit, transport, size, QUICK.transfers)
            if size >= QUICK.transfer_most or size / statistics.rate(point) > QUICK.transfer_seconds / GROWTH:
                break
            size = min(GROWTH * size, QUICK.transfer_most)
        rates.append(statistics.rate(point))
    return statistics.median(rates)


async def _together(workers: MeasuredNodes, probes: list[LinkProbe], transport: str, alone: float) -> float:
    """What all nodes get at once, from the first's call to the last's answer (who is early is alone, and fast)."""
    size, started = presets.transfer_bytes(QUICK, alone / len(probes)), time.perf_counter()
    found = await asyncio.gather(*(_points(workers, visit, transport, size, CONCURRENT_REPEATS) for visit in probes))
    return sum(point.moved_bytes for (point,) in found) / (time.perf_counter() - started)


async def _points(
    workers: MeasuredNodes, probe: LinkProbe, transport: str, size: int, repeats: int
) -> tuple[Point, ...]:
    found: tasks.ProbeResult = await workers.call(probe.source, tasks.transfers, probe, transport, size, repeats)
    if found.fault:
        raise NodeSilentError(
            f"{workers.names[probe.source]} cannot reach {probe.address.host}, this machine ({found.fault}); "
            "let TCP through"
        )
    return found.points


async def _step_seconds(workers: MeasuredNodes, variants: list[Variant]) -> dict[str, float]:
    """Of a local step on the slowest node while all compute, for each way to train that fits."""
    found: dict[str, float] = {}
    fitting = [variant for variant in variants if variant.fits]
    for variant in fitting:
        try:
            await workers.call_all(
                step_tasks.open_work, cloudpickle.dumps(variant.prepared.program), seconds=PROBE_OPEN_SECONDS
            )
            paces = await workers.call_all(step_tasks.work_pace, STEP_SECONDS / len(fitting))
            found[variant.key] = forecast.slowest(paces)
        finally:
            await workers.call_each(step_tasks.close_work, [(node, ()) for node in range(len(workers))])
    return found


def commit_rate() -> float:
    """Bytes a second at which updates that are written are synced, read and added to the network."""
    update = np.random.default_rng(0).random(PROBE_BYTES // 4, dtype=np.float32)
    network, seconds = np.zeros_like(update), []
    with tempfile.TemporaryDirectory(prefix="idletrain-survey-") as folder:
        for probe in range(PROBES):
            path = Path(folder) / str(probe)
            with path.open("wb") as file:
                file.write(update.data)  # as it comes, before the round ends
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
            network += np.fromfile(path, dtype=np.float32)
            seconds.append(time.perf_counter() - started)
    return PROBE_BYTES / statistics.median(seconds)


async def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def fleet_key(*arguments: object) -> str:
    """A fleet's name in the cache, by what makes it the same: where, how many, which version."""
    return hashlib.sha256(json.dumps([version(), *map(str, arguments)]).encode()).hexdigest()[:16]


def load_figures(folder: Path, key: str, now: float) -> FleetFigures | None:
    """What was seen of a fleet within a day, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        tree = json.loads((folder / f"{key}.json").read_text())
        if 0 <= now - tree["seen"] < PROBE_KEPT_SECONDS:
            return FleetFigures(**tree["fleet"])
    return None


def save_figures(folder: Path, key: str, fleet: FleetFigures, now: float) -> None:
    """Keep what was seen; where there is no room for it, it is looked at again."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.json"):
            if now - file.stat().st_mtime > PROBE_KEPT_SECONDS:
                file.unlink()
        (folder / f"{key}.json").write_text(json.dumps({"seen": now, "fleet": asdict(fleet)}))
