"""The market is fetched with real clients, kept as long as it may be, and estimated where nobody sells a price list."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.stub import ANY, Stubber
from pydantic import TypeAdapter
from rehearsal import Sandbox

from idletrain.cloud.aws import pricing as market
from idletrain.cloud.instance_types import GIB, TIB, InstanceType, NodeNeed, diversify
from idletrain.cloud.market import MarketSnapshot
from idletrain.errors import JobError

REGION = "eu-west-1"
ANYTHING = TypeAdapter(Any)
KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}


class Clock:
    """A clock that is put forward."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Shop:
    """A cloud's answers, counted."""

    class meta:
        endpoint_url = "https://ec2.eu-west-1.amazonaws.com"

    def __init__(self, *answers: Any) -> None:
        self.answers, self.requests = list(answers), 0

    def __call__(self) -> Any:
        self.requests += 1
        return self.answers.pop(0)


def ec2_client() -> Any:
    return boto3.client("ec2", region_name=REGION, **KEYS)


# --- what is kept ------------------------------------------------------------------------------------------------


def test_an_answer_is_kept_as_long_as_it_may_be(tmp_path: Path) -> None:
    clock, shop = Clock(), Shop({"a": 1}, {"a": 2})
    cache = market.PriceCache(tmp_path / "new" / "folder", clock)
    prices = []
    for at in (0, 599, 600, 601):
        clock.now = 1_700_000_000.0 + at
        prices.append(cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop)["a"])
    assert prices == [1, 1, 1, 2]
    assert shop.requests == 2


def test_a_file_from_the_future_is_not_believed(tmp_path: Path) -> None:
    clock, shop = Clock(), Shop({"a": 1}, {"a": 2})
    cache = market.PriceCache(tmp_path, clock)
    cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop)
    clock.now -= 86400
    assert cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) == {"a": 2}


def test_regions_names_and_clouds_are_kept_apart(tmp_path: Path) -> None:
    shop, other = Shop(1, 2, 3), Shop(4)
    other.meta = type("meta", (), {"endpoint_url": "http://127.0.0.1:5000"})  # type: ignore[misc, assignment]
    cache = market.PriceCache(tmp_path, Clock())
    for _ in range(2):
        assert cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) == 1
        assert cache.get(shop, "spot.us-east-1", ANYTHING, 600, shop) == 2
        assert cache.get(shop, f"types.{REGION}", ANYTHING, 600, shop) == 3
        assert cache.get(other, f"spot.{REGION}", ANYTHING, 600, other) == 4
    assert (shop.requests, other.requests) == (3, 1)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"null", b'{"at": 1700000000.0}', b'{"at": "noon", "answer": 9}', b"\xff\xfe\x00", b"{}"],
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path, damage: bytes) -> None:
    shop = Shop(1, 2)
    cache = market.PriceCache(tmp_path, Clock())
    cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) == 2
    assert json.loads(path.read_bytes())["answer"] == 2


def test_nothing_is_not_kept(tmp_path: Path) -> None:
    shop = Shop({}, {"a": 1})
    cache = market.PriceCache(tmp_path, Clock())
    assert cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) == {}
    assert cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) == {"a": 1}


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    shop = Shop(1, 2)
    cache = market.PriceCache(tmp_path / "file", Clock())
    assert [cache.get(shop, f"spot.{REGION}", ANYTHING, 600, shop) for _ in range(2)] == [1, 2]
    assert "cannot be written" in caplog.text


# --- spot prices -------------------------------------------------------------------------------------------------


