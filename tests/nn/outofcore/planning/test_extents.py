"""Ranges of scratch space."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from idletrain.nn.outofcore.planning.extents import PAGE, Extents, pages


def test_ranges_are_taken_first_fit_and_join_again() -> None:
    extents = Extents(4 * PAGE + 17)
    assert [extents.take(PAGE) for _ in range(5)] == [0, PAGE, 2 * PAGE, 3 * PAGE, None]
    extents.give(PAGE, PAGE)
    extents.give(3 * PAGE, PAGE)
    assert extents.take(2 * PAGE) is None
    extents.give(2 * PAGE, PAGE)
    assert extents.take(3 * PAGE) == PAGE


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_no_two_ranges_overlap_and_all_comes_back(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(32 * PAGE)
    held: list[tuple[int, int]] = []
    for take, n in steps:
        if take:
            start = extents.take(n * PAGE)
            if start is not None:
                assert all(start + n * PAGE <= s or s + size <= start for s, size in held)
                held.append((start, n * PAGE))
        elif held:
            extents.give(*held.pop(n % len(held)))
        assert extents.free_bytes == 32 * PAGE - sum(size for _, size in held)
    for start, size in held:
        extents.give(start, size)
    assert extents.take(32 * PAGE) == 0


def test_sizes_are_whole_pages() -> None:
    assert [pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
