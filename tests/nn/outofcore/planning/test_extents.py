"""Test the allocation of ranges of scratch space."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from idletrain.nn.outofcore.planning.extents import PAGE_BYTES, Extents, pages


def test_ranges_are_taken_first_fit_and_join_again() -> None:
    extents = Extents(4 * PAGE_BYTES + 17)
    assert [extents.allocate(PAGE_BYTES) for _ in range(5)] == [0, PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES, None]
    extents.free(PAGE_BYTES, PAGE_BYTES)
    extents.free(3 * PAGE_BYTES, PAGE_BYTES)
    assert extents.allocate(2 * PAGE_BYTES) is None
    extents.free(2 * PAGE_BYTES, PAGE_BYTES)
    assert extents.allocate(3 * PAGE_BYTES) == PAGE_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_no_two_ranges_overlap_and_all_comes_back(steps: list[tuple[bool, int]]) -> None:
    extents = Extents(32 * PAGE_BYTES)
    held: list[tuple[int, int]] = []
    for take, n in steps:
        if take:
            start = extents.allocate(n * PAGE_BYTES)
            if start is not None:
                assert all(start + n * PAGE_BYTES <= s or s + size <= start for s, size in held)
                held.append((start, n * PAGE_BYTES))
        elif held:
            extents.free(*held.pop(n % len(held)))
        assert extents.free_bytes == 32 * PAGE_BYTES - sum(size for _, size in held)
    for start, size in held:
        extents.free(start, size)
    assert extents.allocate(32 * PAGE_BYTES) == 0


def test_sizes_are_whole_pages() -> None:
    assert [pages(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [0, PAGE_BYTES, PAGE_BYTES, 2 * PAGE_BYTES]
