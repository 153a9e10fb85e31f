"""A stream's position as text: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from idletrain.nn.data.stream_position import MAX_CHARACTERS, StreamPosition, decoded

PLAIN = StreamPosition(1, 2, 8, 40, 3, 17, {"shards": [0, None, True, 0.5], "name": "é"})


def test_a_position_comes_back_as_it_was() -> None:
    assert PLAIN.encoded().isascii()
    assert decoded(PLAIN.encoded()) == PLAIN


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ({"place": {1, 2}}, "not made of plain values"),
        ({"place": b"raw"}, "not made of plain values"),
        ({"place": float("nan")}, "not made of plain values"),
        ({1: "by number"}, "not made of dicts by strings"),
        ({"place": (1, 2)}, "not made of dicts by strings"),
        ("x" * MAX_CHARACTERS, "takes 65,6"),
    ],
)
def test_what_is_no_plain_state_is_refused(state: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(PLAIN, state=state).encoded()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        PLAIN.encoded()[:-1],
        PLAIN.encoded().replace("40", "-40"),
        PLAIN.encoded().replace("40", "true"),
        PLAIN.encoded().replace("40", '"40"'),
        PLAIN.encoded().replace("number", "count"),
        "[" * 100_000,
    ],
)
def test_another_text_holds_no_position(text: str) -> None:
    assert decoded(text) is None
