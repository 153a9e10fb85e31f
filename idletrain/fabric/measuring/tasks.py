"""The Dask tasks of a measurement: small words go in and come out. What is heavy is imported where a task runs, as a
scheduler unpickles every task on its way.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed import get_worker

if TYPE_CHECKING:
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring.sockets import SocketAddress, Stream

_parts: set[subprocess.Popen[bytes]] = set()  # this worker's processes of `collective_process`
LEAST_BYTES = 8  # of what goes there and back as quickly as can be


@dataclass(frozen=True)
class LinkProbe:
    """Who measures whom.

    Attributes:
        source: The number of the node that the task runs on.
        target: The number of the node whose door it is.
        token: Of this measurement.
        secrets: Of its temporary certificates.
    """

    source: int
    target: int
    door: SocketAddress
    token: str
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeResult:
    """What came of a visit, or why nothing did."""

    points: tuple[Point, ...] = ()
    fault: str = ""


def describe() -> dict[str, Any]:
    """See `inventory.describe`."""
    from idletrain.fabric.measuring import inventory

    return inventory.describe(inventory.own_address())


def pace(seconds: float) -> float:
    """Seconds of a training step of a small layer, on average over some time, as the clock tells: all nodes at once
    shows what they leave each other of a machine that they share. That takes many turns of its scheduler, each of which
    is longer than a step.
    """
    import torch

    layer, x = torch.nn.Linear(512, 512), torch.ones(128, 512)
    layer(x).square().sum().backward()
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        layer(x).square().sum().backward()
        steps += 1
    return passed / steps


def open_probe_server(token: str, secrets: Mapping[str, str], silent_seconds: float) -> SocketAddress:
    """See `probe_server.opened`."""
    from distributed.security import Security

    from idletrain.fabric.measuring import inventory, probe_server

    worker = get_worker()
    temporary = Security(require_encryption=True, **secrets)
    host = inventory.own_address()
    door: SocketAddress = probe_server.open_server(
        worker, host=host, token=token, temporary=temporary, silent_seconds=silent_seconds
    )
    return door


def close_probe_server() -> None:
    """See `probe_server.closed`."""
    from idletrain.fabric.measuring import probe_server

    probe_server.close_server(get_worker())


def link(probe: LinkProbe, pings: int, seconds: float) -> ProbeResult:
    """Round trips, and a stream one way."""
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        trips = sockets.round_trips(host, port, token, pings)
        return [
            Point("round trip", "socket", probe.source, probe.target, trips),
            _accounted(probe, "one way", "socket", lambda: [sockets.stream(host, port, token, seconds)]),
        ]

    return _visited(probe, measure)


def both_ways(probe: LinkProbe, seconds: float) -> ProbeResult:
    """Streams there and back at once."""
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        gone, come = sockets.both_ways(host, port, token, seconds)
        return [
            Point("both ways", "socket", probe.source, probe.target, gone.rates, moved_bytes=gone.moved_bytes),
            Point("both ways", "socket", probe.target, probe.source, come.rates, moved_bytes=come.moved_bytes),
        ]

    return _visited(probe, measure)


def flows(probe: LinkProbe, seconds: float, count: int, what: str = "flows") -> ProbeResult:
    """Streams over so many connections at once; a sample is a connection's mean rate."""
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        return [_accounted(probe, what, "socket", lambda: sockets.flows(host, port, token, seconds, count))]

    return _visited(probe, measure)


def transfers(probe: LinkProbe, transport: str, size: int, repeats: int, pings: int = 0) -> ProbeResult:
    """Arrays over Dask's comm layer, or pulls from or pushes to the target's store; and so many of hardly a byte."""
    import asyncio

    from distributed.security import Security

    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import comms

    # A task's thread belongs to a worker whose security it is that a run's pulls and pushes have.
    cluster = get_worker().security

    def move(size: int, repeats: int) -> Stream:
        match transport:
            case "pull" | "push":
                call = comms.pulled if transport == "pull" else comms.pushed
                work = call(probe.door.addresses["store"], cluster, probe.token, size, repeats)
            case _:
                temporary = Security(require_encryption=True, **probe.secrets) if transport == "dask tls" else None
                work = comms.sent(probe.door.addresses[transport], temporary, probe.token, size, repeats)
        return asyncio.run(work)

    def measure(*_: object) -> list[Point]:
        points = [_accounted(probe, "one way", transport, lambda: [move(size, repeats)])]
        if pings:
            seconds = tuple(LEAST_BYTES / rate for rate in move(LEAST_BYTES, pings).rates)
            points.append(Point("round trip", transport, probe.source, probe.target, seconds))
        return points

    return _visited(probe, measure)


def free_port(host: str) -> int:
    """A port on this node that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def take_part(orders: Mapping[str, Any], interface: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run this node's process of `collective_process`; returns what it found, or its `fault`."""
    # Programs that look for their address by the host's name do not find it in a container or a namespace.
    names = {f"{backend}_SOCKET_IFNAME": interface for backend in ("GLOO", "NCCL") if interface}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "idletrain.fabric.measuring.collective_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **names, **paths, **environment},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        _parts.add(process)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(orders["limit_seconds"], end)
        limit.start()
        try:
            process.stdin.write(json.dumps(dict(orders)).encode() + b"\n")
            process.stdin.flush()
            printed = process.stdout.read()
            code = process.wait()
        except BrokenPipeError:
            printed, code = b"", process.wait()
        finally:
            limit.cancel()
            _parts.discard(process)
            process.kill()
            process.stdin.close()
            process.stdout.close()
        found: dict[str, Any] = json.loads(printed.splitlines()[-1]) if printed else {}
        if code:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            why = f"it ended with {code}" if code < 0 or not lines else lines[-1][:200]
            found["fault"] = f"it took longer than {orders['limit_seconds']:.0f} s" if late.is_set() else why
    return found


def end_parts() -> None:
    """End this node's processes of `collective_process`, as whoever asked for them is gone; called beside the tasks
    that wait.
    """
    for process in list(_parts):
        process.kill()


def _visited(probe: LinkProbe, measure: Callable[[str, int, str], Sequence[Point]]) -> ProbeResult:
    try:
        return ProbeResult(tuple(measure(probe.door.host, probe.door.port, probe.token)))
    except (OSError, ValueError) as error:
        return ProbeResult(fault=str(error) or type(error).__name__)


def _accounted(probe: LinkProbe, what: str, transport: str, move: Callable[[], Sequence[Stream]]) -> Point:
    """What was moved, with the CPU seconds that it took both ends' processes, if the other tells."""
    import statistics

    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def both_ends() -> float:
        door = probe.door
        return time.process_time() + sockets.cpu_seconds(door.host, door.port, probe.token) if door.port else 0.0

    before = both_ends()
    moved = move()
    cpu = both_ends() - before
    together = what in ("flows", "incast")
    samples = tuple(statistics.fmean(s.rates or (0.0,)) for s in moved) if together else moved[0].rates
    total = sum(stream.moved_bytes for stream in moved)
    return Point(what, transport, probe.source, probe.target, samples, len(moved), total, cpu)
