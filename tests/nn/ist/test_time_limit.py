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
    monkeypatch.setattr(time_limit, "QUIET_SECONDS", 0.05)
    within(10, lambda: None, "blinking")
    within(10, lambda: time.sleep(0.3), "thinking")
    assert [record.getMessage() for record in caplog.records] == ["thinking (for at most 10 s)"]


def test_a_function_without_end_is_ended_although_it_swallows_errors() -> None:
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
