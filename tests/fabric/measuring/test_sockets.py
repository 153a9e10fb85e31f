"""Streams and round trips over loopback, and rates from byte marks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from idletrain.fabric.measuring import sockets

TOKEN = "t" * 32
HERE = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[sockets.Listener]:
    server = sockets.Listener(HERE, TOKEN)
    yield server
    server.close()


def test_round_trips_are_as_many_as_asked_for(listener: sockets.Listener) -> None:
    seconds = sockets.round_trips(HERE, listener.port, TOKEN, 20)
    assert len(seconds) == 20
    assert 0 < min(seconds) < 0.05


def test_a_stream_is_measured_where_it_arrives(listener: sockets.Listener) -> None:
    measured = sockets.stream(HERE, listener.port, TOKEN, 0.3)
    assert measured.moved_bytes > 10_000_000
    assert len(measured.rates) >= 3
    assert all(rate > 0 for rate in measured.rates)


def test_both_ways_at_once_and_several_connections(listener: sockets.Listener) -> None:
    outgoing, incoming = sockets.both_ways(HERE, listener.port, TOKEN, 0.2)
    assert outgoing.moved_bytes > 0
    assert incoming.moved_bytes > 0
    assert len(sockets.flows(HERE, listener.port, TOKEN, 0.2, 3)) == 3


def test_a_listener_reports_its_cpu_seconds(listener: sockets.Listener) -> None:
    before = sockets.cpu_seconds(HERE, listener.port, TOKEN)
    sockets.stream(HERE, listener.port, TOKEN, 0.2)
    assert sockets.cpu_seconds(HERE, listener.port, TOKEN) > before


def test_a_caller_without_the_token_gets_nothing(listener: sockets.Listener) -> None:
    with pytest.raises(OSError, match=r"hung up|reset"):
        sockets.round_trips(HERE, listener.port, "another", 1)


def test_a_closed_listener_cannot_be_reached() -> None:
    server = sockets.Listener(HERE, TOKEN)
    server.close()
    with pytest.raises(OSError, match="refused"):
        sockets.round_trips(HERE, server.port, TOKEN, 1)


def test_a_caller_that_talks_nonsense_does_no_harm(listener: sockets.Listener) -> None:
    with socket.create_connection((HERE, listener.port)) as line:
        line.sendall(b"\x00\xff no json\n")
        assert line.recv(10) == b""
    assert sockets.round_trips(HERE, listener.port, TOKEN, 1)


@given(st.floats(1e3, 1e10), st.integers(8, 100))
def test_a_steady_stream_has_its_rate_in_every_slice(rate: float, count: int) -> None:
    marks = [(k * 0.02, int(k * 0.02 * rate)) for k in range(count)]
    for measured in sockets.slices(marks):
        assert measured == pytest.approx(rate, abs=2 / 0.02)


def test_what_comes_while_a_stream_warms_up_is_not_counted() -> None:
    marks = [(0.0, 0), (0.05, 1_000_000), (0.1, 1_000_000), (0.2, 1_100_000), (0.3, 1_200_000)]
    assert sockets.slices(marks) == pytest.approx([1e6] * 10)


def test_a_stall_counts_for_as_long_as_it_lasts() -> None:
    flowing = [(0.02 * k, 20_000 * k) for k in range(21)]  # 0.4 s, of which a quarter is not counted
    stalled = [*flowing, (0.7, 420_000)]
    assert np.mean(sockets.slices(stalled)) == pytest.approx(320_000 / 0.6)


@pytest.mark.parametrize(
    ("marks", "rates"), [([], ()), ([(1.0, 5)], ()), ([(1.0, 0), (1.05, 50)], (pytest.approx(1000),))]
)
def test_a_short_stream_is_one_slice_or_none(marks: list[tuple[float, int]], rates: tuple[float, ...]) -> None:
    assert sockets.slices(marks) == rates
