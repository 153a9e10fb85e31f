"""Threads that do disk transfers one by one, and the counts of their bytes and seconds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Pace = Callable[[int], None]


class Transfer:
    """A write or read that a lane does; its outcome is known once `ended` is set."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._error = work, None  # type: tuple[Callable[[], None] | None, Exception | None]
        self._claim = threading.Lock()
        self.ended = threading.Event()

    def cancel(self) -> bool:
        """Cancel the transfer; return False if it has begun."""
        if claimed := self._claim.acquire(blocking=False):
            self._work = None  # frees what it holds in memory
        return claimed

    def run(self) -> None:
        """Do the transfer, on the lane's thread."""
        if self._claim.acquire(blocking=False):
            try:
                assert self._work
                self._work()
            except Exception as error:  # noqa: BLE001 (raised again where the result is wanted)
                self._error = error
            self._work = None
            self.ended.set()

    def wait(self) -> None:
        """Wait for the end of the transfer.

        Raises:
            ScratchError: the disk is full.
            DamageError: a tensor was read back changed.
            OSError: the disk failed.
        """
        self.ended.wait()
        if self._error:
            raise self._error


class Lane:
    """A thread that does transfers one by one; `Timed` counts its bytes and seconds."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self.bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, transfer: Transfer) -> Transfer:
        self._queue.put(transfer)
        return transfer

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.run()
            del transfer


class Handling:
    """Context that measures the computing thread's CPU seconds per tensor."""

    def __init__(self) -> None:
        self._count, self._seconds = 0, 0.0

    @property
    def mean_seconds(self) -> float:
        return self._seconds / max(self._count, 1)

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *_raised: Any) -> None:
        self._count += 1
        self._seconds += time.thread_time() - self._started


class Timed:
    """Context that counts a transfer's bytes and seconds on its lane, and slows it to the pace."""

    def __init__(self, lane: Lane, size: int, pace: Pace | None) -> None:
        self._lane, self._size, self._pace = lane, size, pace

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        if self._pace:
            self._pace(self._size)

    def __exit__(self, *_raised: Any) -> None:
        self._lane.bytes += self._size
        self._lane.seconds += time.perf_counter() - self._started
