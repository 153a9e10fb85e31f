"""The Dask tasks of a measurement. Arguments and results are small, and heavy modules are imported where a task runs,
as the scheduler unpickles every task.
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
from typing import IO, TYPE_CHECKING, Any

from distributed import get_worker

from idletrain.cluster import owned_process

if TYPE_CHECKING:
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring.sockets import SocketAddress, Stream

_parts: set[subprocess.Popen[bytes]] = set()  # this worker's running processes of `collective_process`
_doing: list[str] = []  # the part that this worker's process is at, where that is rank 0
MIN_BYTES = 8  # of the smallest transfer, which measures the round trip


@dataclass(frozen=True)
class LinkProbe:
    """One node's measurement against another.

    Attributes:
        source: Number of the node that the task runs on.
        target: Number of the node it connects to.
        address: Where the target's probe server is reached.
        token: Secret of this measurement.
        secrets: Its temporary certificates and key, as arguments of Dask's `Security`.
    """

    source: int
    target: int
    address: SocketAddress
    token: str
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeResult:
    """The points of a probe, or why there are none."""

    points: tuple[Point, ...] = ()
    fault: str = ""


def describe() -> dict[str, Any]:
    """See `inventory.describe`."""
    from idletrain.fabric.measuring import inventory

    return inventory.describe(inventory.own_address())


def pace(seconds: float) -> float:
    """Return the mean wall-clock seconds of a training step of a small layer, repeated for `seconds`.

    Run on all nodes at once, it shows how much of a machine nodes leave each other. Averaging needs many time slices
    of the kernel's scheduler, each longer than a step.
    """
    import torch

    layer, x = torch.nn.Linear(512, 512), torch.ones(128, 512)
    layer(x).square().sum().backward()
    steps, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds:
        layer(x).square().sum().backward()
        steps += 1
    return passed / steps


def others_share(seconds: float) -> float:
    """Return the share of this machine's processors that other work takes, while this measurement does nothing."""
    import psutil

    busy: float = psutil.cpu_percent(interval=seconds) / 100
    return busy


def open_probe_server(token: str, secrets: Mapping[str, str], silent_seconds: float) -> SocketAddress:
    """See `probe_server.open_server`."""
    from distributed.security import Security

    from idletrain.fabric.measuring import inventory, probe_server

    worker = get_worker()
    temporary = Security(require_encryption=True, **secrets)
    host = inventory.own_address()
    address: SocketAddress = probe_server.open_server(
        worker, host=host, token=token, temporary=temporary, silent_seconds=silent_seconds
    )
    return address


def close_probe_server() -> None:
    """See `probe_server.close_server`."""
    from idletrain.fabric.measuring import probe_server

    probe_server.close_server(get_worker())


def probe_link(probe: LinkProbe, pings: int, seconds: float) -> ProbeResult:
    """Measure `pings` round trips, and a one-way stream of `seconds`."""
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        trips = sockets.round_trips(host, port, token, pings)
        return [
            Point("round trip", "socket", probe.source, probe.target, trips),
            _timed_with_cpu(probe, "one way", "socket", lambda: [sockets.stream(host, port, token, seconds)]),
        ]

    return _probed(probe, measure)


def both_ways(probe: LinkProbe, seconds: float) -> ProbeResult:
    """Measure streams both ways at once."""
    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        outgoing, incoming = sockets.both_ways(host, port, token, seconds)
        return [
            Point("both ways", "socket", probe.source, probe.target, outgoing.rates, moved_bytes=outgoing.moved_bytes),
            Point("both ways", "socket", probe.target, probe.source, incoming.rates, moved_bytes=incoming.moved_bytes),
        ]

    return _probed(probe, measure)


def flows(probe: LinkProbe, seconds: float, count: int, what: str = "flows") -> ProbeResult:
    """Measure streams over `count` connections at once; a sample is a connection's mean rate."""
    from idletrain.fabric.measuring import sockets

    def measure(host: str, port: int, token: str) -> list[Point]:
        return [_timed_with_cpu(probe, what, "socket", lambda: sockets.flows(host, port, token, seconds, count))]

    return _probed(probe, measure)


