"""Tables in the documentation stand between markers of their own."""

from __future__ import annotations

import pytest

from benchmarks.tables import between, recipes


def test_a_table_replaces_what_is_between_its_markers() -> None:
    page = "before\n<!-- a -->\n\nold\n\n<!-- end -->\nafter\n"
    assert between(page, "<!-- a -->", "<!-- end -->", "new") == "before\n<!-- a -->\n\nnew\n\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("page", ["no marker", "<!-- a --> without its end", "<!-- end --> without its beginning"])
def test_a_page_without_a_marker_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the page has no"):
        between(page, "<!-- a -->", "<!-- end -->", "new")


def test_a_column_in_which_no_method_has_a_value_is_left_out() -> None:
    table = {"title": "GPT", "head": ["method", "memory", "bytes"], "rows": [["whole", "-", "1"], ["ist", "-", "-"]]}
    result = {"benchmark": "quality", "machine": {"cpu": "A CPU"}, "date": "2026-11-30T00:00:00", "tables": [table]}
    (_, _, *printed) = recipes([{**result, "code": {}}]).splitlines()
    assert printed == ["| method | bytes |", "|---|---|", "| whole | 1 |", "| ist | - |"]
