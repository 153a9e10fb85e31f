"""A function ends in time, whatever it does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from idletrain.errors import JobError, user_code
from idletrain.nn.ist import time_limit
from idletrain.nn.ist.time_limit import within


def test_a_result_and_an_error_are_the_function_s_own() -> None:
    assert within(10, lambda: 3, "thinking") == 3
    with pytest.raises(KeyError, match="a"):
        within(10, lambda: {}["a"], "thinking")


def test_a_line_says_what_takes_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(time_limit, "LOG_AFTER_SECONDS", 0.05)
    within(10, lambda: None, "blinking")
    within(10, lambda: time.sleep(0.3), "thinking")
    assert [record.getMessage() for record in caplog.records] == ["thinking (for at most 10 s)"]


def test_the_limit_is_of_cpu_time_so_that_others_on_the_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(0.5, lambda: time.sleep(0.7) or 3, "waiting") == 3  # as a thread that gets no core

    def busy() -> None:
        while True:
            pass

    started = time.thread_time()
    with pytest.raises(TimeoutError):
        within(0.2, busy, "thinking")
    assert time.thread_time() - started < 0.2  # the caller only waits
    monkeypatch.setattr(time_limit, "CROWDED", 2.0)
    with pytest.raises(TimeoutError):
        within(0.05, lambda: time.sleep(0.5), "waiting")


def test_a_function_without_end_is_ended_although_it_swallows_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "CROWDED", 1.0)
    threads: list[threading.Thread] = []
    swallowed: list[Any] = []

    def endless() -> None:
        threads.append(threading.current_thread())
        while True:
            try:
                with user_code(""):
                    while True:
                        time.sleep(0.001)
            except JobError as error:
                swallowed.append(error)
            except BaseException as error:  # as a bare `except:` does
                swallowed.append(error)
                if len(swallowed) == 3:
                    raise

    started = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.3, endless, "thinking")
    assert time.monotonic() - started < 4
    assert not threads[0].is_alive()
    assert len(swallowed) == 3
    assert not any(isinstance(error, JobError) for error in swallowed)
