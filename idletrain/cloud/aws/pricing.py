"""Fetch a region's instance types, zones and current prices, all at once, and cache them on disk.

boto3 clients are arguments. Where the price list is unavailable, on-demand prices are estimated from a dated table,
and marked as estimates.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from idletrain.cloud.aws.errors import REQUEST_ERRORS
from idletrain.cloud.instance_types import ARCHITECTURE, GIB, MIB, InstanceType
from idletrain.cloud.market import MarketSnapshot
from idletrain.storage import write_whole

logger = logging.getLogger(__name__)
PRICING_REGION = "us-east-1"  # one of the few regions where the price list is served
TYPES_SECONDS = 7 * 86400.0
OFFERINGS_SECONDS = 86400.0  # a type comes to a zone now and then
SPOT_SECONDS = 600.0  # spot prices move by the hour
ON_DEMAND_SECONDS = 7 * 86400.0
MOST_ROWS = 1000  # rows of a page, where EC2 lets us choose
# USD an hour, Linux, us-east-1, June 2025, fitted to the list prices of c7i, m7i, r7i (the same within 3 %), c7g and
# r7g, x2idn; families with local disks or faster networks cost up to 30 % more, other regions up to 50 %.
ESTIMATE_DATE = "June 2025"
VCPU_RATE, VCPU_RATE_ARM = 0.0375, 0.0305
GIB_RATE, GIB_RATE_ARM, GIB_RATE_LARGE = 0.0036, 0.0029, 0.0045  # the last for the x and u families
GPU_RATES = {  # for one of its GPUs, on top of its processors and RAM
    "g4dn": 0.32,
    "g5": 0.80,
    "g6": 0.60,
    "g6e": 1.60,
    "p4d": 1.80,
    "p4de": 2.50,
    "p5": 5.10,
}

SpotPrices = dict[tuple[str, str], float]
T = TypeVar("T")
TYPES = TypeAdapter(list[InstanceType])
OFFERINGS = TypeAdapter(dict[str, list[str]])
SPOT = TypeAdapter(list[tuple[str, str, float]])
ON_DEMAND = TypeAdapter(dict[str, float])


class PriceCache:
    """A cache of answers on disk; the reader sets how old an answer may be.

    Args:
        folder: Holds the files; created if missing.
        clock: Returns Unix seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def get(self, client: Any, name: str, kind: TypeAdapter[T], max_age_seconds: float, fetch: Callable[[], T]) -> T:
        """Return a cached answer, or fetch a new one; a damaged file counts as missing; empty answers are not cached.

        Args:
            client: The client that fetches: another endpoint is another cloud.
            name: Name of the request and of the region that the answer is about.
            kind: Checks and converts a cached answer.
            max_age_seconds: Largest age of a cached answer.
            fetch: Returns the answer.
        """
        host = urlsplit(client.meta.endpoint_url).hostname
        path = self._folder / f"{name}.{host}.json"
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
            cached = json.loads(path.read_bytes())
            if 0 <= self._clock() - cached["at"] <= max_age_seconds:
                return kind.validate_python(cached["answer"])
        answer = fetch()
        if not answer:
            return answer
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stored = {"at": self._clock(), "answer": kind.dump_python(answer, mode="json")}
            write_whole(path, json.dumps(stored).encode())
        except OSError as error:
            logger.warning("%s cannot be written (%s); the answer will be fetched again", path, error.strerror)
        return answer


