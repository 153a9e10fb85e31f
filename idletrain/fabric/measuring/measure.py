"""Measure a cluster: run probes on its workers in turn and collect their samples; analysis happens elsewhere."""

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
PROBE_SECONDS = 60.0  # time limit of a probe, beyond the time that it should take
PACE_SECONDS = 0.3
QUIET_SECONDS = 0.3  # nothing is done for so long, to see what others do: thirty of the kernel's ticks a core
INCAST_SECONDS = 0.5  # at least: senders start some hundredths of a second apart
CALL_GRACE_SECONDS = 5.0  # for the other nodes once one has failed: some fail with it, some would wait for ever
TELL_SECONDS = 5.0  # between two questions that disturb the measurement, but for less than a millisecond
CERTIFICATES = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")


@dataclass
class Findings:
    """The results so far.

    Attributes:
        apart: Pairs of nodes of which the first cannot reach the second.
        silent: Nodes that are gone or do not answer.
    """

    points: list[Point] = field(default_factory=list)
    collectives: list[CollectiveSample] = field(default_factory=list)
    training: list[TrainingSample] = field(default_factory=list)
    stencil: list[StencilSample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    apart: set[tuple[int, int]] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


async def measure_fabric(client: Client, preset: FabricPreset, say: Say) -> Fabric:
    """Measure everything that a cluster's workers allow.

    Args:
        client: An asynchronous client of the cluster, on which nothing else runs.
        preset: How much is measured.
        say: Called with a line before each phase.

    Raises:
        RunError: There is no worker.
        RefusedError: Workers run other versions of idletrain.
    """
    started, workers, findings = time.monotonic(), await MeasuredNodes.of(client), Findings()
    say(f"{len(workers)} nodes")
    nodes = await _nodes(workers)
    findings.faults += inventory.unlike_versions(nodes)
    await _watch_others(workers, nodes, findings)
    if len(workers) > 1:
        async with _probe_servers(workers) as probes:
            for measure in (_links, _concurrent_streams, _transfers):
                await measure(workers, preset, probes, findings, say)
                await _watch_others(workers, nodes, findings)
    else:
        findings.missing.append("links, collectives and scaling: there is no second node; start another worker")
    if findings.apart or findings.silent:
        findings.missing.append("collectives, training and stencil: every node must reach every other one for those")
    else:
        await _together(workers, preset, nodes, findings, say)
        await _watch_others(workers, nodes, findings)
    about = {
        "version": version(),
        "preset": preset.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": time.monotonic() - started,
    }
    return Fabric(
        about,
        nodes,
        findings.points,
        findings.collectives,
        findings.training,
        findings.stencil,
        findings.faults,
        list(dict.fromkeys(findings.missing)),
    )


async def _nodes(workers: MeasuredNodes) -> list[dict[str, Any]]:
    """Describe each node, with the seconds of a small training step while all others train as well.

    Raises:
        NodeSilentError: One does not answer.
    """
    descriptions = await workers.call_all(tasks.describe)
    paces = await workers.call_all(tasks.pace, PACE_SECONDS)
    return [
        {"name": name, "worker": address, **about, "pace_seconds": pace}
        for name, address, about, pace in zip(workers.names, workers.addresses, descriptions, paces, strict=True)
    ]


async def _watch_others(workers: MeasuredNodes, nodes: Sequence[dict[str, Any]], findings: Findings) -> None:
    """Do nothing for a moment and keep the largest share of each node's processors that others took in such moments."""
    there = [node for node in range(len(workers)) if node not in findings.silent]
    shares = await workers.call_each(tasks.others_share, [(node, (QUIET_SECONDS,)) for node in there])
    for node, share in zip(there, shares, strict=True):
        if not isinstance(share, NodeSilentError):  # whoever needs the node next reports it
            nodes[node]["others_share"] = max(nodes[node].get("others_share", 0.0), share)


@contextlib.asynccontextmanager
async def _probe_servers(workers: MeasuredNodes) -> AsyncIterator[Callable[[int, int], LinkProbe]]:
    """Keep every node's probe server open; yield a function that makes the probe of a (source, target) pair."""
    token = secrets.token_hex(16)
    temporary = Security.temporary()
    certificates = {name: getattr(temporary, name) for name in CERTIFICATES}
    try:
        silent_seconds = max(PROBE_SILENCE_SECONDS, PROBE_SECONDS * len(workers))  # a phase probes node after node
        addresses: list[SocketAddress] = await workers.call_all(
            tasks.open_probe_server, token, certificates, silent_seconds
        )
        yield lambda source, target: LinkProbe(source, target, addresses[target], token, certificates)
    finally:
        await workers.call_each(tasks.close_probe_server, [(node, ()) for node in range(len(workers))])


async def _measure_link(
    workers: MeasuredNodes,
    findings: Findings,
    probe: LinkProbe,
    task: Callable[..., ProbeResult],
    *args: Any,
    seconds: float = 0.0,
) -> tuple[Point, ...]:
    """Run a probe task and return its points; report a failing pair or node once and do not try it again."""
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
            f"{workers.names[probe.source]} cannot reach {workers.names[probe.target]} at {probe.address.host} "
            f"({answer.fault}); let TCP through between them, all ports"
        )
    return answer.points


