"""What the benchmark of many workers reads off the processes' CPU time."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scale import Meter


def test_rest_is_where_the_head_and_the_scheduler_use_the_least_cpu_time() -> None:
    """Leases go out for three seconds, then only heartbeats arrive for four, then updates."""
    seconds = np.arange(0.0, 10.1, 0.1)
    busy = np.minimum(seconds, 3.0) + np.maximum(seconds - 7.0, 0.0)
    meter = Meter({}, list(seconds), {"scheduler": list(0.01 * seconds), "head": list(busy + 0.05 * seconds)})
    began = meter.rest_in(0.0, 9.0, 2.0)
    assert 2.9 < began < 5.1
    assert meter.between("head", began, began + 2.0) / 2.0 == pytest.approx(0.05, abs=1e-6)


def test_the_whole_time_is_rest_where_it_is_shorter_than_wanted() -> None:
    meter = Meter({}, [0.0, 1.0], {"scheduler": [0.0, 0.1], "head": [0.0, 0.1]})
    assert meter.rest_in(0.0, 1.0, 2.0) == 0.0
