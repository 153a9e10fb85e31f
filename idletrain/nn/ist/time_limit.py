"""Run a function for a limited time, whatever code it calls."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AGAIN_SECONDS = 0.2  # code that swallows the exception gets it once more
LOG_AFTER_SECONDS = 5.0  # after which a line says what takes time
CLOCK_SECONDS = 0.05  # between two readings of its clock
CROWDED = 10.0  # of the limit: time that may pass while a function waits, or others use the machine
ENDING_SECONDS = 5.0  # a function that still runs then is left to itself


class _Stop(BaseException):
    """Ends the function."""


def within(seconds: float, function: Callable[[], Result], doing: str) -> Result:
    """Return a function's result, or end it between two of its Python instructions.

    It runs in a thread of its own. One that stays in a single call of C code is left to itself. The limit is of its
    CPU time, so that a machine that others use does not decide what is found in time; ten times as much may pass.

    Args:
        seconds: The limit.
        function: The function.
        doing: What it does, for a line in the log if it takes more than five seconds.

    Raises:
        TimeoutError: it did not end in time.
    """
    result: Future[Result] = Future()
    clocks: list[int] = []

    def run() -> None:
        with contextlib.suppress(AttributeError):  # where a thread has no clock of its own
            clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
        with contextlib.suppress(_Stop), contextlib.suppress(_Stop):  # one may arrive while another is suppressed
            try:
                value = function()
            except _Stop:
                return
            except BaseException as error:  # noqa: BLE001 (raised where the result is wanted)
                result.set_exception(error)
            else:
                result.set_result(value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        _wait(thread, clocks, seconds, doing)
    finally:  # also where Ctrl-C ends the wait
        deadline = time.monotonic() + ENDING_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
            thread.join(AGAIN_SECONDS)
    if not result.done():
        raise TimeoutError
    return result.result()


def _wait(thread: threading.Thread, clocks: Sequence[int], seconds: float, doing: str) -> None:
    """Wait until a thread ends or its time is over; log a line if that takes long."""
    started, quiet = time.monotonic(), True
    while thread.is_alive():
        elapsed = time.monotonic() - started
        if elapsed >= seconds and (elapsed >= CROWDED * seconds or _cpu_seconds(clocks, elapsed) >= seconds):
            return
        if quiet and elapsed >= LOG_AFTER_SECONDS:
            quiet = False
            logger.warning("%s (for at most %.0f s)", doing, seconds)
        thread.join(CLOCK_SECONDS)


def _cpu_seconds(clocks: Sequence[int], elapsed: float) -> float:
    """Return the CPU time on a thread's clock, or the time elapsed where it has none."""
    try:
        return time.clock_gettime(clocks[0])
    except (IndexError, OSError):
        return elapsed
