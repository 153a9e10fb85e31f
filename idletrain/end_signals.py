"""End a run on signals: in order at the first, at once at the second.

They act between two steps of the event loop. An exception in the middle of one, as Python raises for Ctrl-C, would
leave tasks that nothing ends any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a service's end, and a terminal's
LAST_ASKED = 3  # signals that are obeyed in order; at a further one Python's own interrupt ends what still hangs


class Ending:
    """Decide how the next signal ends a run.

    Args:
        task: The task that trains it.

    Attributes:
        at_once: True if the run has been ended at once.
    """

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._stop: Callable[[], None] | None = None
        self.at_once = False

    def stops_by(self, stop: Callable[[], None]) -> None:
        """Have the next signal call `stop`, and only the one after it end the run at once."""
        self._stop = stop

    def ended(self) -> None:
        """Have the next signal do nothing, unless one has stopped the run: what is still closed takes seconds."""
        if self._stop:
            self._stop = _do_nothing

    def act(self) -> None:
        """Do what the next signal does."""
        stop, self._stop = self._stop, None
        if stop:
            stop()
        else:
            self.at_once = True
            self._task.cancel()


def _do_nothing() -> None:
    pass


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """Within the context, signals act on the current task; raise KeyboardInterrupt if one has ended it at once.

    Only the main thread gets signals: in another one, as for a notebook, nothing changes. SIGHUP is left alone where it
    is ignored, as `nohup` does.
    """
    task = asyncio.current_task()
    assert task is not None
    ending = Ending(task)
    with _handled(ending.act) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
        try:
            yield ending
        except BaseException:
            if not ending.at_once:
                raise
        if ending.at_once:  # also where what was closed meanwhile has taken the cancellation for its own
            raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(act: Callable[[], None]) -> Iterator[None]:
    loop, received = asyncio.get_running_loop(), []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) > LAST_ASKED:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(act)

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    taken = [number for number in END_SIGNALS if number != signal.SIGHUP or before[number] == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
