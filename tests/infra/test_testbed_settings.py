"""What is asked of a testbed is read as people write it, and every fault is named before anything is made."""

from __future__ import annotations

import re
from typing import Any

import pytest
from idletrain_testbed.settings import Settings, TestbedError, parse_settings, rate

DEFAULTS: dict[str, Any] = {
    "nodes": 2,
    "link": None,
    "head_link": None,
    "cpus": None,
    "memory": None,
    "delay": None,
    "loss": None,
    "queue": None,
    "congestion": "cubic",
}


def settings_of(**given: Any) -> Settings:
    return parse_settings(**DEFAULTS | given)


@pytest.mark.parametrize(
    ("text", "bits"), [("10mbit", 10_000_000), ("1gbit", 10**9), ("1.5 mbit", 1_500_000), ("64kbit", 64_000)]
)
def test_rates_are_those_of_tc(text: str, bits: int) -> None:
    assert rate(text) == bits


@pytest.mark.parametrize("text", ["100mbps", "100", "fast", "-1mbit", "1e3mbit", "0mbit", "900gbit"])
def test_a_rate_that_tc_does_not_know_or_takes_otherwise_is_refused(text: str) -> None:
    with pytest.raises(TestbedError, match=rf"^link '{re.escape(text)}': (write|ask for) .*bit"):
        rate(text)


def test_all_is_read() -> None:
    result = settings_of(link="100mbit", cpus=0.25, memory="1GiB", delay="2ms", loss="0.5%", queue="64KiB")
    assert result == Settings(
        nodes=2,
        link=100_000_000,
        head_link=100_000_000,
        cpus=0.25,
        memory=2**30,
        delay=0.002,
        loss=0.005,
        queue=65_536,
        congestion="cubic",
    )


def test_the_head_may_have_another_link() -> None:
    result = settings_of(link="100mbit", head_link="1gbit")
    assert (result.rate("head"), result.rate("n0")) == (10**9, 10**8)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(TestbedError) as caught:
        settings_of(nodes=0, link="x", cpus=0.001, memory="1KB", delay="1h", loss="200%", queue="1B")
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["0", "0.001", "link", "memory", "delay", "loss", "queue"]
    assert all(line.endswith(".") for line in lines)
