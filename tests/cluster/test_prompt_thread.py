"""A thread that asks for it has a short slice of time, and those that it starts do not."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from idletrain.cluster.prompt_thread import SLICE_NANOSECONDS, prompt, wake_soon

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())


def slice_and_nice() -> tuple[int, int]:
    """Return the calling thread's slice in nanoseconds, and its nice value."""
    assert _SCHED_GETATTR
    attributes = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(_SCHED_GETATTR, 0, attributes, 56, 0) == 0
    fields = struct.unpack("=IIQiIQQQII", attributes.raw)
    return fields[5], fields[3]


def takes_slices() -> bool:
    release = platform.release().split(".")
    return sys.platform == "linux" and _SCHED_GETATTR is not None and (int(release[0]), int(release[1])) >= (6, 12)


@pytest.mark.skipif(not takes_slices(), reason="Linux before 6.12 has one slice for all threads")
def test_a_thread_has_a_short_slice_and_those_that_it_starts_the_usual_one() -> None:
    def ask() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        before = slice_and_nice()
        wake_soon()
        seen: list[tuple[int, int]] = []
        started = threading.Thread(target=lambda: seen.append(slice_and_nice()))
        started.start()
        started.join()
        return before, slice_and_nice(), seen[0]

    with ThreadPoolExecutor(1) as other:  # a thread cannot go back
        before, after, started = other.submit(ask).result()
    assert after == (SLICE_NANOSECONDS, before[1])
    assert started == before
    assert before[0] > SLICE_NANOSECONDS


@pytest.mark.skipif(not takes_slices(), reason="Linux before 6.12 has one slice for all threads")
def test_a_thread_is_prompt_for_a_while_and_as_usual_behind_again_and_again() -> None:
    def ask() -> list[tuple[int, int]]:
        seen = [slice_and_nice()]
        for _ in range(2):
            with prompt():
                seen.append(slice_and_nice())
            seen.append(slice_and_nice())
        return seen

    with ThreadPoolExecutor(1) as other:
        usual, short, behind, *again = other.submit(ask).result()
    assert short == (SLICE_NANOSECONDS, usual[1])
    assert behind == usual
    assert again == [short, usual]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_a_policy_that_the_user_chose_stays() -> None:
    def ask() -> int:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        wake_soon()
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as other:
        assert other.submit(ask).result() == os.SCHED_BATCH
