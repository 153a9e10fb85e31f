"""Parse and check a testbed's settings before anything is created: rates, durations, shares, sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # as tc writes them; its mbps are bytes, so refused
DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_NODES = 250  # with the head they fit a /24
LEAST_RATE, MOST_RATE = 8_000, 10**11  # bits per second: one packet takes 1.5 s; more than a machine can emulate
LEAST_MEMORY, MOST_MEMORY = 2**20, 2**50  # bytes: below, no program starts
LEAST_QUEUE, MOST_QUEUE = 1_514, 2**30  # bytes: one packet of Ethernet
MOST_DELAY = 10.0  # seconds: above, TCP gives up connecting
LEAST_CPUS = 0.05  # one millisecond in a period of 20 ms (cgroups.py), the scheduler's minimum


class TestbedError(Exception):
    """An instance cannot be created or reached; the text ends in what to do."""

    __test__ = False  # pytest takes names that start with Test for its own


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A testbed's size and links, parsed; `None` means not limited.

    Rates are bits per second on the wire, Ethernet headers included.
    """

    nodes: int
    link: int | None
    head_link: int | None
    cpus: float | None  # of the machine's, per node
    memory: int | None  # bytes per node
    delay: float  # seconds, one way
    loss: float  # share of the packets, one way
    queue: int | None  # bytes that wait before each direction of a link; None: as many as suit its rate
    congestion: str  # TCP's congestion control

    def rate(self, node: str) -> int | None:
        """Return the initial rate of a node's link in bits per second, or None if it is not limited."""
        return self.head_link if node == "head" else self.link


def parse_settings(
    *,
    nodes: int,
    link: str | None,
    head_link: str | None,
    cpus: float | None,
    memory: str | None,
    delay: str | None,
    loss: str | None,
    queue: str | None,
    congestion: str,
) -> Settings:
    """Parse the settings that a user wrote.

    Raises:
        TestbedError: some are wrong; its text has a sentence for each.
    """
    reading = _Reading()
    if not 1 <= nodes <= MOST_NODES:
        reading.faults.append(f"{nodes} nodes: ask for 1 to {MOST_NODES}.")
    if cpus is not None and cpus < LEAST_CPUS:
        reading.faults.append(f"{cpus} CPUs a node: ask for {LEAST_CPUS} or more.")
    link_rate = reading.number("link", link, RATES, LEAST_RATE, MOST_RATE)
    head_rate = link_rate if head_link is None else reading.number("head link", head_link, RATES, LEAST_RATE, MOST_RATE)
    memory_bytes = reading.number("memory", memory, SIZES, LEAST_MEMORY, MOST_MEMORY)
    delay_seconds = reading.number("delay", delay, DURATIONS, 0, MOST_DELAY)
    loss_percent = reading.number("loss", loss, {"%": 1}, 0, 100)
    queue_bytes = reading.number("queue", queue, SIZES, LEAST_QUEUE, MOST_QUEUE)
    if reading.faults:
        raise TestbedError("\n".join(reading.faults))
    return Settings(
        nodes=nodes,
        link=_whole(link_rate),
        head_link=_whole(head_rate),
        cpus=cpus,
        memory=_whole(memory_bytes),
        delay=delay_seconds or 0.0,
        loss=(loss_percent or 0.0) / 100,
        queue=_whole(queue_bytes),
        congestion=congestion,
    )


def rate(text: str) -> int:
    """Parse a rate such as `100mbit` into bits per second."""
    return round(_number("link", text, RATES, LEAST_RATE, MOST_RATE))


class _Reading:
    """Parse numbers and collect their faults."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def number(
        self, what: str, text: str | None, units: Mapping[str, float], least: float, most: float
    ) -> float | None:
        try:
            return None if text is None else _number(what, text, units, least, most)
        except TestbedError as fault:
            self.faults.append(str(fault))
            return None


def _number(what: str, text: str, units: Mapping[str, float], least: float, most: float) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]+)", text.strip())
    if not match or match[2] not in units:
        raise TestbedError(f"{what} {text!r}: write a number and one of {', '.join(units)}.")
    value = float(match[1]) * units[match[2]]
    if not least <= value <= most:
        unit, size = next(iter(units.items()))
        raise TestbedError(f"{what} {text!r}: ask for {least / size:.10g}{unit} to {most / size:.10g}{unit}.")
    return value


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
