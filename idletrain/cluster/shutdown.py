"""Call a function when this process should end: on a signal, or when the process that started it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_ending(act: Callable[[], None]) -> Iterator[None]:
    """Within the context, call `act` on SIGTERM and SIGINT instead of their handlers; only in the main thread."""
    before = [signal.signal(number, lambda _number, _frame: act()) for number in END_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(END_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def when_parent_ends(act: Callable[[], None]) -> None:
    """Call `act` from a thread once standard input, a pipe held by the parent, is closed."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()
