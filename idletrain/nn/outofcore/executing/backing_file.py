"""Where a subnet that is trained out of core lives between pull and push: a file without a name, mapped into memory.

It comes and goes in pieces, in the order in which its units run: a step begins with the first of them, and what is
final leaves while the rest still computes (KARMA, arXiv 2008.11421, section III-D).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from idletrain.errors import DamageError, RefusedError
from idletrain.nn.outofcore.executing.disk import ScratchError, check_free, nameless
from idletrain.nn.outofcore.planning.extents import PAGE_BYTES
from idletrain.nn.units import pieces_of

PART_VALUES = 1 << 20  # 4 MiB on the wire at once: a third of a second over 100 Mbit/s
VALUE_BYTES = 4
STATE_POLL_SECONDS = 0.1  # between two looks whether anybody still waits
_MS_SYNC = 4
_libc = ctypes.CDLL(None, use_errno=True)  # mmap.flush would hold the interpreter while the disk writes


class StateFile:
    """A flat buffer `[slots * P]`: all values, then each slot of optimizer state.

    Args:
        folder: On a local disk.
        shapes: Of every tensor, by number.
        slots: Of the buffer.
        unwanted: Whether nobody needs it any more, asked by who waits.

    Attributes:
        flat: The buffer; of no allocator, and given back to the disk at will.

    Raises:
        ScratchError: there is no room on the disk.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Sequence[tuple[int, ...]],
        slots: int,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shapes, self.slots, self._is_unwanted = shapes, slots, unwanted
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self.parameters = self._offsets[-1]
        self._map = _mapped(folder, VALUE_BYTES * slots * self.parameters)
        self.flat = torch.frombuffer(self._map, dtype=torch.float32, count=slots * self.parameters)
        self._put, self._read = _Digests(), _Digests()
        self._there: set[int] = set()
        self._change = threading.Condition()
        self._fault: Exception | None = None

    def slot(self, number: int, slot: int = 0) -> Tensor:
        """One tensor's values, or its state of a later slot."""
        start = slot * self.parameters + self._offsets[number]
        return self.flat[start : start + torch.Size(self._shapes[number]).numel()].view(self._shapes[number])

    def parts(self, numbers: Sequence[int], slots: int) -> Iterator[tuple[int, int]]:
        """`[start, stop)` of the pieces in which tensors travel, neighbours together, for so many slots."""
        for slot in range(slots):
            base = slot * self.parameters
            for first, last in _runs(numbers):
                start, end = base + self._offsets[first], base + self._offsets[last + 1]
                for part in range(start, end, PART_VALUES):
                    yield part, min(part + PART_VALUES, end)

    def put(self, start: int, values: Tensor) -> None:
        """Write a part, and let its memory go; a tensor's parts come in their order."""
        self.flat[start : start + len(values)] = values
        for key, first, piece in self._within(start, values):
            self._put.feed(key, first, piece)
        self.sync(start, start + len(values))

    def write(self, number: int, slot: int, values: Tensor) -> None:
        """Write a tensor's values, or its state of a later slot."""
        self.slot(number, slot).copy_(values)
        self._put.feed((number, slot), 0, values.cpu().reshape(-1))

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of a part; a tensor's parts are read in their order.

        Raises:
            DamageError: it ends a tensor that is not what was written.
        """
        values = self.flat[start:stop].clone()
        for key, first, piece in self._within(start, values):
            if self._read.feed(key, first, piece) == self.slot(*key).numel():
                self._compare(key)
        self.drop(start, stop)
        return values

    def read_slot(self, number: int, slot: int) -> Tensor:
        """A view of a tensor's values, or of its state, as they were written.

        Raises:
            DamageError: they are not.
        """
        values = self.slot(number, slot).reshape(-1)
        self._read.feed((number, slot), 0, values)
        self._compare((number, slot))
        return values

    def _compare(self, key: tuple[int, int]) -> None:
        if key in self._put and self._put[key] != self._read[key]:  # what was never written is zero
            raise DamageError("a tensor came back from its scratch disk changed; the disk may be failing")

    def _within(self, start: int, values: Tensor) -> Iterator[tuple[tuple[int, int], int, Tensor]]:
        """The tensors that a part `[start, ...)` holds, as (number, slot), and their values there, from where on."""
        slot, at = divmod(start, self.parameters)
        number = bisect.bisect_right(self._offsets, at) - 1
        while len(values):
            end = min(len(values), self._offsets[number + 1] - at)
            if end:
                yield (number, slot), at - self._offsets[number], values[:end]
            values, at, number = values[end:], at + end, number + 1

    def frames(self, slots: int) -> Iterator[memoryview]:
        """The first so many slots, a part at a time; each is good until the next."""
        for start, stop in self.parts(range(len(self._shapes)), slots):
            yield self.flat[start:stop].numpy().data.cast("B")
            self.drop(start, stop)

    def sync(self, start: int, stop: int) -> None:
        """Have `[start, stop)` on the disk, and need no memory for it."""
        first, length = self._pages(start, stop)
        if length and _libc.msync(ctypes.c_void_p(self.flat.data_ptr() + first), ctypes.c_size_t(length), _MS_SYNC):
            raise OSError(ctypes.get_errno(), "a subnet could not be written to its scratch disk")
        self.drop(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Need no memory for `[start, stop)`; what was written of it stays."""
        first, length = self._pages(start, stop)
        if length:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Give its space on the disk back; whoever still reads it finds zeros."""
        with contextlib.suppress(OSError):  # a file system without holes: with the mapping, then
            self._map.madvise(mmap.MADV_REMOVE)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        first = VALUE_BYTES * start // PAGE_BYTES * PAGE_BYTES
        return first, max(0, VALUE_BYTES * stop - first)

    # --- what is still on its way -------------------------------------------------------------------------------

    def mark_arrived(self, numbers: Sequence[int]) -> None:
        """Say that these tensors are there."""
        with self._change:
            self._there.update(numbers)
            self._change.notify_all()

    def fail(self, fault: Exception) -> None:
        """Say that no more will come."""
        with self._change:
            self._fault = fault
            self._change.notify_all()

    def has_arrived(self, numbers: Sequence[int]) -> bool:
        """Whether these tensors are there."""
        return self._there.issuperset(numbers)

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until these tensors are there.

        Raises:
            RefusedError: nobody needs them any more.
            Exception: what `fail` was told.
        """
        with self._change:
            while not self.has_arrived(numbers):
                if self._fault:
                    raise self._fault
                if self._is_unwanted():
                    raise RefusedError("the node is leaving, or the lease is over")
                self._change.wait(STATE_POLL_SECONDS)


