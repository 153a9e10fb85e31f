"""Measure how much of a link the exchange uses while it moves data: alone, and beside training on every core.

Machines of the testbed with shaped links (root only). A subnet is pulled and pushed through the real Store and
StoreClient as in a round, from the request to the answer: checksum, inspection and the durable write of a push are in
its time. In turn with these, as many bytes come and go over a plain socket, written by nobody and answered by one byte:
what the link and the cores give. Beside training, one core is the head's and a second node's that trains, the other is
the measured node's, which trains on a thread meanwhile.

    python -m benchmarks.link_use [--tiny] [--json FILE]

Targets: alone, 85 % of a link of 100 Mbit/s and of one of 1 Gbit/s; beside training, 85 % of a plain socket's rate.
`where_time_goes` tells the same of pulls and pushes of a whole run.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed.security import Security

from benchmarks.exchange import BenchHead, pull_and_push
from benchmarks.machines import START_SECONDS, Cast, machines, print_line
from benchmarks.report import Figure, at_least, report, with_preset
from benchmarks.where_time_goes import LINK, link_bytes
from idletrain.cluster import dask_settings
from idletrain.exchange.store import StoreServer

READ_BYTES = 1 << 20
WHOLE, EIGHTH = 23_000_000, 2_700_000  # a subnet of case b of the comparison: one of two, and one of eight


@dataclass(frozen=True)
class Case:
    """A link, the bytes that go over it, whether nodes train meanwhile, and repetitions of each transfer."""

    link: str
    size: int
    trains: bool = False
    repeats: int = 7

    @property
    def name(self) -> str:
        """Where its figures are from."""
        return f"{self.link}, beside training" if self.trains else self.link


@dataclass(frozen=True)
class Preset:
    """List the cases to measure."""

    cases: tuple[Case, ...] = (
        Case("100mbit", WHOLE),
        Case("1gbit", WHOLE),
        Case("1gbit", EIGHTH, trains=True, repeats=60),
    )


TINY = Preset(tuple(Case("1gbit", 1_000_000, trains, repeats=2) for trains in (False, True)))


async def be_head(host: str, size: int) -> None:
    """Serve one subnet, and as many bytes over a plain socket, until killed."""
    flat = torch.rand(size // 4)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):  # a request, whatever it is
            writer.write(flat.numpy().data.cast("B"))
            await writer.drain()
            await reader.readexactly(size)
            writer.write(b"!")

    plain = await asyncio.start_server(exchange, host, limit=READ_BYTES)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        address = await StoreServer(BenchHead(Path(folder), flat), Security()).listen(host)
        print_line({"kind": "serving", "address": address, "port": plain.sockets[0].getsockname()[1]})
        await asyncio.Event().wait()


async def be_worker(host: str, port: int, store: str, size: int, repeats: int) -> None:
    """Take turns with a plain socket and the store; prints the seconds of each transfer, by what it was."""
    reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
    content = bytes(size)
    seconds: dict[str, list[float]] = {what: [] for what in ("plain socket, down", "pull", "plain socket, up", "push")}

    async def fetch() -> None:
        writer.write(b"?")
        await reader.readexactly(size)

    async def deliver() -> None:
        writer.write(content)
        await reader.readexactly(1)

    for _ in range(repeats):
        seconds["plain socket, down"].append(await _seconds(fetch()))
        seconds["plain socket, up"].append(await _seconds(deliver()))
        ((pull, push),) = await pull_and_push(store, Security(), 1)
        seconds["pull"].append(pull)
        seconds["push"].append(push)
    writer.close()
    print_line({"kind": "moved", "seconds": seconds})


async def _seconds(transfer: Awaitable[None]) -> float:
    started = time.perf_counter()
    await transfer
    return time.perf_counter() - started


def train() -> None:
    """Train until the process ends."""
    module = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    inputs, labels = torch.rand(128, 784), torch.randint(10, (128,))
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def measure(case: Case) -> Mapping[str, list[float]]:
    """Return the seconds of every transfer over one link, by what it was.

    Raises:
        RuntimeError: links cannot be shaped here, or a process ended early.
    """
    me = [sys.executable, "-m", "benchmarks.link_use"]
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        machines(1 + case.trains, case.link) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        host = bed.address("head")
        cast.start("head", [*me, "head", host, str(case.size)])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        where = [host, str(serving["port"]), serving["address"], str(case.size), str(case.repeats)]
        if case.trains:
            cast.start("n1", [*me, "train"])
        cast.start("n0", [*me, "training worker" if case.trains else "worker", *where])
        patience = START_SECONDS + 40 * case.repeats * case.size / link_bytes(case.link)
        (moved,) = cast.output.wait("moved", 1, patience, lambda: cast.processes["head"].poll() is None)
        seconds: Mapping[str, list[float]] = moved["seconds"]
        return seconds


def figures_of(case: Case, seconds: Mapping[str, list[float]]) -> list[Figure]:
    """Return how much of the link each transfer used; beside training, its rate over a plain socket's, too."""
    ideal, figures = case.size / link_bytes(case.link), []
    typical = {what: ideal / statistics.median(times) for what, times in seconds.items()}
    for what, share in typical.items():
        name, used = f"{case.name}: {what}: share of the link", [ideal / time for time in seconds[what]]
        if "plain" in what or case.trains:
            figures.append(Figure(name, share, "", samples=used))
        else:
            figures.append(at_least(name, share, "", LINK, used))
    if case.trains:
        for what, plain in (("pull", "plain socket, down"), ("push", "plain socket, up")):
            name, ratio = f"{case.name}: {what}: its rate / a {plain}", typical[what] / typical[plain]
            figures.append(at_least(name, ratio, "", LINK))
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure every case and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    for case in preset.cases:
        figures += figures_of(case, measure(case))
    return report("link_use", options, figures, subnet_bytes=[case.size for case in preset.cases])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, size]:
            dask_settings.apply()
            asyncio.run(be_head(host, int(size)))
        case [("worker" | "training worker") as role, host, port, store, size, repeats]:
            if role == "training worker":
                threading.Thread(target=train, daemon=True).start()
            dask_settings.apply()
            asyncio.run(be_worker(host, int(port), store, int(size), int(repeats)))
        case ["train"]:
            train()
        case _:
            main()
