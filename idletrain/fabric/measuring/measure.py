"""Measures a cluster: asks its workers in turn, and keeps what they found. Nothing is decided here."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from distributed import Client
from distributed.security import Security

from idletrain.fabric.analysis import statistics
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point, StencilSample, TrainingSample
from idletrain.fabric.measuring import inventory, presets, tasks
from idletrain.fabric.measuring.nodes import MeasuredNodes, NodeSilentError
from idletrain.fabric.measuring.presets import FabricPreset
from idletrain.fabric.measuring.probe_server import PROBE_SILENCE_SECONDS
from idletrain.fabric.measuring.sockets import SocketAddress
from idletrain.fabric.measuring.tasks import LinkProbe, ProbeResult
from idletrain.worker.lease_spec import version

Say = Callable[[str], None]
PROBE_SECONDS = 60.0  # beyond what a visit should take
PACE_SECONDS = 0.3
INCAST_SECONDS = 0.5  # at least: senders begin some hundredths of a second apart
CALL_GRACE_SECONDS = (
    5.0  # for all others' parts in what one has failed at: some fail by it at once, and some wait in vain
)
CERTIFICATES = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")


@dataclass
class Findings:
    """What was found so far."""

    points: list[Point] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    training: list[TrainingSample] = field(default_factory=list)
    stencil: list[StencilSample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    apart: set[tuple[int, int]] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


async def measure_fabric(client: Client, preset: FabricPreset, say: Say) -> Fabric:
    """Everything that these workers let one measure.

    Args:
        client: An asynchronous client of their cluster, on which nothing else runs.
        preset: How much.
        say: Told what comes next.

    Raises:
        RunError: there is no worker.
        RefusedError: workers run other versions of idletrain.
    """
    began, team, found = time.monotonic(), await MeasuredNodes.of(client), Findings()
    say(f"{len(team)} nodes")
    nodes = await _nodes(team)
    found.faults += inventory.unlike_versions(nodes)
    if len(team) > 1:
        async with _probe_servers(team) as visits:
            await _links(team, preset, visits, found, say)
            await _crowds(team, preset, visits, found, say)
            await _transfers(team, preset, visits, found, say)
    else:
        found.missing.append("links, collectives and scaling: there is no second node; start another worker")
    if found.apart or found.silent:
        found.missing.append("collectives, training and stencil: every node must reach every other one for those")
    else:
        await _together(team, preset, nodes, found, say)
    about = {
        "version": version(),
        "preset": preset.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.monotonic() - began,
    }
    return Fabric(
        about,
        nodes,
        found.points,
        found.collectives,
        found.training,
        found.stencil,
        found.faults,
        list(dict.fromkeys(found.missing)),
    )


async def _nodes(workers: MeasuredNodes) -> list[dict[str, Any]]:
    """What each node tells of itself, with how fast it is while all others are, too.

    Raises:
        SilentError: one does not.
    """
    told = await workers.call_all(tasks.describe)
    paces = await workers.call_all(tasks.pace, PACE_SECONDS)
    return [
        {"name": name, "worker": address, **about, "pace_seconds": pace}
        for name, address, about, pace in zip(workers.names, workers.addresses, told, paces, strict=True)
    ]


@contextlib.asynccontextmanager
async def _probe_servers(workers: MeasuredNodes) -> AsyncIterator[Callable[[int, int], LinkProbe]]:
    """Open every node's post meanwhile; yields what makes a visit of one node to another."""
    token = secrets.token_hex(16)
    temporary = Security.temporary()
    kept = {name: getattr(temporary, name) for name in CERTIFICATES}
    try:
        patience = max(PROBE_SILENCE_SECONDS, PROBE_SECONDS * len(workers))  # each node's turn comes in every phase
        doors: list[SocketAddress] = await workers.call_all(tasks.open_probe_server, token, kept, patience)
        yield lambda source, target: LinkProbe(source, target, doors[target], token, kept)
    finally:
        await workers.call_each(tasks.close_probe_server, [(node, ()) for node in range(len(workers))])


async def _visit(
    workers: MeasuredNodes,
    findings: Findings,
    probe: LinkProbe,
    task: Callable[..., ProbeResult],
    *args: Any,
    seconds: float = 0.0,
) -> tuple[Point, ...]:
    """Let one node measure another; a pair that cannot, or a node that is gone, is told of once and not tried again."""
    pair = probe.source, probe.target
    if pair in findings.apart or findings.silent & set(pair):
        return ()
    try:
        answer: ProbeResult = await workers.call(probe.source, task, probe, *args, seconds=PROBE_SECONDS + seconds)
    except NodeSilentError as error:
        findings.silent.add(probe.source)
        findings.faults.append(str(error))
        return ()
    if answer.fault:
        findings.apart.add(pair)
        findings.faults.append(
            f"{workers.names[probe.source]} cannot reach {workers.names[probe.target]} at {probe.door.host} "
            f"({answer.fault}); let TCP through between them, all ports"
        )
    return answer.points