class _Digests:
    """What tensors add up to that come in parts, each tensor's in order."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], tuple[xxhash.xxh3_64, int]] = {}

    def feed(self, key: tuple[int, int], first: int, values: Tensor) -> int:
        """Add a tensor's values from `first` on; returns how many there are by now."""
        digest, count = self._of[key] if first else (xxhash.xxh3_64(), 0)
        digest.update(values.contiguous().numpy().data)
        self._of[key] = digest, count + len(values)
        return count + len(values)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._of

    def __getitem__(self, key: tuple[int, int]) -> int:
        return self._of[key][0].intdigest()


def order_of(module: nn.Module, names: Sequence[str] = ()) -> list[list[int]]:
    """The numbers of a module's parameters in the order of use: those of no unit, then unit by unit."""
    number = {parameter: i for i, parameter in enumerate(module.parameters())}
    units: list[list[int]] = []
    seen: set[int] = set()
    for piece in pieces_of(module, names):
        mine = [number[p] for p in piece.parameters() if number[p] not in seen]
        seen.update(mine)
        units.append(mine)
    loose = [i for i in number.values() if i not in seen]
    return [numbers for numbers in (loose, *units) if numbers]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours."""
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """A file without a name of that size, all of it there, mapped; it is gone with the mapping."""
    check_free(folder, size)
    file = nameless(folder, 0)
    try:
        os.posix_fallocate(file, 0, size)  # a hole that finds no room later would end the process
        return mmap.mmap(file, size)
    except OSError as error:
        raise ScratchError(f"memory.scratch: {folder} has no {-(-size >> 20)} MiB free ({error.strerror})") from None
    finally:
        os.close(file)
