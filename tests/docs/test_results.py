"""The tables of results in docs/ are those of the benchmarks' files: nobody types a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stale, tables


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(stale.RESULTS.glob("*.json"))]


@pytest.mark.parametrize(
    ("page", "begin", "end", "make"),
    [
        ("results.md", tables.BEGIN, tables.END, tables.summary),
        ("comparison.md", tables.PEERS_BEGIN, tables.PEERS_END, tables.choice),
        ("guides/slow-links.md", tables.LINKS_BEGIN, tables.LINKS_END, tables.links),
        ("modules.md", tables.MODULES_BEGIN, tables.MODULES_END, tables.modules),
        ("concepts/recipes.md", *tables.markers("recipes"), tables.recipes),
        ("concepts/recipes.md", *tables.markers("endings"), tables.endings),
        ("concepts/recipes.md", *tables.markers("rates"), tables.rates),
        ("concepts/recipes.md", *tables.markers("splits"), tables.splits),
        ("concepts/recipes.md", *tables.markers("defaults"), tables.defaults),
        ("concepts/policies.md", *tables.markers("rolling"), tables.rolling),
    ],
)
def test_table_is_as_generated(results: list[dict[str, Any]], page: str, begin: str, end: str, make: Any) -> None:
    text = Path(tables.DOCS, page).read_text()
    assert begin in text
    assert tables.between(text, begin, end, make(results)) == text
