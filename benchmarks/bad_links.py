"""Measure what loss, delay and a shallow buffer cost a push, over TCP (CUBIC, BBR, with turns or not) and datagrams.

Nodes in network namespaces push at once to a store behind a link of 100 Mbit/s (`idletrain-testbed`; needs root):
eight with 0.1, 0.5 and 2 MB each into a buffer of 32 or 64 KB, and one with 5 MB over a clean link, with loss, and with
delay. The time is from the moment at which all may begin to the last answer, over what the bytes take at the link's
rate and one round trip. Datagrams may leave out 5 % (`p`), or nothing.

    python -m benchmarks.bad_links [--tiny] [--only incast] [--json FILE]

Targets, for datagrams: eight at once at most 1.2 times ideal in the median, 2 times at worst, three times faster than
BBR, and behind the better TCP by no more than their headers and seals add to the bytes, 1.5 %; 1 % loss at 2 ms at most
1.15 times ideal; a clean link at most 1.05 times as long as TCP; 20 ms within 1.3.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from distributed.security import Security

from benchmarks.exchange import BenchHead
from benchmarks.machines import START_SECONDS, Cast, machines, print_line
from benchmarks.report import Figure, at_least, at_most, parser, report
from idletrain.cluster import dask_settings
from idletrain.exchange.admission import AdmissionQueue
from idletrain.exchange.client import StoreClient
from idletrain.exchange.datagram.packet import MAX_DATAGRAM_BYTES, PAYLOAD
from idletrain.exchange.messages import AcceptanceRule, LeaseId, LockstepGroup, PushHeader, Receipt, Reply, checksum
from idletrain.exchange.store import StoreServer

KB = 1000
ETHERNET, IPV4, UDP, TCP = 14, 20, 8, 32  # bytes of headers; TCP's with timestamps
MTU = 1500
# Of datagrams over those of TCP, for the same payload: longer headers, a seal each, and less payload, for tunnels.
BYTES_OVER_TCP = round(
    (ETHERNET + IPV4 + UDP + MAX_DATAGRAM_BYTES) / PAYLOAD * (MTU - IPV4 - TCP) / (ETHERNET + MTU), 3
)


@dataclass(frozen=True)
class Case:
    """Pushes over links of one kind."""

    name: str
    nodes: int
    size: int
    repeats: int
    queue: str | None = None
    loss: str | None = None
    one_way: str | None = None
    link: str = "100mbit"

    @property
    def trip_seconds(self) -> float:
        """Return the delay there and back."""
        return 2e-3 * float(self.one_way.removesuffix("ms")) if self.one_way else 0.0

    @property
    def ideal_seconds(self) -> float:
        """Return the ideal time: all bytes at the link's rate, and one round trip."""
        return self.nodes * self.size * 8 / 1e6 / float(self.link.removesuffix("mbit")) + self.trip_seconds


@dataclass(frozen=True)
class Transport:
    """A transport of payloads."""

    name: str
    congestion: str = "cubic"
    turns: bool = False
    datagrams: bool = False
    least: float = 1.0


TRANSPORTS = (
    Transport("CUBIC"),
    Transport("BBR", "bbr"),
    Transport("CUBIC, turns", turns=True),
    Transport("BBR, turns", "bbr", turns=True),
    Transport("datagrams", datagrams=True),
    Transport("datagrams, p = 5 %", datagrams=True, least=0.95),
)
CASES = (
    *(
        Case(f"incast, {size} KB, {queue}", 8, size * KB, 40, queue)
        for size in (100, 500, 2000)
        for queue in ("32KB", "64KB")
    ),
    Case("clean", 1, 5000 * KB, 11),
    *(Case(f"{loss} loss, 2 ms", 1, 5000 * KB, 11, "64KB", loss, "1ms") for loss in ("0.1%", "1%", "3%")),
    *(Case(f"{loss} loss, 20 ms", 1, 5000 * KB, 11, None, loss, "10ms") for loss in ("0%", "0.1%", "1%")),
)
TINY = (Case("incast, 1% loss, 2 ms, tiny", 2, 50 * KB, 2, "32KB", "1%", "1ms"),)
TINY_TRANSPORTS = tuple(transport for transport in TRANSPORTS if transport.name in ("CUBIC", "BBR", "datagrams"))


