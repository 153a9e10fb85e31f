"""What a process has in memory, as the kernel counts it: what it gives back at once, and a step's true peak."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

# glibc gives blocks of this size back at once when they are freed, which a memory limit counts on; its own threshold
# grows to 32 MiB, and below it aligned blocks of one size are hardly used again (glibc 2.36): steps that swapped
# tensors of 0.8 MiB took as much memory as in core. It is the size from which tensors are swapped; RESULTS tells what
# it costs.
GIVEN_BACK_BYTES = 64 << 10
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_RESET_PEAK = "5"  # proc(5): clear_refs


def release_freed_memory() -> None:
    """Make the C library give blocks back when they are freed, and those that it has kept."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, GIVEN_BACK_BYTES)
    give_back_pages()


def give_back_pages() -> None:
    """Give free pages between smaller blocks back: what networks of many small tensors leave behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class ResidentPeak:
    """The most that this process takes beside what it has when this is made; 0 where the kernel does not tell."""

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
