"""A node's own sums; that it drains, leaves and is replaced is tested with real machines in tests/chaos."""

from __future__ import annotations

from typing import Any

import pytest

from idletrain.cloud import worker_node


@pytest.mark.parametrize(("memory", "most", "expected"), [(10, 1, 1), (10, 2, 2), (3, 4, 1), (1, 4, 1)])
def test_slots_are_what_is_wanted_and_fits(memory: int, most: int, expected: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_node.psutil, "cpu_count", lambda: 2)
    assert worker_node.slots_in(memory << 30, 2 << 30, most) == expected
