"""Positions in streams: the latest that an attempt can use, also for the next head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from idletrain.nn.data.stream_position import MAX_CHARACTERS
from idletrain.rounds.durable.stream_positions import FILE, KEPT, StreamPositions


def test_an_attempt_gets_the_latest_position_that_is_not_beyond_it(tmp_path: Path) -> None:
    positions = StreamPositions(tmp_path)
    for steps in range(3, 3 + 2 * KEPT, 2):
        positions.keep(1, steps, f"after {steps}")
    assert [positions.at(1, steps) for steps in (2, 3, 4, 99)] == ["", "after 3", "after 3", f"after {1 + 2 * KEPT}"]
    positions.keep(1, 99, "new")
    assert positions.at(1, 4) == ""  # no more than KEPT
    assert positions.at(0, 99) == ""


@pytest.mark.parametrize("position", ["", "x" * (MAX_CHARACTERS + 1), b"bytes", None, {"state": 1}])
def test_what_no_position_can_be_is_not_held(tmp_path: Path, position: Any) -> None:
    positions = StreamPositions(tmp_path)
    positions.keep(0, 5, position)
    assert (positions.at(0, 9), bool(positions)) == ("", False)


def test_the_next_head_has_the_latest_of_every_subnet(tmp_path: Path) -> None:
    positions = StreamPositions(tmp_path)
    for subnet, steps in ((0, 5), (1, 5), (1, 10)):
        positions.keep(subnet, steps, f"{subnet} {steps}")
    positions.write()
    heir = StreamPositions(tmp_path)
    assert [heir.at(0, 20), heir.at(1, 20), heir.at(1, 9)] == ["0 5", "1 10", ""]


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[1]", b"[[0, 5]]", b'[["a", 5, "x"]]', b"[" * 9999, b"null"])
def test_a_damaged_file_holds_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert not StreamPositions(tmp_path)