async def _links(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Round trips and streams of all pairs, one at a time: nothing else is to move meanwhile."""
    pairs = presets.pairs(len(workers))
    seconds = presets.stream_seconds(preset, len(workers))
    say(f"links: {len(pairs)} pairs, {seconds:.2g} s each")
    for pair in pairs:
        findings.points += await _visit(workers, findings, probes(*pair), tasks.link, preset.pings, seconds)


async def _crowds(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Both ways, several connections, and all to one."""
    say("links: both ways, several at once, all to one")
    seconds = presets.stream_seconds(preset, len(workers))
    for pair in sorted({(min(pair), max(pair)) for pair in presets.partners(len(workers), preset.partners)}):
        findings.points += await _visit(workers, findings, probes(*pair), tasks.both_ways, seconds)
    for count in preset.flows:
        findings.points += await _visit(workers, findings, probes(0, 1), tasks.flows, seconds, count)
    for target in range(len(workers)) if preset.thorough else (0,):
        senders = [node for node in range(len(workers)) if node != target and (node, target) not in findings.apart]
        how = max(seconds, INCAST_SECONDS), 1, "incast"
        asked = (_visit(workers, findings, probes(node, target), tasks.flows, *how) for node in senders)
        come = [point for points in await asyncio.gather(*asked) for point in points]
        if come:
            rates = tuple(rate for point in come for rate in point.samples)
            moved = sum(point.moved_bytes for point in come)
            findings.points.append(Point("incast", "socket", senders[0], target, rates, len(come), moved))


async def _transfers(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Over Dask's comm layer and idletrain's exchange, in sizes that suit the link."""
    say("links: Dask's comm layer, and idletrain's exchange over it")
    streams = {
        (point.source, point.target): statistics.rate(point) for point in findings.points if point.what == "one way"
    }
    there = probes(0, 1).door.addresses
    if "dask" not in there:
        findings.missing.append("Dask's comm layer without TLS: this cluster asks for TLS")
    for over in (*(over for over in ("dask", "dask tls") if over in there), "pull", "push"):
        for source, target in presets.partners(len(workers), preset.partners):
            way = (target, source) if over == "pull" else (source, target)
            size = presets.transfer_bytes(preset, streams.get(way, 0.0))
            how = over, size, preset.transfers, preset.pings
            points = await _visit(workers, findings, probes(source, target), tasks.transfers, *how)
            # What is pulled comes from the visited node's store.
            findings.points += [replace(point, source=way[0], target=way[1]) for point in points]


async def _together(
    workers: MeasuredNodes, preset: FabricPreset, nodes: Sequence[dict[str, Any]], findings: Findings, say: Say
) -> None:
    """Collectives, training and stencil, of every backend that all nodes have."""
    link = statistics.link_rate(Fabric({}, nodes, findings.points)) or 1e9
    limit = preset.together_seconds
    sharing = Counter(node["host"] for node in nodes)
    available = presets.backends(nodes, preset)
    for label, environment in available:
        say(f"collectives, training and stencil over {label}")
        try:
            port = await workers.call(0, tasks.free_port, nodes[0]["address"])
        except NodeSilentError as error:
            findings.faults.append(str(error))
            return
        common = {
            "backend": label.split()[0],
            "label": label,
            "host": nodes[0]["address"],
            "port": port,
            "nodes": len(nodes),
            "preset": asdict(preset),
            "bytes_per_second": link,
            "limit_seconds": limit,
        }
        orders = []
        for rank, node in enumerate(nodes):
            place = sum(other["host"] == node["host"] for other in nodes[:rank])
            mine = {**common, "rank": rank, "sharing": sharing[node["host"]], "place": place}
            orders.append((rank, (mine, node["interface"], dict(environment))))
        _keep(workers, findings, label, await _answers(workers, orders, limit + PROBE_SECONDS))
    for kind, has in (("NCCL", "nccl"), ("MPI", "mpi")):
        if not all(node[has] for node in nodes):
            findings.missing.append(f"{kind}: not there on all nodes (torch without it, or no GPU)")
        elif has == "nccl" and "nccl" not in dict(available):
            findings.missing.append("NCCL: there are more workers on a machine than GPUs; start one for each")
        elif has == "mpi":
            findings.missing.append("MPI: is started by mpirun, not by Dask; run `mpirun` with torch's own benchmarks")


async def _answers(workers: MeasuredNodes, orders: Sequence[tuple[int, Sequence[Any]]], seconds: float) -> list[Any]:
    """What came of every node's part; when one fails, the others' end soon, too."""
    parts = [
        asyncio.ensure_future(workers.call(node, tasks.take_part, *args, seconds=seconds)) for node, args in orders
    ]
    try:
        pending, failed = set(parts), False
        while pending and not failed:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = any(part.exception() or "fault" in part.result() for part in done)
        if pending:
            await asyncio.wait(pending, timeout=CALL_GRACE_SECONDS)
    finally:  # also of Ctrl-C
        await workers.client.run(tasks.end_parts, on_error="ignore")
    answers: list[Any] = await asyncio.gather(*parts, return_exceptions=True)
    return answers


def _keep(workers: MeasuredNodes, findings: Findings, label: str, answers: Sequence[Any]) -> None:
    """Take the first node's results, as far as they go, and tell why there are no more."""
    faults = [
        f"{label}: {answer}"
        if isinstance(answer, NodeSilentError)
        else f"{label} on {workers.names[rank]}: {answer['fault']}"
        for rank, answer in enumerate(answers)
        if isinstance(answer, NodeSilentError) or "fault" in answer
    ]
    if faults:
        findings.faults += faults
        findings.missing.append(f"collectives, training and stencil over {label}: not all of them; see the faults")
    result = answers[0]
    if isinstance(result, NodeSilentError) or "collectives" not in result:
        return
    findings.collectives += [CollectiveSample(**_tuples(one)) for one in result["collectives"]]
    findings.training += [TrainingSample(**_tuples(one)) for one in result["training"]]
    findings.stencil += [StencilSample(**_tuples(one)) for one in result["stencil"]]
    findings.missing += result["missing"]


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
