"""Durations and sizes as users write them, and what is neither."""

from __future__ import annotations

import time
from typing import Any

import pytest

from idletrain.quantities import parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15s", 15), ("10m", 600), ("4h", 14400), ("1d", 86400), ("250ms", 0.25), (3, 3), ("1.5", 1.5)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 weeks", "-3s", True, None, "1e3"])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="a duration such as 15s, 10m or 4h"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7", 7), (9, 9), ("1kb", 1000)],
)
def test_sizes(text: Any, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "2 Gib/s", "-1GB", True, "2TiB"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="a size such as 512MiB or 2GB"):
        parse_bytes(text)


NEITHER = [
    "1e400GB", "1e400s", "9" * 400, "9" * 1_000_000 + "GB", "x" * 1_000_000, " " * 1_000_000, "nan", "inf", "-inf",
    "1.2.3", ".", "\uff11GB", "²s", "0x10", "\0", 10**400, float("inf"), float("nan"), -1, None, [], {}, b"1s",
    "9" * 39 + "GIB",
]  # fmt: skip


@pytest.mark.parametrize("parse", [parse_seconds, parse_bytes])
@pytest.mark.parametrize("value", NEITHER, ids=lambda value: f"{type(value).__name__}")
def test_nothing_else_is_read_nor_takes_long(parse: Any, value: Any) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"should be a (duration|size) such as") as caught:
        parse(value)
    assert time.monotonic() - began < 1
    assert len(str(caught.value)) < 100
