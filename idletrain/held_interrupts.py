"""Keep a Ctrl-C from tearing an import, and from being lost; say a word where something takes long.

A module whose import was stopped halfway cannot be used in that process any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SILENT_SECONDS = 1.0
AGAIN_SECONDS = 0.1
INTERRUPTED_EXIT = 130


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Do something to its end; a Ctrl-C meanwhile is raised after it.

    Only the main thread gets Ctrl-C: in another one nothing is held.
    """
    with _held() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def quit_by_interrupt() -> Iterator[None]:
    """Within the context, end this process at once by a Ctrl-C: a command that imports has nothing to close yet."""
    with _handled_by(lambda _number, _frame: os._exit(INTERRUPTED_EXIT)):
        yield


@contextlib.contextmanager
def lost_interrupts_repeated() -> Iterator[None]:
    """Within the context, raise a Ctrl-C once more that Python has ignored.

    It ignores what a destructor raises, and what some native code does, such as pydantic's while it builds a schema;
    the KeyboardInterrupt of a Ctrl-C at that moment, too.
    """
    before = sys.unraisablehook

    def repeat(ignored: Any) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def notice_if_slow(doing: str) -> Iterator[None]:
    """Say what is done, for a person, if it takes longer than a second."""
    notice = threading.Timer(SILENT_SECONDS, lambda: sys.stderr.write(f"idletrain: {doing} ...\n"))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


@contextlib.contextmanager
def _held() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, Any]] = []
    try:
        with _handled_by(lambda number, frame: held.append((number, frame))):
            yield
    finally:
        if held and callable(before):
            before(*held[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Replace the handler of Ctrl-C, unless that is ignored or another language's."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