def parse_type(item: Mapping[str, Any]) -> InstanceType:
    """Parse an item of DescribeInstanceTypes."""
    gpus = item.get("GpuInfo", {}).get("Gpus", ())
    usable = [gpu for gpu in gpus if gpu.get("Manufacturer") == "NVIDIA" and gpu.get("Count", 0) >= 1]
    others = ("NeuronInfo", "InferenceAcceleratorInfo", "FpgaInfo", "MediaAcceleratorInfo")
    architectures = item["ProcessorInfo"]["SupportedArchitectures"]
    return InstanceType(
        name=item["InstanceType"],
        vcpus=item["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=item["MemoryInfo"]["SizeInMiB"] * MIB,
        gpus=sum(gpu["Count"] for gpu in usable),
        gpu_memory_bytes=sum(gpu["Count"] * gpu.get("MemoryInfo", {}).get("SizeInMiB", 0) for gpu in usable) * MIB,
        architecture=ARCHITECTURE if ARCHITECTURE in architectures else architectures[0],
        burstable=item.get("BurstablePerformanceSupported", False),
        bare_metal=item.get("BareMetal", False),
        current_generation=item.get("CurrentGeneration", True),
        other_accelerators=len(usable) < len(gpus) or any(item.get(other) for other in others),
    )


def fetch(ec2: Any, pricing: Any, cache: PriceCache) -> MarketSnapshot:
    """Fetch a region's types, zones and prices in parallel.

    Args:
        ec2: An EC2 client of the region.
        pricing: A client of the price list (in PRICING_REGION), or None for estimates.
        cache: Cache of the answers.
    """
    all_types = _begin(lambda: types(ec2, cache))
    zones = _begin(lambda: offerings(ec2, cache))
    spot = _begin(lambda: spot_prices(ec2, cache))
    listed = _begin(lambda: on_demand_prices(pricing, ec2.meta.region_name, cache))
    known = {type_.name: type_ for type_ in all_types.result()}
    on_demand = listed.result()
    estimates = {name: price for name, type_ in known.items() if (price := estimate(type_)) is not None}
    return MarketSnapshot(known, zones.result(), spot.result(), on_demand or estimates, estimate=not on_demand)


def _begin(request: Callable[[], T]) -> Future[T]:
    """Make a request in a thread for which nothing waits: dozens of pages do not hold up a Ctrl-C or an error."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001 (raised where the answer is used)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="market").start()
    return answer


def types(ec2: Any, cache: PriceCache) -> list[InstanceType]:
    """Return the region's instance types, without those that are never suitable: that halves the pages."""
    filters = [
        {"Name": "processor-info.supported-architecture", "Values": [ARCHITECTURE]},
        {"Name": "bare-metal", "Values": ["false"]},
    ]

    def request() -> list[InstanceType]:
        pages = ec2.get_paginator("describe_instance_types").paginate(Filters=filters)
        return [parse_type(item) for page in pages for item in page["InstanceTypes"]]

    # The name depends on the fields, so that a newer version does not read an older one's file.
    name = f"types-{zlib.crc32(' '.join(InstanceType.__slots__).encode()):08x}"
    return cache.get(ec2, f"{name}.{ec2.meta.region_name}", TYPES, TYPES_SECONDS, request)


def offerings(ec2: Any, cache: PriceCache) -> dict[str, list[str]]:
    """Return the zones that offer each type, sorted."""

    def request() -> dict[str, list[str]]:
        paginator = ec2.get_paginator("describe_instance_type_offerings")
        pages = paginator.paginate(LocationType="availability-zone", PaginationConfig={"PageSize": MOST_ROWS})
        zones: dict[str, list[str]] = {}
        for page in pages:
            for item in page["InstanceTypeOfferings"]:
                zones.setdefault(item["InstanceType"], []).append(item["Location"])
        return {name: sorted(offered) for name, offered in sorted(zones.items())}

    return cache.get(ec2, f"offerings.{ec2.meta.region_name}", OFFERINGS, OFFERINGS_SECONDS, request)


def spot_prices(ec2: Any, cache: PriceCache) -> SpotPrices:
    """Return the current spot price of every type and zone, USD an hour."""

    def request() -> list[tuple[str, str, float]]:
        paginator = ec2.get_paginator("describe_spot_price_history")
        pages = paginator.paginate(
            StartTime=datetime.datetime.now(datetime.UTC),
            ProductDescriptions=["Linux/UNIX"],
            PaginationConfig={"PageSize": MOST_ROWS},
        )
        return _newest(row for page in pages for row in page["SpotPriceHistory"])

    rows = cache.get(ec2, f"spot.{ec2.meta.region_name}", SPOT, SPOT_SECONDS, request)
    return {(name, zone): price for name, zone, price in rows}


def spot_prices_of(ec2: Any, names: Collection[str]) -> SpotPrices:
    """Return the current spot prices of a few types, USD an hour; one call for up to 300."""
    answer = ec2.describe_spot_price_history(
        StartTime=datetime.datetime.now(datetime.UTC), ProductDescriptions=["Linux/UNIX"], InstanceTypes=sorted(names)
    )
    return {(name, zone): price for name, zone, price in _newest(answer["SpotPriceHistory"])}


def _newest(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, float]]:
    newest: dict[tuple[str, str], tuple[datetime.datetime, float]] = {}
    for row in rows:
        pool, price = (row["InstanceType"], row["AvailabilityZone"]), (row["Timestamp"], float(row["SpotPrice"]))
        if pool not in newest or price[0] > newest[pool][0]:
            newest[pool] = price
    return [(*pool, price) for pool, (_, price) in sorted(newest.items())]


def on_demand_prices(pricing: Any, region: str, cache: PriceCache) -> dict[str, float] | None:
    """Return on-demand prices by type, USD an hour; None where the price list is unavailable.

    Args:
        pricing: A client of the price list, or None.
        region: The region.
        cache: Cache of the answers.
    """
    if pricing is None:
        return None
    attributes = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in attributes.items()]

    def request() -> dict[str, float]:
        pages = pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
        products = (json.loads(text) for page in pages for text in page["PriceList"])
        return dict(sorted(filter(None, map(_listed_price, products))))

    try:
        return cache.get(pricing, f"on-demand.{region}", ON_DEMAND, ON_DEMAND_SECONDS, request)
    except REQUEST_ERRORS as error:
        reason = str(error).partition("\n")[0]
        logger.info("the price list is unavailable (%s); on-demand prices are estimates of %s", reason, ESTIMATE_DATE)
        return None


def _listed_price(product: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the type and price of a product that is a machine with an hourly price, or None."""
    name = product["product"]["attributes"].get("instanceType")
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if name and price > 0 and dimension["unit"] == "Hrs":
                return name, price
    return None


def estimate(type_: InstanceType) -> float | None:
    """Estimate the on-demand price, USD an hour; None for GPUs and other accelerators that are not in the table."""
    if type_.other_accelerators or (type_.gpus and type_.family not in GPU_RATES):
        return None
    arm = type_.architecture == "arm64"
    large = type_.family[0] in "xu"
    gib = GIB_RATE_LARGE if large else GIB_RATE_ARM if arm else GIB_RATE
    machine = type_.vcpus * (VCPU_RATE_ARM if arm else VCPU_RATE) + type_.memory_bytes / GIB * gib
    return round(machine + type_.gpus * GPU_RATES.get(type_.family, 0.0), 4)
