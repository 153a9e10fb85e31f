"""Hold the values of a subnet trained out of core, between pull and push, in an unnamed file mapped into memory.

Tensors are pulled and pushed in parts, in the order in which their units run: a step begins with the first units, and
final values are pushed while the rest still computes (KARMA, arXiv 2008.11421, section III-D).
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

PART_VALUES = 1 << 20  # values per transfer, 4 MiB: a third of a second over 100 Mbit/s
VALUE_BYTES = 4
STATE_POLL_SECONDS = 0.1  # between two checks whether the wait is still wanted
_MS_SYNC = 4
_libc = ctypes.CDLL(None, use_errno=True)  # mmap.flush would hold the GIL while the disk writes


class StateFile:
    """A file-backed flat buffer `[slots * P]`: all values, then each slot of optimizer state.

    Args:
        folder: A folder on a local disk.
        shapes: Every tensor's shape, by number.
        slots: Slots of the buffer, one for values and the others for state.
        unwanted: Called while waiting; returns True if the values are no longer needed.

    Attributes:
        flat: The buffer; its pages can be dropped from memory at any time.
        unwanted: Returns True if the values are no longer needed.

    Raises:
        ScratchError: the disk has no room.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Sequence[tuple[int, ...]],
        slots: int,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._shapes, self.slots, self.unwanted = shapes, slots, unwanted
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self.parameters = self._offsets[-1]
        self._map = _mapped(folder, VALUE_BYTES * slots * self.parameters)
        self.flat = torch.frombuffer(self._map, dtype=torch.float32, count=slots * self.parameters)
        self._written, self._read = _Digests(), _Digests()
        self._arrived: set[int] = set()
        self._change = threading.Condition()
        self._fault: Exception | None = None

    def slot(self, number: int, slot: int = 0) -> Tensor:
        """Return a view of a tensor's values (slot 0) or state (later slots)."""
        start = slot * self.parameters + self._offsets[number]
        return self.flat[start : start + torch.Size(self._shapes[number]).numel()].view(self._shapes[number])

    def parts(self, numbers: Sequence[int], slots: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges `[start, stop)` of the parts in which tensors are transferred; neighbours share parts."""
        for slot in range(slots):
            base = slot * self.parameters
            for first, last in _runs(numbers):
                start, end = base + self._offsets[first], base + self._offsets[last + 1]
                for part in range(start, end, PART_VALUES):
                    yield part, min(part + PART_VALUES, end)

    def put(self, start: int, values: Tensor) -> None:
        """Write a part and drop it from memory; a tensor's parts must be written in order."""
        self.flat[start : start + len(values)] = values
        for key, first, piece in self._within(start, values):
            self._written.feed(key, first, piece)
        self.sync(start, start + len(values))

    def write(self, number: int, slot: int, values: Tensor) -> None:
        """Write a tensor's values (slot 0) or state (later slots)."""
        self.slot(number, slot).copy_(values)
        self._written.feed((number, slot), 0, values.cpu().reshape(-1))

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of a part; a tensor's parts must be read in order.

        Raises:
            DamageError: the part completes a tensor that differs from what was written.
        """
        values = self.flat[start:stop].clone()
        for key, first, piece in self._within(start, values):
            if self._read.feed(key, first, piece) == self.slot(*key).numel():
                self._compare(key)
        self.drop(start, stop)
        return values

    def read_slot(self, number: int, slot: int) -> Tensor:
        """Return a checked view of a tensor's values (slot 0) or state (later slots).

        Raises:
            DamageError: they differ from what was written.
        """
        values = self.slot(number, slot).reshape(-1)
        self._read.feed((number, slot), 0, values)
        self._compare((number, slot))
        return values

    def _compare(self, key: tuple[int, int]) -> None:
        if key in self._written and self._written[key] != self._read[key]:  # values never written are zero
            raise DamageError("a tensor came back from its scratch disk changed; the disk may be failing")

    def _within(self, start: int, values: Tensor) -> Iterator[tuple[tuple[int, int], int, Tensor]]:
        """Yield ((number, slot), index of its first, values) of each tensor in the part that starts at `start`."""
        slot, at = divmod(start, self.parameters)
        number = bisect.bisect_right(self._offsets, at) - 1
        while len(values):
            end = min(len(values), self._offsets[number + 1] - at)
            if end:
                yield (number, slot), at - self._offsets[number], values[:end]
            values, at, number = values[end:], at + end, number + 1

    def frames(self, slots: int) -> Iterator[memoryview]:
        """Yield the first `slots` slots part by part; each view is valid until the next."""
        for start, stop in self.parts(range(len(self._shapes)), slots):
            yield self.flat[start:stop].numpy().data.cast("B")
            self.drop(start, stop)

    def sync(self, start: int, stop: int) -> None:
        """Write `[start, stop)` to the disk and drop it from memory."""
        first, length = self._pages(start, stop)
        if length and _libc.msync(ctypes.c_void_p(self.flat.data_ptr() + first), ctypes.c_size_t(length), _MS_SYNC):
            raise OSError(ctypes.get_errno(), "a subnet could not be written to its scratch disk")
        self.drop(start, stop)

    def drop(self, start: int, stop: int) -> None:
        """Drop `[start, stop)` from memory; what was written stays in the file."""
        first, length = self._pages(start, stop)
        if length:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def close(self) -> None:
        """Free its space on the disk; later reads give zeros."""
        with contextlib.suppress(OSError):  # a file system without holes: the space is freed with the mapping
            self._map.madvise(mmap.MADV_REMOVE)

    def _pages(self, start: int, stop: int) -> tuple[int, int]:
        first = VALUE_BYTES * start // PAGE_BYTES * PAGE_BYTES
        return first, max(0, VALUE_BYTES * stop - first)

    # --- tensors in flight --------------------------------------------------------------------------------------

    def mark_arrived(self, numbers: Sequence[int]) -> None:
        """Note that these tensors have arrived."""
        with self._change:
            self._arrived.update(numbers)
            self._change.notify_all()

    def fail(self, fault: Exception) -> None:
        """Note that no more will arrive, because of `fault`."""
        with self._change:
            self._fault = fault
            self._change.notify_all()

    def has_arrived(self, numbers: Sequence[int]) -> bool:
        """Tell whether these tensors have arrived."""
        return self._arrived.issuperset(numbers)

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until these tensors have arrived.

        Raises:
            RefusedError: they are no longer needed.
            Exception: the fault passed to `fail`.
        """
        with self._change:
            while not self.has_arrived(numbers):
                if self._fault:
                    raise self._fault
                if self.unwanted():
                    raise RefusedError("the node is leaving, or the lease is over")
                self._change.wait(STATE_POLL_SECONDS)


class _Digests:
    """Checksums of tensors that are fed in parts, each tensor's in order."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], tuple[xxhash.xxh3_64, int]] = {}

    def feed(self, key: tuple[int, int], first: int, values: Tensor) -> int:
        """Add a tensor's values from index `first` on; return how many have been added."""
        digest, count = self._digests[key] if first else (xxhash.xxh3_64(), 0)
        digest.update(values.contiguous().numpy().data)
        self._digests[key] = digest, count + len(values)
        return count + len(values)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._digests

    def __getitem__(self, key: tuple[int, int]) -> int:
        return self._digests[key][0].intdigest()


def order_of(module: nn.Module, names: Sequence[str] = ()) -> list[list[int]]:
    """Return the numbers of a module's parameters in the order of use: those of no unit, then unit by unit."""
    number_of = {parameter: i for i, parameter in enumerate(module.parameters())}
    units: list[list[int]] = []
    seen: set[int] = set()
    for piece in pieces_of(module, names):
        numbers = [number_of[p] for p in piece.parameters() if number_of[p] not in seen]
        seen.update(numbers)
        units.append(numbers)
    others = [i for i in number_of.values() if i not in seen]
    return [numbers for numbers in (others, *units) if numbers]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _mapped(folder: Path, size: int) -> mmap.mmap:
    """Map a new unnamed file of that size, with its space reserved; it is deleted with the mapping."""
    check_free(folder, size)
    file = nameless(folder, 0)
    try:
        os.posix_fallocate(file, 0, size)  # a hole for which there is no room later would end the process
        return mmap.mmap(file, size)
    except OSError as error:
        raise ScratchError(f"memory.scratch: {folder} has no {-(-size >> 20)} MiB free ({error.strerror})") from None
    finally:
        os.close(file)
