"""Processes that do not outlive the one that started them, however that one ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable


def when_parent_ends(act: Callable[[], None]) -> None:
    """Call `act` from a thread once standard input, a pipe held by the parent, is closed."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()
