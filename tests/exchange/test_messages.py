"""What is wrong with a payload is found before it is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.exchange.messages import LeaseId, PushHeader, Reply, as_message, checksum, inspect, inspect_values

LEASE = LeaseId("run", 1, 2, 3, 4)


def frames_of(values: np.ndarray, cut: int = 0) -> list[memoryview]:
    content = memoryview(np.ascontiguousarray(values, np.float32)).cast("B")
    return [content[: 4 * cut], content[4 * cut :]] if cut else [content]


def verdict(values: np.ndarray, cut: int = 0) -> Reply | None:
    frames = frames_of(values, cut)
    return inspect(PushHeader(LEASE, 5, 0.1, checksum(frames)), frames, 4 * values.size) or inspect_values(frames)


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50), st.integers(0, 49)
)
def test_finite_values_are_accepted_however_large_and_however_framed(values: list[float], cut: int) -> None:
    assert verdict(np.array(values, np.float32), cut % len(values)) is None


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45])
def test_values_whose_squares_overflow_are_finite(value: float) -> None:
    assert verdict(np.full(1000, value, np.float32)) is None


@settings(deadline=None)
@given(st.integers(0, 99), st.sampled_from([np.nan, np.inf, -np.inf]), st.sampled_from([0.0, 3e38]), st.integers(0, 99))
def test_one_value_that_is_not_finite_is_found_anywhere(at: int, bad: float, others: float, cut: int) -> None:
    values = np.full(100, others, np.float32)
    values[at] = bad
    assert verdict(values, cut) is Reply.NOT_FINITE


@settings(deadline=None)
@given(st.integers(0, 399), st.integers(0, 7))
def test_a_flipped_bit_is_found(at: int, bit: int) -> None:
    frames = frames_of(np.arange(100))
    header = PushHeader(LEASE, 5, 0.1, checksum(frames))
    content = bytearray(frames[0])
    content[at] ^= 1 << bit
    assert inspect(header, [memoryview(content)], 400) is Reply.CORRUPT


@pytest.mark.parametrize("expected", [396, 404, -1, 0])
def test_a_wrong_size_is_found(expected: int) -> None:
    frames = frames_of(np.arange(100))
    assert inspect(PushHeader(LEASE, 5, 0.1, checksum(frames)), frames, expected) is Reply.WRONG_SHAPE


def test_the_checksum_is_of_the_payload_whatever_its_frames() -> None:
    values = np.arange(100)
    assert checksum(frames_of(values)) == checksum(frames_of(values, 37))


def test_headers_become_plain_values() -> None:
    assert as_message(PushHeader(LEASE, 5, 0.5, 9)) == {
        "lease": {"run": "run", "epoch": 1, "round": 2, "subnet": 3, "attempt": 4},
        "steps": 5,
        "train_seconds": 0.5,
        "checksum": 9,
        "update": True,
        "loss": None,
        "position": "",
    }
