"""A schedule for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from idletrain.schedules.cron import Schedule


def a_schedule(**changes: Any) -> Schedule:
    """A schedule for two o'clock at night, with fields changed."""
    places = {"job": "/home/me/job.yaml", "directory": "/home/me", "cloud": "aws", "on": "aws"}
    times = {"cron": "0 2 * * *", "tz": "Europe/Paris", "created": datetime(2026, 3, 1, tzinfo=UTC)}
    return Schedule(**{"name": "nightly", "if_running": "skip", **places, **times, **changes})