def transfers(probe: LinkProbe, transport: str, size: int, repeats: int, pings: int = 0) -> ProbeResult:
    """Measure transfers of `size` bytes over Dask's comm layer, or pulls from or pushes to the target's store; with
    `pings`, round trips of a few bytes as well.
    """
    import asyncio

    from distributed.security import Security

    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import comms

    # The worker's own security, as a run's pulls and pushes use it; only a task's thread can ask for its worker.
    cluster = get_worker().security

    def move(size: int, repeats: int) -> Stream:
        match transport:
            case "pull" | "push":
                call = comms.pulled if transport == "pull" else comms.pushed
                work = call(probe.address.servers["store"], cluster, probe.token, size, repeats)
            case _:
                temporary = Security(require_encryption=True, **probe.secrets) if transport == "dask tls" else None
                work = comms.sent(probe.address.servers[transport], temporary, probe.token, size, repeats)
        return asyncio.run(work)

    def measure(*_: object) -> list[Point]:
        points = [_timed_with_cpu(probe, "one way", transport, lambda: [move(size, repeats)])]
        if pings:
            seconds = tuple(MIN_BYTES / rate for rate in move(MIN_BYTES, pings).rates)
            points.append(Point("round trip", transport, probe.source, probe.target, seconds))
        return points

    return _probed(probe, measure)


def unused_port(host: str) -> int:
    """Return a port that was free on this node a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def take_part(orders: Mapping[str, Any], interface: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run this node's process of `collective_process`; return its results so far, with a `fault` if it failed."""
    # In a container or a network namespace, Gloo and NCCL would not find the address by the host's name.
    names = {f"{backend}_SOCKET_IFNAME": interface for backend in ("GLOO", "NCCL") if interface}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            owned_process.command("idletrain.fabric.measuring.collective_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **names, **paths, **environment},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        _parts.add(process)
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.kill()

        limit = threading.Timer(orders["limit_seconds"], end)
        limit.start()
        try:
            process.stdin.write(json.dumps(dict(orders)).encode() + b"\n")
            process.stdin.flush()
            results = _read_results(process.stdout)
            code = process.wait()
        except BrokenPipeError:
            results, code = {}, process.wait()
        finally:
            limit.cancel()
            _doing.clear()
            _parts.discard(process)
            process.kill()
            process.stdin.close()
            process.stdout.close()
        if code:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            why = f"it ended with {code}" if code < 0 or not lines else lines[-1][:200]
            results["fault"] = f"it took longer than {orders['limit_seconds']:.0f} s" if timed_out.is_set() else why
    return results


def _read_results(output: IO[bytes]) -> dict[str, Any]:
    """Read what a process prints to its end; return its last results, and keep what it is doing meanwhile."""
    results: dict[str, Any] = {}
    for line in output:
        if not line.endswith(b"\n"):  # it was killed while it printed
            break
        printed = json.loads(line)
        if "doing" in printed:
            _doing[:] = [printed["doing"]]
        else:
            results = printed
    return results


def doing() -> str:
    """Return the part that this node's process is at, or an empty string; called while a task waits for it."""
    return _doing[0] if _doing else ""


def end_parts() -> None:
    """Kill this node's processes of `collective_process`; called while the tasks that wait for them still run."""
    for process in list(_parts):
        process.kill()


def _probed(probe: LinkProbe, measure: Callable[[str, int, str], Sequence[Point]]) -> ProbeResult:
    try:
        return ProbeResult(tuple(measure(probe.address.host, probe.address.port, probe.token)))
    except (OSError, ValueError) as error:
        return ProbeResult(fault=str(error) or type(error).__name__)


def _timed_with_cpu(probe: LinkProbe, what: str, transport: str, move: Callable[[], Sequence[Stream]]) -> Point:
    """Move bytes and return the point, with both processes' CPU seconds if the other end can report its own."""
    import statistics

    from idletrain.fabric.analysis.samples import Point
    from idletrain.fabric.measuring import sockets

    def both_ends() -> float:
        host, port = probe.address.host, probe.address.port
        return time.process_time() + sockets.cpu_seconds(host, port, probe.token) if port else 0.0

    before = both_ends()
    streams = move()
    cpu = both_ends() - before
    concurrent = what in ("flows", "incast")
    samples = tuple(statistics.fmean(s.rates or (0.0,)) for s in streams) if concurrent else streams[0].rates
    total = sum(stream.moved_bytes for stream in streams)
    return Point(what, transport, probe.source, probe.target, samples, len(streams), total, cpu)
