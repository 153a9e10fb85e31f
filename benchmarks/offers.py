"""Measure how long it takes to choose the machines to request, once catalogue and prices are on disk.

A region of 1,400 types in 3 zones is fetched from clients that answer at once, which fills the cache; then the whole of
`idletrain offers` is timed: read the cache, rank every pool, choose those to ask for, draw the table.

    python -m benchmarks.offers [--tiny] [--json FILE]

Target: 2 s.
"""

from __future__ import annotations

import datetime
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from benchmarks.report import Figure, at_most, report, with_preset
from idletrain.cli import offers
from idletrain.cloud import instance_types
from idletrain.cloud.aws import pricing
from idletrain.cloud.instance_types import GIB, NodeNeed

REGION = "eu-west-1"
ZONES = tuple(f"{REGION}{letter}" for letter in "abc")
SIZES = {"large": 2, "xlarge": 4, **{f"{n}xlarge": 4 * n for n in (2, 4, 8, 12, 16, 24, 32, 48)}}  # vCPUs
NEED = NodeNeed(memory_bytes=2 * GIB)
NODES = 8


@dataclass(frozen=True)
class Preset:
    """The region's size, and repetitions."""

    families: int = 140  # of ten sizes each
    repeats: int = 15


TINY = Preset(families=5, repeats=2)


class Region:
    """Clients of EC2 and of the price list, with answers that are at hand."""

    def __init__(self, families: int) -> None:
        self.meta = SimpleNamespace(region_name=REGION, endpoint_url=f"https://ec2.{REGION}.amazonaws.com")
        self._types = [
            (f"c{n}i.{size}", vcpus, vcpus * (2, 4, 8)[n % 3]) for n in range(families) for size, vcpus in SIZES.items()
        ]

    def get_paginator(self, call: str) -> Any:
        """Return a paginator whose one page is the response."""
        rows = {
            "describe_instance_types": ("InstanceTypes", self._items),
            "describe_instance_type_offerings": ("InstanceTypeOfferings", self._offerings),
            "describe_spot_price_history": ("SpotPriceHistory", self._spot_prices),
            "get_products": ("PriceList", self._products),
        }
        key, answer = rows[call]
        return SimpleNamespace(paginate=lambda **_: [{key: list(answer())}])

    def _items(self) -> Iterator[dict[str, Any]]:
        for name, vcpus, gib in self._types:
            yield {
                "InstanceType": name,
                "VCpuInfo": {"DefaultVCpus": vcpus},
                "MemoryInfo": {"SizeInMiB": gib * 1024},
                "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
            }

    def _offerings(self) -> Iterator[dict[str, Any]]:
        for name, _, _ in self._types:
            for zone in ZONES:
                yield {"InstanceType": name, "Location": zone}

    def _spot_prices(self) -> Iterator[dict[str, Any]]:
        now = datetime.datetime.now(datetime.UTC)
        for k, (name, vcpus, _) in enumerate(self._types):
            for n, zone in enumerate(ZONES):
                price = f"{vcpus * (0.01 + (k * 7 + n * 3) % 11 / 1000):.6f}"
                yield {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": now}

    def _products(self) -> Iterator[str]:
        for name, vcpus, _ in self._types:
            dimensions = {"rate": {"unit": "Hrs", "pricePerUnit": {"USD": f"{vcpus * 0.05:.6f}"}}}
            product = {"attributes": {"instanceType": name}}
            yield json.dumps({"product": product, "terms": {"OnDemand": {"term": {"priceDimensions": dimensions}}}})


def measure_once(region: Region, folder: Path) -> tuple[float, float]:
    """Return the seconds until the market is at hand, and until the table is drawn."""
    started = time.perf_counter()
    snapshot = pricing.fetch(region, region, pricing.PriceCache(folder))
    fetched = time.perf_counter()
    ranked = snapshot.offers(NEED, "spot")
    pools = instance_types.diversify(ranked, NODES)
    Console(file=io.StringIO(), width=120).print(offers.table(ranked, snapshot.estimate))
    assert not pools.few
    assert not snapshot.estimate
    return fetched - started, time.perf_counter() - started


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    region = Region(preset.families)
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        measure_once(region, Path(folder))  # fills the cache
        seconds = [measure_once(region, Path(folder)) for _ in range(preset.repeats)]
    fetches, wholes = zip(*seconds, strict=True)
    what = f"{preset.families * len(SIZES):,} types in {len(ZONES)} zones"
    figures = [
        Figure(f"read the cache of {what}", statistics.median(fetches), "s", samples=fetches),
        at_most(f"rank {what}, warm", statistics.median(wholes), "s", 2.0, wholes),
    ]
    return report("offers", options, figures)


if __name__ == "__main__":
    main()