class Gate(BenchHead):
    """A store that lets all workers begin at once, and reports when the last one has its reply."""

    def __init__(self, folder: Path, nodes: int, size: int, least: float) -> None:
        super().__init__(folder, torch.zeros(size // 4))
        self._nodes, self._least = nodes, least
        self._joined: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._open = asyncio.Event()
        self._began = 0.0

    async def join(self, lease: LeaseId, address: str, steps: Sequence[int], why: str) -> LockstepGroup | Reply:  # noqa: ARG002
        """Wait for all."""
        self._joined[lease.round] = self._joined.get(lease.round, 0) + 1
        opened = self._open
        if self._joined[lease.round] == self._nodes:
            self._open, self._began = asyncio.Event(), time.perf_counter()
            opened.set()
        await opened.wait()
        return LockstepGroup(lease.round, 0, ())

    def expect(self, header: PushHeader, size: int) -> AcceptanceRule | Reply:  # noqa: ARG002
        """See `Head`."""
        return AcceptanceRule(1280, self._least)

    async def push(self, header: PushHeader, frames: Sequence[memoryview]) -> Receipt:
        """See `Head`; incomplete payloads are ignored."""
        receipt = await super().push(header, frames) if frames or self._least == 1 else Receipt(Reply.ACCEPTED)
        number = header.lease.round
        self._done[number] = self._done.get(number, 0) + 1
        if self._done[number] == self._nodes:
            print_line({"kind": "done", "seconds": time.perf_counter() - self._began})
        return receipt


async def be_head(host: str, settings: dict[str, Any]) -> None:
    """Serve until killed."""
    case, transport = Case(**settings["case"]), Transport(**settings["transport"])
    turns = AdmissionQueue if transport.turns else functools.partial(AdmissionQueue, max_holders=1 << 30)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        head = Gate(Path(folder), case.nodes, case.size, transport.least)
        print_line({"kind": "serving", "address": await StoreServer(head, Security(), turns).listen(host)})
        await asyncio.Event().wait()


async def be_worker(store: str, settings: dict[str, Any]) -> None:
    """Push so many times, each when all are there."""
    case, transport = Case(**settings["case"]), Transport(**settings["transport"])
    client = StoreClient(store, {})
    if transport.datagrams:
        await client.use_datagrams()
    flat = torch.rand(case.size // 4)
    digest = checksum([flat.numpy().data.cast("B")])
    for number in range(case.repeats + 1):  # the first opens connections and finds the link's rate
        lease = LeaseId("bench", 1, number, settings["number"], 100 * number + settings["number"])
        await client.join(lease, "", [])
        receipt = await client.push(PushHeader(lease, 1, 0.0, digest), flat)
        assert receipt.reply is Reply.ACCEPTED
    await client.close()


def measure(case: Case, transport: Transport) -> list[float]:
    """Return each repeat's time to completion over the ideal.

    Raises:
        RuntimeError: links cannot be shaped here, or a process ended early.
    """
    me, settings = (
        [sys.executable, "-m", "benchmarks.bad_links"],
        {"case": asdict(case), "transport": asdict(transport)},
    )
    with (
        tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder,
        machines(
            case.nodes, case.link, queue=case.queue, loss=case.loss, delay=case.one_way, congestion=transport.congestion
        ) as bed,
        Cast(bed, Path(folder)) as cast,
    ):
        cast.start("head", [*me, "head", bed.address("head"), json.dumps(settings)])
        (serving,) = cast.output.wait("serving", 1, START_SECONDS, cast.all_alive)
        for number in range(case.nodes):
            arguments = json.dumps({**settings, "number": number})
            cast.start(f"n{number}", [*me, "worker", serving["address"], arguments])
        patience = START_SECONDS + 60 * case.ideal_seconds * case.repeats
        lines = cast.output.wait("done", case.repeats + 1, patience, lambda: cast.processes["head"].poll() is None)
    return [line["seconds"] / case.ideal_seconds for line in lines[1:]]


def measure_interleaved(case: Case, transports: Sequence[Transport]) -> dict[str, list[float]]:
    """Measure half of each transport's repeats, then the other half in reverse order.

    A machine that others use grows slow and fast, and a transport that had the slow time alone would look bad.
    """
    half = case.repeats // 2
    ratios: dict[str, list[float]] = {transport.name: [] for transport in transports}
    for order, repeats in ((transports, case.repeats - half), (transports[::-1], half)):
        for transport in order:
            ratios[transport.name] += measure(replace(case, repeats=repeats), transport)
    return ratios


def figures_of(case: Case, ratios: dict[str, list[float]]) -> list[Figure]:
    """Return a case's figures, with its targets."""
    typical = {name: statistics.median(samples) for name, samples in ratios.items()}
    datagrams = ratios["datagrams"]
    figures = [Figure(f"{case.name}: {name}", typical[name], "x ideal", samples=ratios[name]) for name in ratios]
    better = min(value for name, value in typical.items() if not name.startswith("datagrams"))
    if case.nodes > 1:
        figures += [
            at_most(f"{case.name}: datagrams in the median", typical["datagrams"], "x ideal", 1.2),
            at_most(f"{case.name}: datagrams at worst", max(datagrams), "x ideal", 2.0),
            at_least(f"{case.name}: BBR / datagrams", typical["BBR"] / typical["datagrams"], "", 3.0),
            at_most(f"{case.name}: datagrams / the better TCP", typical["datagrams"] / better, "", BYTES_OVER_TCP),
        ]
    elif case.loss in (None, "0%"):
        figures.append(at_most(f"{case.name}: datagrams / the better TCP", typical["datagrams"] / better, "", 1.05))
    limit = 1.3 if case.one_way == "10ms" else 1.15 if (case.one_way, case.loss) == ("1ms", "1%") else None
    if limit:
        figures.append(at_most(f"{case.name}: datagrams in the median", typical["datagrams"], "x ideal", limit))
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure every case and report."""
    command = parser(__doc__)
    command.add_argument("--only", help="cases whose name holds this")
    options = command.parse_args(argv)
    among, transports = (TINY, TINY_TRANSPORTS) if options.tiny else (CASES, TRANSPORTS)
    cases = [case for case in among if (options.only or "") in case.name]
    figures = [Figure("bytes of datagrams / of TCP, with headers and seals", BYTES_OVER_TCP, "")]
    every: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        ratios = every[case.name] = measure_interleaved(case, transports)
        for name, samples in ratios.items():
            print(f"{case.name}: {name}: {statistics.median(samples):.2f} ({max(samples):.2f})", flush=True)
        figures += figures_of(case, ratios)
    return report("bad_links", options, figures, cases=[asdict(case) for case in cases], found=every)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["head", host, settings]:
            dask_settings.apply()
            asyncio.run(be_head(host, json.loads(settings)))
        case ["worker", store, settings]:
            dask_settings.apply()
            asyncio.run(be_worker(store, json.loads(settings)))
        case _:
            main()
