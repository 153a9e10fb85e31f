"""Wait until something is so, for much longer than it takes on an idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 90.0
POLL_SECONDS = 0.02
REST, LONGEST_REST_SECONDS = 3.0, 0.3  # times as long as a look took


def rest(looked_at: float, seconds: float = POLL_SECONDS) -> None:
    """Sleep between two looks: those that take long, as calls of a cloud, leave the cores to what they wait for.

    Args:
        looked_at: When the last look began (`time.monotonic`).
        seconds: At least how long.
    """
    time.sleep(max(seconds, min(REST * (time.monotonic() - looked_at), LONGEST_REST_SECONDS)))


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds; return its value."""
    began = looked_at = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < began + PATIENCE_SECONDS, f"waited {PATIENCE_SECONDS} s for {what}"
        rest(looked_at)
        looked_at = time.monotonic()
    return value
