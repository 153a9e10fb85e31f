"""Swap to a local disk: an unnamed file, written past the page cache, a thread each way, every tensor checksummed."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path

import psutil
import torch
import xxhash

from idletrain.errors import DamageError, RunError
from idletrain.nn.outofcore.executing.transfers import Handling, Lane, Pace, Timed, Transfer
from idletrain.nn.outofcore.planning.extents import PAGE_BYTES, Extents, pages
from idletrain.nn.outofcore.planning.profile import SwapLink

logger = logging.getLogger(__name__)
DISK_PROBE_BYTES, DISK_PROBES = 4 << 20, 6  # written and read to measure a disk's speed: 0.4 s at 125 MB/s
HUGE_BYTES = 2 << 20  # buffers of at least this size use huge pages, so that a read faults once per 2 MiB

IN_MEMORY = ("tmpfs", "ramfs")


class ScratchError(RunError):
    """The scratch space is full or unusable; the step was not done."""


class DiskSwap:
    """Scratch space in a folder; the kernel frees it when the process ends, even by a kill.

    Args:
        folder: A folder on a local disk.
        capacity_bytes: The most bytes to take.
        pace: Called with a transfer's bytes before it, on its thread; simulates a link slower than the disk.

    Attributes:
        direct: Whether transfers bypass the page cache.

    Raises:
        ScratchError: the folder has less than `capacity_bytes` free, or cannot be written to.
    """

    def __init__(self, folder: Path, capacity_bytes: int, pace: Pace | None = None) -> None:
        check_free(folder, capacity_bytes)
        self._folder, self._pace = folder, pace
        self._file, self.direct = _open_direct(folder)
        self._extents, self._lock = Extents(pages(capacity_bytes)), threading.Lock()
        self._out, self._in = Lane("swap-out"), Lane("swap-in")
        self._leaving, self.returning, self.dropping = Handling(), Handling(), Handling()

    def put(self, storage: torch.UntypedStorage) -> DiskCopy:
        """Begin to write a storage, which must not change until it is written.

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
        """Return the link's speed, from the transfers so far or from a probe."""
        if not self.used:
            block = torch.frombuffer(_buffer(DISK_PROBE_BYTES), dtype=torch.uint8).untyped_storage()
            for copy in [self.put(block) for _ in range(DISK_PROBES)]:
                copy.wait_written()
                copy.fetch()
                copy.fetched()
                copy.drop()
        handling = sum(kind.mean_seconds for kind in (self._leaving, self.returning, self.dropping))
        return SwapLink(self._out.bytes / self._out.seconds, self._in.bytes / self._in.seconds, handling)

    @property
    def used(self) -> bool:
        """Return whether bytes were written and read, so that the speed is known."""
        return bool(self._out.bytes and self._in.bytes)

    @property
    def used_bytes(self) -> int:
        """Allocated bytes of the scratch space."""
        return self._extents.capacity_bytes - self._extents.free_bytes

    def close(self) -> None:
        """End the threads and free the space."""
        self._out.close()
        self._in.close()
        os.close(self._file)

    # --- on the lanes' threads ----------------------------------------------------------------------------------

    def write(self, address: int, length: int, offset: int) -> None:
        """Write the memory `[address, address + length)` to `offset`; all are multiples of a page."""
        view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        with Timed(self._out, length, self._pace):
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
        """Fill a buffer of whole pages from the file at `offset`."""
        view = memoryview(buffer)
        with Timed(self._in, len(buffer), self._pace):
            done = 0
            while done < len(view):
                count = os.preadv(self._file, [view[done:]], offset + done)
                if not count:
                    raise DamageError(f"scratch in {self._folder}: ended before the tensor did")
                done += count

    def free(self, start: int, length: int) -> None:
        with self._lock:
            self._extents.free(start, length)

    def go(self, transfer: Transfer, *, out: bool) -> Transfer:
        return (self._out if out else self._in).put(transfer)


class DiskCopy:
    """A storage's copy on the disk: being written, written, being read, or read back."""

    def __init__(self, swap: DiskSwap, storage: torch.UntypedStorage, start: int, length: int, skew: int) -> None:
        self._swap, self._start, self._length, self._skew = swap, start, length, skew
        self._size = storage.nbytes()
        self._digest = 0
        self._buffer: mmap.mmap | None = None
        self._reading: Transfer | None = None
        self._writing = swap.go(Transfer(lambda: self._write(storage)), out=True)

    def written(self) -> bool:
        """Tell whether it is written, so that the memory may be freed; raises as `Transfer.wait`."""
        if not self._writing.ended.is_set():
            return False
        self._writing.wait()
        return True

    def wait_written(self) -> None:
        self._writing.wait()

    def cancel(self) -> bool:
        """Cancel the write; return False if it has begun."""
        if cancelled := self._writing.cancel():
            self._swap.free(self._start, self._length)
        return cancelled

    def fetch(self) -> None:
        """Begin to read it back."""
        with self._swap.returning:
            self._buffer = _buffer(self._length)
            self._reading = self._swap.go(Transfer(self._read), out=False)

    def fetched(self) -> torch.UntypedStorage:
        """Wait until it is read back, and return the storage; raises as `Transfer.wait`."""
        assert self._reading
        assert self._buffer is not None
        self._reading.wait()
        values = torch.frombuffer(self._buffer, dtype=torch.uint8, offset=self._skew, count=self._size)
        self._buffer = None
        return values.untyped_storage()

    def drop(self) -> None:
        """Free its range of the scratch space, after transfers that have begun."""
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
        digest = xxhash.xxh3_64_intdigest(memoryview(self._buffer)[self._skew : self._skew + self._size])
        if digest != self._digest:
            raise DamageError(
                f"a tensor of {self._size} bytes came back from the scratch disk changed (checksum {digest:016x}, "
                f"written {self._digest:016x}); the step was not done: check that disk"
            )


def check_free(folder: Path, needed_bytes: int) -> None:
    """Check that a folder has so many bytes free.

    Raises:
        ScratchError: it has less, or cannot be used.
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        raise ScratchError(f"memory.scratch: {folder} cannot be used ({error.strerror}); name a directory") from None
    free = disk.f_bavail * disk.f_frsize
    if free < needed_bytes:
        raise ScratchError(
            f"memory.scratch: {folder} has {free >> 20} MiB free and {-(-needed_bytes >> 20)} MiB are needed; "
            "free some or name another folder"
        )


def in_memory(folder: Path) -> bool:
    """Tell whether a folder's file system lies in memory (tmpfs)."""
    mounts = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    path = folder.resolve()
    return next((mounts[str(p)] for p in (path, *path.parents) if str(p) in mounts), "") in IN_MEMORY


def _open_direct(folder: Path) -> tuple[int, bool]:
    """Open a new unnamed file; return its descriptor and whether it bypasses the page cache."""
    try:
        return nameless(folder, os.O_DIRECT), True
    except OSError:
        logger.warning("scratch in %s: its file system refuses O_DIRECT, so swapping uses the page cache", folder)
        return nameless(folder, 0), False


def nameless(folder: Path, flags: int) -> int:
    """Open a new file that is in no directory and so deleted when closed; return its descriptor.

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
    """Map zeroed memory outside the allocator, so that it is returned to the kernel with its last reference."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
