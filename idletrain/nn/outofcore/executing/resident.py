"""Make the process give freed memory back to the kernel at once, and measure a step's peak as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

# glibc returns freed blocks of at least this size to the kernel at once, which a memory limit relies on. Its own
# threshold grows to 32 MiB, and below that aligned blocks of one size are hardly reused (glibc 2.36): steps that
# swapped tensors of 0.8 MiB took as much memory as in core. Tensors are swapped from this size on; the bench outofcore
# measures the cost.
GIVEN_BACK_BYTES = 64 << 10
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_RESET_PEAK = "5"  # proc(5): clear_refs


def release_freed_memory() -> None:
    """Make the C library return blocks to the kernel when they are freed, and return those that it keeps now."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, GIVEN_BACK_BYTES)
    give_back_pages()


def give_back_pages() -> None:
    """Return free pages between smaller blocks to the kernel; networks of many small tensors leave such pages."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class ResidentPeak:
    """Measures the process's peak above its memory at construction, in bytes; 0 if the kernel does not report it."""

    def __init__(self) -> None:
        self._before = _kilobytes("VmRSS")
        try:
            RESET.write_text(_RESET_PEAK)
        except OSError:
            self._before = 1 << 62

    @property
    def bytes(self) -> int:
        return max(0, _kilobytes("VmHWM") - self._before) << 10


def _kilobytes(field: str) -> int:
    text = STATUS.read_text() if STATUS.exists() else ""
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:")), 0)
