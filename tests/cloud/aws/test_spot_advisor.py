"""How often AWS takes machines back, from a file of the shape that its advisor page reads."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from idletrain.cloud.aws import spot_advisor
from idletrain.cloud.aws.pricing import PriceCache

FILE = {
    "global_rate": "<10%",
    "instance_types": {"m5.large": {"cores": 2, "emr": True, "ram_gb": 8.0}},
    "ranges": [
        {"index": 0, "label": "<5%", "dots": 0, "max": 5},
        {"index": 1, "label": "5-10%", "dots": 1, "max": 11},
        {"index": 4, "label": ">20%", "dots": 4, "max": 100},
    ],
    "spot_advisor": {
        "eu-west-1": {
            "Linux": {"m5.large": {"s": 60, "r": 0}, "c5.large": {"s": 50, "r": 1}, "g6e.4xlarge": {"s": 62, "r": 4}},
            "Windows": {"m5.large": {"s": 30, "r": 4}},
        }
    },
}
SHARES = {"m5.large": 0.05, "c5.large": 0.11, "g6e.4xlarge": spot_advisor.MOST_SHARE}


@pytest.fixture
def served() -> Iterator[Any]:
    """A server of the file: its address, and how often it was read."""
    content = json.dumps(FILE).encode()
    found = SimpleNamespace(reads=0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.reads += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def ec2(host: str = "ec2.eu-west-1.amazonaws.com") -> Any:
    return SimpleNamespace(meta=SimpleNamespace(endpoint_url=f"https://{host}", region_name="eu-west-1"))


def test_a_type_s_share_is_its_range_s_upper_end() -> None:
    content = json.dumps(FILE).encode()
    assert spot_advisor.interruption_shares(content, "eu-west-1") == SHARES
    assert spot_advisor.interruption_shares(content, "mars-1") == {}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"ranges": 1, "spot_advisor": {}}', b'{"ranges": [{}]}'])
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own, or one that says so)
        spot_advisor.interruption_shares(content, "eu-west-1")


def test_it_is_read_once_a_day(served: Any, tmp_path: Path) -> None:
    now = [1e9]
    cache = PriceCache(tmp_path, lambda: now[0])
    for _ in range(2):
        assert spot_advisor.shares(ec2(), cache, served.url) == SHARES
    assert served.reads == 1
    now[0] += spot_advisor.FRESH_SECONDS + 1
    assert spot_advisor.shares(ec2(), cache, served.url) == SHARES
    assert served.reads == 2


def test_where_it_cannot_be_had_and_of_another_cloud_nothing_is_known(served: Any, tmp_path: Path) -> None:
    assert spot_advisor.shares(ec2(), PriceCache(tmp_path), "http://127.0.0.1:9/") == {}
    assert spot_advisor.shares(ec2("127.0.0.1"), PriceCache(tmp_path), served.url) == {}
    assert served.reads == 0