async def _links(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Measure round trips and streams of all pairs, one pair at a time, so that no other bytes move."""
    pairs = presets.pairs(len(workers))
    seconds = presets.stream_seconds(preset, len(workers))
    say(f"links: {len(pairs)} pairs, {seconds:.2g} s each")
    for pair in pairs:
        findings.points += await _measure_link(
            workers, findings, probes(*pair), tasks.probe_link, preset.pings, seconds
        )


async def _concurrent_streams(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Measure streams both ways at once, over several connections, and from all nodes to one."""
    say("links: both ways at once, several connections, all to one")
    seconds = presets.stream_seconds(preset, len(workers))
    for pair in sorted({(min(pair), max(pair)) for pair in presets.partners(len(workers), preset.partners)}):
        findings.points += await _measure_link(workers, findings, probes(*pair), tasks.both_ways, seconds)
    for count in preset.flows:
        findings.points += await _measure_link(workers, findings, probes(0, 1), tasks.flows, seconds, count)
    for target in range(len(workers)) if preset.thorough else (0,):
        senders = [node for node in range(len(workers)) if node != target and (node, target) not in findings.apart]
        how = max(seconds, INCAST_SECONDS), 1, "incast"
        streams = (_measure_link(workers, findings, probes(node, target), tasks.flows, *how) for node in senders)
        incoming = [point for points in await asyncio.gather(*streams) for point in points]
        if incoming:
            rates = tuple(rate for point in incoming for rate in point.samples)
            moved = sum(point.moved_bytes for point in incoming)
            findings.points.append(Point("incast", "socket", senders[0], target, rates, len(incoming), moved))


async def _transfers(
    workers: MeasuredNodes, preset: FabricPreset, probes: Callable[[int, int], LinkProbe], findings: Findings, say: Say
) -> None:
    """Measure transfers over Dask's comm layer and idletrain's exchange, in sizes that suit the link."""
    say("links: Dask's comm layer, and idletrain's exchange over it")
    streams = {
        (point.source, point.target): statistics.rate(point) for point in findings.points if point.what == "one way"
    }
    servers = probes(0, 1).address.servers
    if "dask" not in servers:
        findings.missing.append("Dask's comm layer without TLS: this cluster asks for TLS")
    for transport in (*(dask for dask in ("dask", "dask tls") if dask in servers), "pull", "push"):
        for source, target in presets.partners(len(workers), preset.partners):
            # A pull moves bytes from the target's store to the node that measures.
            sender, receiver = (target, source) if transport == "pull" else (source, target)
            size = presets.transfer_bytes(preset, streams.get((sender, receiver), 0.0))
            how = transport, size, preset.transfers, preset.pings
            points = await _measure_link(workers, findings, probes(source, target), tasks.transfers, *how)
            findings.points += [replace(point, source=sender, target=receiver) for point in points]


async def _together(
    workers: MeasuredNodes, preset: FabricPreset, nodes: Sequence[dict[str, Any]], findings: Findings, say: Say
) -> None:
    """Measure collectives, training and stencil over every backend that all nodes have."""
    link = statistics.link_rate(Fabric({}, nodes, findings.points)) or 1e9
    limit = preset.together_seconds
    sharing = Counter(node["host"] for node in nodes)
    available = presets.backends(nodes, preset)
    for label, environment in available:
        say(f"collectives, training and stencil over {label}")
        try:
            port = await workers.call(0, tasks.unused_port, nodes[0]["address"])
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
            local_rank = sum(other["host"] == node["host"] for other in nodes[:rank])
            own = {**common, "rank": rank, "sharing": sharing[node["host"]], "local_rank": local_rank}
            orders.append((rank, (own, node["interface"], dict(environment))))
        _add_results(workers, findings, label, await _run_parts(workers, orders, limit + PROBE_SECONDS, say))
    for kind, key in (("NCCL", "nccl"), ("MPI", "mpi")):
        if not all(node[key] for node in nodes):
            findings.missing.append(f"{kind}: not there on all nodes (torch without it, or no GPU)")
        elif key == "nccl" and "nccl" not in dict(available):
            findings.missing.append("NCCL: there are more workers on a machine than GPUs; start one for each")
        elif key == "mpi":
            findings.missing.append("MPI: is started by mpirun, not by Dask; run `mpirun` with torch's own benchmarks")


async def _run_parts(
    workers: MeasuredNodes, orders: Sequence[tuple[int, Sequence[Any]]], seconds: float, say: Say
) -> list[Any]:
    """Run every node's part of a collective measurement; return each result or error. A failure ends all parts soon."""
    telling = asyncio.ensure_future(_tell_parts(workers, say))
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
    finally:  # also on Ctrl-C
        telling.cancel()
        await workers.client.run(tasks.end_parts, on_error="ignore")
    results: list[Any] = await asyncio.gather(*parts, telling, return_exceptions=True)
    return results[: len(parts)]


async def _tell_parts(workers: MeasuredNodes, say: Say) -> None:
    """Say every few seconds what the first node is at, if that is new, until cancelled."""
    told = ""
    while True:
        await asyncio.sleep(TELL_SECONDS)
        answers = await workers.client.run(tasks.doing, workers=[workers.addresses[0]], on_error="ignore")
        for part in answers.values():
            if part not in ("", told):
                told = part
                say(part)


def _add_results(workers: MeasuredNodes, findings: Findings, label: str, results: Sequence[Any]) -> None:
    """Add the first node's results, complete or not, and every node's fault."""
    faults = [
        f"{label}: {result}"
        if isinstance(result, NodeSilentError)
        else f"{label} on {workers.names[rank]}: {result['fault']}"
        for rank, result in enumerate(results)
        if isinstance(result, NodeSilentError) or "fault" in result
    ]
    if faults:
        findings.faults += faults
        findings.missing.append(f"collectives, training and stencil over {label}: not all of them; see the faults")
    first = results[0]
    if isinstance(first, NodeSilentError) or "collectives" not in first:
        return
    findings.collectives += [CollectiveSample(**_tuples(record)) for record in first["collectives"]]
    findings.training += [TrainingSample(**_tuples(record)) for record in first["training"]]
    findings.stencil += [StencilSample(**_tuples(record)) for record in first["stencil"]]
    findings.missing += first["missing"]


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
