"""Allocate ranges of a scratch file or of pinned memory. Pure."""

from __future__ import annotations

import bisect

PAGE_BYTES = 4096  # alignment of O_DIRECT


class Extents:
    """First-fit allocator of ranges of whole pages within `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.free_bytes = self.capacity_bytes
        self._free = [(0, self.capacity_bytes)] if self.capacity_bytes else []

    def allocate(self, size: int) -> int | None:
        """Take a range of `size` bytes, a multiple of a page; return its start, or None if none is large enough."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                self.free_bytes -= size
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Free an allocated range."""
        i = bisect.bisect_left(self._free, (start, start))
        end = start + size
        low, high = i, i
        if i and self._free[i - 1][1] == start:
            low, start = i - 1, self._free[i - 1][0]
        if i < len(self._free) and self._free[i][0] == end:
            high, end = i + 1, self._free[i][1]
        self._free[low:high] = [(start, end)]
        self.free_bytes += size


def pages(size: int) -> int:
    """Round `size` up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES
