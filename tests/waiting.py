"""Wait until something is so, for much longer than it takes on an idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 90.0


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds; return its value."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for {what}"
        time.sleep(0.02)
    return value
