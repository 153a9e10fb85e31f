"""Tables in the documentation stand between markers of their own."""

from __future__ import annotations

import pytest

from benchmarks.tables import between


def test_a_table_replaces_what_is_between_its_markers() -> None:
    page = "before\n<!-- a -->\n\nold\n\n<!-- end -->\nafter\n"
    assert between(page, "<!-- a -->", "<!-- end -->", "new") == "before\n<!-- a -->\n\nnew\n\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("page", ["no marker", "<!-- a --> without its end", "<!-- end --> without its beginning"])
def test_a_page_without_a_marker_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the page has no"):
        between(page, "<!-- a -->", "<!-- end -->", "new")