def spot(name: str, zone: str, price: str, day: int) -> dict[str, Any]:
    at = datetime.datetime(2026, 11, day, tzinfo=datetime.UTC)
    row = {"InstanceType": name, "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at}
    return row | {"ProductDescription": "Linux/UNIX"}


def test_the_newest_spot_price_of_every_pool_over_all_pages(tmp_path: Path) -> None:
    client = ec2_client()
    query = {"StartTime": ANY, "ProductDescriptions": ["Linux/UNIX"], "MaxResults": 1000}
    with Stubber(client) as stub:
        stub.add_response(
            "describe_spot_price_history",
            {
                "SpotPriceHistory": [
                    spot("c7i.large", "eu-west-1a", "0.03", 5),
                    spot("c7i.large", "eu-west-1a", "1", 4),
                ],
                "NextToken": "more",
            },
            query,
        )
        stub.add_response(
            "describe_spot_price_history",
            {
                "SpotPriceHistory": [
                    spot("c7i.large", "eu-west-1b", "0.04", 3),
                    spot("c7i.large", "eu-west-1a", "2", 1),
                    spot("c7i.large", "eu-west-1b", "0.05", 6),
                ]
            },
            query | {"NextToken": "more"},
        )
        cache = market.PriceCache(tmp_path)
        for _ in range(2):  # the second from disk
            assert market.spot_prices(client, cache) == {
                ("c7i.large", "eu-west-1a"): 0.03,
                ("c7i.large", "eu-west-1b"): 0.05,
            }
        stub.assert_no_pending_responses()


# --- on-demand prices --------------------------------------------------------------------------------------------


def product(name: str | None, usd: str, unit: str = "Hrs", terms: str = "OnDemand") -> str:
    dimension = {"unit": unit, "pricePerUnit": {"USD": usd}}
    attributes = {"instanceType": name} if name else {}
    return json.dumps(
        {"product": {"attributes": attributes}, "terms": {terms: {"A.B": {"priceDimensions": {"A.B.C": dimension}}}}}
    )


@contextlib.contextmanager
def price_list(*pages: list[str], status: int = 200) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """A client of a price list on loopback, and the requests that it got."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(query)
            number = int(query.get("NextToken", 0))
            answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": pages[number] if pages else []}
            if number + 1 < len(pages):
                answer["NextToken"] = str(number + 1)
            content = json.dumps(answer).encode() if status == 200 else b"<html>no such service</html>"
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        client = boto3.client(
            "pricing",
            region_name=market.PRICING_REGION,
            endpoint_url=f"http://127.0.0.1:{server.server_port}",
            config=Config(retries={"total_max_attempts": 1}),
            **KEYS,
        )
        try:
            yield client, requests
        finally:
            client.close()
            server.shutdown()
            thread.join()


def test_the_price_list_is_read_to_its_last_page_and_kept(tmp_path: Path) -> None:
    first = [product("c7i.large", "0.0893"), product("c7i.large.db", "0.5", unit="Quantity"), product(None, "0.1")]
    second = [
        product("m7i.large", "0.1008"),
        product("p5.48xlarge", "0.0000"),
        product("r7i.large", "1", terms="Reserved"),
    ]
    cache = market.PriceCache(tmp_path)
    with price_list(first, second) as (client, requests):
        for _ in range(2):
            assert market.on_demand_prices(client, REGION, cache) == {"c7i.large": 0.0893, "m7i.large": 0.1008}
    assert len(requests) == 2
    filters = {(f["Field"], f["Value"]) for f in requests[0]["Filters"]}
    assert {("regionCode", REGION), ("operatingSystem", "Linux"), ("tenancy", "Shared")} <= filters


def test_a_price_list_that_fails_is_said_and_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with price_list(status=500) as (client, requests):
        assert market.on_demand_prices(client, REGION, market.PriceCache(tmp_path)) is None
    assert len(requests) == 1
    assert "on-demand prices are estimates of June 2025" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_price_list_out_of_reach_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with price_list() as (client, _):
        pass
    assert market.on_demand_prices(client, REGION, market.PriceCache(tmp_path)) is None
    assert "is unavailable" in caplog.text
    assert market.on_demand_prices(None, REGION, market.PriceCache(tmp_path)) is None


def machine(name: str, vcpus: int, gib: float, **fields: Any) -> InstanceType:
    return InstanceType(name=name, vcpus=vcpus, memory_bytes=int(gib * GIB), **fields)


@pytest.mark.parametrize(
    ("type_", "list_price"),
    [
        # AWS price list, us-east-1, Linux, June 2025
        (machine("c7i.large", 2, 4), 0.08925),
        (machine("m7i.large", 2, 8), 0.1008),
        (machine("r7i.large", 2, 16), 0.1323),
        (machine("m7i.24xlarge", 96, 384), 4.8384),
        (machine("c6a.large", 2, 4), 0.0765),
        (machine("m7g.large", 2, 8, architecture="arm64"), 0.0816),
        (machine("x2idn.16xlarge", 64, 1024), 6.669),
        (machine("g4dn.xlarge", 4, 16, gpus=1), 0.526),
        (machine("g5.xlarge", 4, 16, gpus=1), 1.006),
        (machine("g6.xlarge", 4, 16, gpus=1), 0.8048),
        (machine("p4d.24xlarge", 96, 1152, gpus=8), 21.96),
        (machine("p5.48xlarge", 192, 2048, gpus=8), 55.04),
    ],
)
def test_an_estimate_is_near_the_list_price(type_: InstanceType, list_price: float) -> None:
    assert market.estimate(type_) == pytest.approx(list_price, rel=0.2)


def test_what_is_not_in_the_table_is_not_estimated() -> None:
    assert market.estimate(machine("p9.48xlarge", 192, 2048, gpus=8)) is None
    assert market.estimate(machine("trn1.2xlarge", 8, 32, other_accelerators=True)) is None


# --- all of it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def region(running: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> tuple[MarketSnapshot, Path]:
    """A whole region as moto has it, all its types, without a price list; and where it was kept."""
    folder = tmp_path_factory.mktemp("market")
    pricing = running.client("pricing", market.PRICING_REGION)
    return market.fetch(running.client("ec2"), pricing, market.PriceCache(folder)), folder


@pytest.fixture
def snapshot(region: tuple[MarketSnapshot, Path]) -> MarketSnapshot:
    return region[0]


def test_a_whole_region(snapshot: MarketSnapshot) -> None:
    assert len(snapshot.types) > 800
    assert snapshot.types["c7i.large"].memory_bytes == 4 * GIB
    assert set(snapshot.offerings["c7i.large"]) == {"eu-west-1a", "eu-west-1b", "eu-west-1c"}
    assert ("c7i.large", "eu-west-1a") in snapshot.spot_prices
    assert snapshot.estimate
    assert snapshot.on_demand_prices["m7i.large"] == market.estimate(snapshot.types["m7i.large"])


def test_a_region_is_read_from_disk_the_second_time(region: tuple[MarketSnapshot, Path], running: Sandbox) -> None:
    client = running.client("ec2")
    with Stubber(client):  # refuses every call
        assert market.fetch(client, None, market.PriceCache(region[1])) == region[0]


class SlowRegion:
    """A client of a region that refuses to name its types, and whose other answers take for ever."""

    def __init__(self) -> None:
        self.meta = SimpleNamespace(region_name=REGION, endpoint_url="https://ec2.example")
        self.asked, self.released = threading.Semaphore(0), threading.Event()

    def get_paginator(self, operation: str) -> Any:
        if operation == "describe_instance_types":
            for _ in range(2):
                assert self.asked.acquire(timeout=60)
            raise JobError("refused")
        self.asked.release()
        self.released.wait()
        raise JobError("released")


def test_no_slow_answer_holds_up_the_end_of_a_fetch_that_failed(tmp_path: Path) -> None:
    slow = SlowRegion()
    try:
        with pytest.raises(JobError, match="refused"):
            market.fetch(slow, None, market.PriceCache(tmp_path))
        assert not slow.released.is_set()
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "market")
    finally:
        slow.released.set()


def test_no_cpu_node_has_an_accelerator_and_none_is_of_metal(snapshot: MarketSnapshot) -> None:
    offers = snapshot.offers(NodeNeed(memory_bytes=2 * GIB), "on-demand")
    families = {offer.type.family for offer in offers}
    assert {"c7i", "m7i", "r7i", "c7a"} <= families
    assert not families & {"trn1", "trn1n", "inf1", "inf2", "f2", "vt1", "dl2q", "g5", "p5", "t3", "m7g", "mac2"}
    assert not any("metal" in offer.type.name for offer in offers)
    pools = diversify(offers, 8)
    assert not pools.few
    assert len(pools.zones) == 3


def test_gpu_nodes_have_whole_gpus(snapshot: MarketSnapshot) -> None:
    offers = snapshot.offers(NodeNeed(memory_bytes=2 * GIB, gpus=1), "on-demand")
    assert {"g5", "g4dn"} <= {offer.type.family for offer in offers}
    assert all(offer.type.gpus >= 1 for offer in offers)


def test_only_zones_that_the_run_can_use(snapshot: MarketSnapshot) -> None:
    offers = snapshot.offers(NodeNeed(memory_bytes=2 * GIB), "on-demand", zones=["eu-west-1b"])
    assert {offer.zone for offer in offers} == {"eu-west-1b"}


@pytest.mark.parametrize(
    ("need", "options", "arguments"),
    [
        (
            NodeNeed(memory_bytes=99 * TIB),
            {},
            "nodes.memory: no machine has 99.0 TiB to spare for a subnet; the nearest is",
        ),
        (NodeNeed(memory_bytes=GIB, gpus=16), {}, "nodes.gpu: no machine has 16 GPUs"),
        (
            NodeNeed(memory_bytes=GIB),
            {"max_price": 0.001},
            "nodes.max_price: is below the price of every suitable machine",
        ),
        (NodeNeed(memory_bytes=GIB), {"zones": ["mars-1a"]}, "no zone that the run can use offers it"),
    ],
)
def test_what_cannot_be_served_is_refused(
    snapshot: MarketSnapshot, need: NodeNeed, options: dict[str, Any], arguments: str
) -> None:
    with pytest.raises(JobError, match=arguments):
        snapshot.offers(need, "on-demand", **options)
