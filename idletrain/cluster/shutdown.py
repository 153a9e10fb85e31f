"""What ends a process, handed to it as a call: a signal, or the end of the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
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


def when_parent_ends(act: Callable[[], None]) -> None:
    """Call `act` from a thread once standard input, a pipe held by the parent, is closed."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()
