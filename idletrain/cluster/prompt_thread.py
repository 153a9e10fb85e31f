"""Have a thread that mostly waits run soon after it is woken, beside threads of the same machine that compute."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator

SLICE_NANOSECONDS = 100_000  # the least that Linux grants; 3 ms is usual
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call, for which the C library has no function
_RESET_ON_FORK = 1
_USUAL = 0  # the system's own slice
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # sched_setattr(2): size, policy, flags, nice, priority, slice and the rest


def wake_soon() -> None:
    """Ask Linux to let the calling thread run for short times, and so sooner once something arrives for it.

    It gets no larger share of a core. Threads that it starts are as usual. Linux before 6.12 ignores it, and other
    systems have no such call.
    """
    _set_slice(SLICE_NANOSECONDS)


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    """Have the calling thread run soon after it is woken (`wake_soon`) within, as usual behind; not nested."""
    _set_slice(SLICE_NANOSECONDS)
    try:
        yield
    finally:
        _set_slice(_USUAL)


def _set_slice(nanoseconds: int) -> None:
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return
    with contextlib.suppress(AttributeError, OSError):  # a C library without the calls, or a filter that forbids them
        if os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
            return  # the user chose another policy
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = (_ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, nanoseconds, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, _ATTRIBUTES.pack(*attributes), 0)
