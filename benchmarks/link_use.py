"""Measure how much of a link the exchange uses while it moves data, with nothing else to do.

Two machines of the testbed with shaped links (root only). A subnet is pulled and pushed through the real Store and
StoreClient as in a round, from the request to the answer: checksum, inspection and the durable write of a push are in
its time. Beside it as many bytes come over a plain socket: what the link itself gives.

    python -m benchmarks.link_use [--tiny] [--json FILE]

Target: 85 % of a link of 100 Mbit/s and of one of 1 Gbit/s. `where_time_goes` tells the same of pulls and pushes that
share the cores with training.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed.security import Security

from benchmarks.exchange import BenchHead, pull_and_push
from benchmarks.machines import START_SECONDS, Cast, Line, machines, print_line
from benchmarks.report import Figure, at_least, report, with_preset
from benchmarks.where_time_goes import LINK, link_bytes
from idletrain.cluster import dask_settings
from idletrain.exchange.store import StoreServer

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Preset:
    """Links, sizes and repetitions."""

    links: tuple[str, ...] = ("100mbit", "1gbit")
    subnet_bytes: int = 23_000_000  # of case b of the comparison, on two nodes
    repeats: int = 7


TINY = Preset(links=("1gbit",), subnet_bytes=1_000_000, repeats=2)


async def be_head(host: str, size: int) -> None:
    """Serve one subnet, and as many bytes over a plain socket, until killed."""
    flat = torch.rand(size // 4)

    async def send(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(flat.numpy().data.cast("B"))
        await writer.drain()
        writer.close()

    plain = await asyncio.start_server(send, host)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        address = await StoreServer(BenchHead(Path(folder), flat), Security()).listen(host)
        print_line({"kind": "serving", "address": address, "port": plain.sockets[0].getsockname()[1]})
        await asyncio.Event().wait()


async def be_worker(host: str, port: int, store: str, repeats: int) -> None:
    """Fetch over the plain socket, then pull and push; prints the seconds of each."""
    plain = [await _fetch(host, port) for _ in range(repeats)]
    moved = await pull_and_push(store, Security(), repeats)
    pulls, pushes = zip(*moved, strict=True)
    print_line({"kind": "moved", "plain socket": plain, "pull": pulls, "push": pushes})


async def _fetch(host: str, port: int) -> float:
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
    while await reader.read(READ_BYTES):
        pass
    writer.close()
    return time.perf_counter() - started


def measure(preset: Preset, link: str) -> Line:
    """Return the seconds of every transfer over one link.

    Raises:
        RuntimeError: links cannot be shaped here, or a process ended early.
    """
    me = [sys.executable, "-m", "benchmarks.link_use"]
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        machines(1, link) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        host = bed.address("head")
        cast.start("head", [*me, "head", host, str(preset.subnet_bytes)])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        cast.start("n0", [*me, "worker", host, str(serving["port"]), serving["address"], str(preset.repeats)])
        patience = START_SECONDS + 10 * preset.repeats * preset.subnet_bytes / link_bytes(link)
        return cast.output.wait("moved", 1, patience, lambda: cast.processes["head"].poll() is None)[0]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure every link and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    for link in preset.links:
        moved = measure(preset, link)
        ideal = preset.subnet_bytes / link_bytes(link)
        for what in ("plain socket", "pull", "push"):
            used = [ideal / seconds for seconds in moved[what]]
            name, typical = f"{link}: {what}: share of the link", statistics.median(used)
            figures.append(
                Figure(name, typical, "", samples=used)
                if what == "plain socket"
                else at_least(name, typical, "", LINK, used)
            )
    return report("link_use", options, figures, subnet_bytes=preset.subnet_bytes)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, size]:
            dask_settings.apply()
            asyncio.run(be_head(host, int(size)))
        case ["worker", host, port, store, repeats]:
            dask_settings.apply()
            asyncio.run(be_worker(host, int(port), store, int(repeats)))
        case _:
            main()
