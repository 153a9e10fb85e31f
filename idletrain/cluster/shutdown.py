"""Signals that ask a process to end, handed to it as a call."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_ending(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on SIGTERM and SIGINT meanwhile, in place of what they would do; only from the main thread."""
    before = [signal.signal(number, lambda _number, _frame: act()) for number in ENDING]
    try:
        yield
    finally:
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)
