"""Run a function for a limited time, whatever code it calls."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
AGAIN_SECONDS = 0.2  # code that swallows the exception gets it once more
QUIET_SECONDS = 5.0  # after which a line says what takes time
PATIENCE_SECONDS = 5.0  # a function that still runs then is left to itself


class _Stop(BaseException):
    """Ends the function."""


def within(seconds: float, function: Callable[[], Result], doing: str) -> Result:
    """Return a function's result, or end it between two of its Python instructions.

    It runs in a thread of its own. One that stays in a single call of C code is left to itself.

    Args:
        seconds: The limit.
        function: The function.
        doing: What it does, for a line in the log if it takes more than five seconds.

    Raises:
        TimeoutError: it did not end in time.
    """
    result: Future[Result] = Future()

    def run() -> None:
        with contextlib.suppress(_Stop):
            try:
                found = function()
            except _Stop:
                return
            except BaseException as error:  # noqa: BLE001 (raised where the result is wanted)
                result.set_exception(error)
            else:
                result.set_result(found)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(min(seconds, QUIET_SECONDS))
        if thread.is_alive() and seconds > QUIET_SECONDS:
            logger.warning("%s (for at most %.0f s)", doing, seconds)
            thread.join(max(0.0, seconds - QUIET_SECONDS))
    finally:  # also where Ctrl-C ends the wait
        deadline = time.monotonic() + PATIENCE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stop))
            thread.join(AGAIN_SECONDS)
    if not result.done():
        raise TimeoutError
    return result.result()
