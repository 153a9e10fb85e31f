"""Swapping to a local disk: a file without a name, past the page cache, a thread each way, every tensor checksummed."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

from idletrain.errors import DamageError, RunError
from idletrain.nn.outofcore.planning.extents import PAGE_BYTES, Extents, pages
from idletrain.nn.outofcore.planning.profile import SwapLink

logger = logging.getLogger(__name__)
PROBE_BYTES, PROBES = 4 << 20, 6  # written and read to learn a disk's speed: 0.4 s at 125 MB/s
HUGE_BYTES = 2 << 20  # buffers from this on ask for huge pages: a read then faults once per 2 MiB

IN_MEMORY = ("tmpfs", "ramfs")
Pace = Callable[[int], None]


class ScratchError(RunError):
    """There is no room to swap to; the step was not done."""


class Transfer:
    """One write or read on its way; how it went is known once `ended` is set."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._error = work, None  # type: tuple[Callable[[], None] | None, Exception | None]
        self._claim = threading.Lock()
        self.ended = threading.Event()

    def cancel(self) -> bool:
        """Leave it undone; False if it has begun."""
        if claimed := self._claim.acquire(blocking=False):
            self._work = None  # and with it what it holds in memory
        return claimed

    def run(self) -> None:
        """Do it, on the lane's thread."""
        if self._claim.acquire(blocking=False):
            try:
                assert self._work
                self._work()
            except Exception as error:  # noqa: BLE001 (raised again where the result is wanted)
                self._error = error
            self._work = None
            self.ended.set()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            ScratchError: the disk is full.
            DamageError: what came back is not what was written.
            OSError: the disk failed.
        """
        self.ended.wait()
        if self._error:
            raise self._error


class _Lane:
    """A thread that does transfers one by one, and counts bytes and seconds."""

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


class DiskSwap:
    """Scratch space in a folder; nothing of it is left once the process is gone, however it goes.

    Args:
        folder: On a local disk.
        capacity_bytes: Most that may be taken.
        pace: Called with a transfer's bytes before it, on its own thread; for a link slower than the disk.

    Attributes:
        direct: Whether transfers pass the page cache by.

    Raises:
        ScratchError: the folder has less than that free, or cannot be written to.
    """

    def __init__(self, folder: Path, capacity_bytes: int, pace: Pace | None = None) -> None:
        check_free(folder, capacity_bytes)
        self._folder, self._pace = folder, pace
        self._file, self.direct = _open_direct(folder)
        self._extents, self._lock = Extents(pages(capacity_bytes)), threading.Lock()
        self._out, self._in = _Lane("swap-out"), _Lane("swap-in")
        self._leaving, self.returning, self.dropping = _Handling(), _Handling(), _Handling()

    def put(self, storage: torch.UntypedStorage) -> DiskCopy:
        """Begin to write a storage, which must not change meanwhile.

        Raises:
            ScratchError: the scratch space is used up.
        """
        with self._leaving:
            return self._put(storage)

    def _put(self, storage: torch.UntypedStorage) -> DiskCopy:
        address, size = storage.data_ptr(), storage.nbytes()
        skew = address % PAGE_BYTES
        length = pages(skew + size)
        with self._lock:
            start = self._extents.allocate(length)
        if start is None:
            raise ScratchError(
                f"scratch in {self._folder}: {self._extents.free_bytes >> 20} of "
                f"{self._extents.capacity_bytes >> 20} MiB are free in pieces and {-(-length >> 20)} MiB are needed at "
                "once; the plan's prediction was too low"
            )
        return DiskCopy(self, storage, start, length, skew)

    def speed(self) -> SwapLink:
        """The link's speed: as seen so far, or by a probe."""
        if not self.used:
            block = torch.frombuffer(_buffer(PROBE_BYTES), dtype=torch.uint8).untyped_storage()
            for copy in [self.put(block) for _ in range(PROBES)]:
                copy.wait_written()
                copy.fetch()
                copy.fetched()
                copy.drop()
        handling = sum(kind.mean_seconds for kind in (self._leaving, self.returning, self.dropping))
        return SwapLink(self._out.bytes / self._out.seconds, self._in.bytes / self._in.seconds, handling)

    @property
    def used(self) -> bool:
        """Whether anything was written and read, so that its speed is known."""
        return bool(self._out.bytes and self._in.bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the scratch space that are taken."""
        return self._extents.capacity_bytes - self._extents.free_bytes

    def close(self) -> None:
        """End the threads and give the space back."""
        self._out.close()
        self._in.close()
        os.close(self._file)

    # --- on the lanes' threads ----------------------------------------------------------------------------------

    def write(self, address: int, length: int, offset: int) -> None:
        """Write `[address, address + length)` at `offset`; all of them whole pages."""
        view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        with _Timed(self._out, length, self._pace):
            done = 0
            while done < length:
                try:
                    done += os.pwrite(self._file, view[done:], offset + done)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    free = os.statvfs(self._folder)
                    raise ScratchError(
                        f"scratch in {self._folder}: the disk is full, {free.f_bavail * free.f_frsize >> 20} MiB are "
                        f"free and this step needed {-(-(length - done) >> 20)} MiB more; free some or name another "
                        "folder as memory.scratch"
                    ) from None

    def read(self, buffer: mmap.mmap, offset: int) -> None:
        """Fill a buffer of whole pages from `offset`."""
        view = memoryview(buffer)
        with _Timed(self._in, len(buffer), self._pace):
            done = 0
            while done < len(view):
                got = os.preadv(self._file, [view[done:]], offset + done)
                if not got:
                    raise DamageError(f"scratch in {self._folder}: ended before the tensor did")
                done += got

    def free(self, start: int, length: int) -> None:
        with self._lock:
            self._extents.free(start, length)

    def go(self, transfer: Transfer, *, out: bool) -> Transfer:
        return (self._out if out else self._in).put(transfer)


class DiskCopy:
    """One storage's copy on the disk: being written, there, being read, or back."""

    def __init__(self, swap: DiskSwap, storage: torch.UntypedStorage, start: int, length: int, skew: int) -> None:
        self._swap, self._start, self._length, self._skew = swap, start, length, skew
        self._size = storage.nbytes()
        self._digest = 0
        self._buffer: mmap.mmap | None = None
        self._reading: Transfer | None = None
        self._writing = swap.go(Transfer(lambda: self._write(storage)), out=True)

    def written(self) -> bool:
        """Whether the tensor's memory may be freed; see `Transfer.wait` for what is raised."""
        if not self._writing.ended.is_set():
            return False
        self._writing.wait()
        return True

    def wait_written(self) -> None:
        self._writing.wait()

    def cancel(self) -> bool:
        """Do not write it after all; False if that has begun."""
        if cancelled := self._writing.cancel():
            self._swap.free(self._start, self._length)
        return cancelled

    def fetch(self) -> None:
        """Begin to read it back."""
        with self._swap.returning:
            self._buffer = _buffer(self._length)
            self._reading = self._swap.go(Transfer(self._read), out=False)

    def fetched(self) -> torch.UntypedStorage:
        """The storage, once it is back; see `Transfer.wait` for what is raised."""
        assert self._reading
        assert self._buffer is not None
        self._reading.wait()
        back = torch.frombuffer(self._buffer, dtype=torch.uint8, offset=self._skew, count=self._size)
        self._buffer = None
        return back.untyped_storage()

    def drop(self) -> None:
        """Give its place back; what is still on its way is done first."""
        with self._swap.dropping:
            for transfer in (self._writing, self._reading):
                if transfer and not transfer.cancel():
                    transfer.ended.wait()
            self._buffer = None
            self._swap.free(self._start, self._length)

    def _write(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._digest = xxhash.xxh3_64_intdigest((ctypes.c_char * self._size).from_address(address))
        self._swap.write(address - self._skew, self._length, self._start)

    def _read(self) -> None:
        assert self._buffer is not None
        self._swap.read(self._buffer, self._start)
        found = xxhash.xxh3_64_intdigest(memoryview(self._buffer)[self._skew : self._skew + self._size])
        if found != self._digest:
            raise DamageError(
                f"a tensor of {self._size} bytes came back from the scratch disk changed (checksum {found:016x}, "
                f"written {self._digest:016x}); the step was not done: check that disk"
            )


class _Handling:
    """Counts what tensors take of the computing thread's time, each."""

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


class _Timed:
    """Counts a transfer's bytes and seconds on its lane, and keeps to the pace."""

    def __init__(self, lane: _Lane, size: int, pace: Pace | None) -> None:
        self._lane, self._size, self._pace = lane, size, pace

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        if self._pace:
            self._pace(self._size)

    def __exit__(self, *_raised: Any) -> None:
        self._lane.bytes += self._size
        self._lane.seconds += time.perf_counter() - self._started


def check_free(folder: Path, needed_bytes: int) -> None:
    """See that scratch space is there before anything is started.

    Raises:
        ScratchError: it is not.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ScratchError(f"memory.scratch: {folder} cannot be used ({error.strerror}); name a directory") from None
    free = found.f_bavail * found.f_frsize
    if free < needed_bytes:
        raise ScratchError(
            f"memory.scratch: {folder} has {free >> 20} MiB free and {-(-needed_bytes >> 20)} MiB are needed; "
            "free some or name another folder"
        )


def in_memory(folder: Path) -> bool:
    """Whether a folder's file system is a part of memory."""
    mounts = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    at = folder.resolve()
    return next((mounts[str(place)] for place in (at, *at.parents) if str(place) in mounts), "") in IN_MEMORY


def _open_direct(folder: Path) -> tuple[int, bool]:
    """A new file without a name, and whether it passes the page cache by."""
    try:
        return nameless(folder, os.O_DIRECT), True
    except OSError:
        logger.warning("scratch in %s: its file system refuses O_DIRECT; swapping goes through memory", folder)
        return nameless(folder, 0), False


def nameless(folder: Path, flags: int) -> int:
    """A new file that is in no directory: it is gone once nobody holds it.

    Raises:
        ScratchError: the folder cannot be written to.
        OSError: its file system refuses the flags.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise ScratchError(f"memory.scratch: {folder} cannot be written ({error.strerror})") from None
        if flags:
            raise
    descriptor, name = tempfile.mkstemp(dir=folder)  # a file system without O_TMPFILE
    os.unlink(name)  # noqa: PTH108 (mkstemp's own kind of path)
    return descriptor


def _buffer(size: int) -> mmap.mmap:
    """Zeroed memory of whole pages, of no allocator: it is gone when nothing holds it."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES:
        made.madvise(mmap.MADV_HUGEPAGE)
    return made
