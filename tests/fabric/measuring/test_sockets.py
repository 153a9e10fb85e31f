"""Streams and round trips over loopback, and what is made of marks."""

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
def post() -> Iterator[sockets.Listener]:
    made = sockets.Listener(HERE, TOKEN)
    yield made
    made.close()


def test_round_trips_are_as_many_as_asked_for(post: sockets.Listener) -> None:
    seconds = sockets.round_trips(HERE, post.port, TOKEN, 20)
    assert len(seconds) == 20
    assert 0 < min(seconds) < 0.05


def test_a_stream_is_measured_where_it_arrives(post: sockets.Listener) -> None:
    found = sockets.stream(HERE, post.port, TOKEN, 0.3)
    assert found.moved_bytes > 10_000_000
    assert len(found.rates) >= 3
    assert all(rate > 0 for rate in found.rates)


def test_both_ways_at_once_and_several_connections(post: sockets.Listener) -> None:
    gone, come = sockets.both_ways(HERE, post.port, TOKEN, 0.2)
    assert gone.moved_bytes > 0
    assert come.moved_bytes > 0
    assert len(sockets.flows(HERE, post.port, TOKEN, 0.2, 3)) == 3


def test_a_post_tells_its_cpu_seconds(post: sockets.Listener) -> None:
    before = sockets.cpu_seconds(HERE, post.port, TOKEN)
    sockets.stream(HERE, post.port, TOKEN, 0.2)
    assert sockets.cpu_seconds(HERE, post.port, TOKEN) > before


def test_who_does_not_know_the_token_gets_nothing(post: sockets.Listener) -> None:
    with pytest.raises(OSError, match=r"hung up|reset"):
        sockets.round_trips(HERE, post.port, "another", 1)


def test_a_post_that_is_closed_cannot_be_reached() -> None:
    made = sockets.Listener(HERE, TOKEN)
    made.close()
    with pytest.raises(OSError, match="refused"):
        sockets.round_trips(HERE, made.port, TOKEN, 1)


def test_a_caller_that_talks_nonsense_does_no_harm(post: sockets.Listener) -> None:
    with socket.create_connection((HERE, post.port)) as line:
        line.sendall(b"\x00\xff no json\n")
        assert line.recv(10) == b""
    assert sockets.round_trips(HERE, post.port, TOKEN, 1)


@given(st.floats(1e3, 1e10), st.integers(8, 100))
def test_a_steady_stream_has_its_rate_in_every_slice(rate: float, count: int) -> None:
    marks = [(k * 0.02, int(k * 0.02 * rate)) for k in range(count)]
    for found in sockets.slices(marks):
        assert found == pytest.approx(rate, abs=2 / 0.02)


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
