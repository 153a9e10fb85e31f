"""Swap a GPU's tensors to pinned host memory: a stream each way, one arena, an event for every copy."""

from __future__ import annotations

import torch

from idletrain.nn.outofcore.executing.disk import ScratchError
from idletrain.nn.outofcore.planning.extents import Extents, pages
from idletrain.nn.outofcore.planning.profile import SwapLink

LINK_PROBE_BYTES = 64 << 20  # copied each way to measure the link's speed: 3 ms at 25 GB/s


class PinnedSwap:
    """One arena of pinned memory for one GPU.

    Args:
        device: The GPU.
        capacity_bytes: The arena's size; it is allocated at once, as pinning is slow.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._device, self._extents = device, Extents(pages(capacity_bytes))
        self.arena = torch.empty(self._extents.capacity_bytes, dtype=torch.uint8, pin_memory=True)
        self.out, self.back = (torch.cuda.Stream(device) for _ in "<>")  # type: ignore[no-untyped-call]

    def put(self, storage: torch.UntypedStorage) -> PinnedCopy:
        """Begin to copy a storage out, after the computing stream's work so far.

        Raises:
            ScratchError: the arena is used up.
        """
        length = pages(storage.nbytes())
        start = self._extents.allocate(length)
        if start is None:
            raise ScratchError(
                f"pinned memory: {self._extents.free_bytes >> 20} of {self._extents.capacity_bytes >> 20} MiB are free "
                f"in pieces and {length >> 20} MiB are needed at once; the plan's prediction was too low"
            )
        return PinnedCopy(self, storage, start, length)

    def speed(self) -> SwapLink:
        """Measure the link's speed each way by a probe."""
        probe = torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, device=self._device)
        host = torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        rates = []
        for target, source in ((host, probe), (probe, host)):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            target.copy_(source, non_blocking=True)  # warm
            first.record()
            target.copy_(source, non_blocking=True)
            last.record()
            last.synchronize()
            rates.append(LINK_PROBE_BYTES / (first.elapsed_time(last) / 1000))
        return SwapLink(rates[0], rates[1])

    @property
    def used_bytes(self) -> int:
        """Allocated bytes of the arena."""
        return self._extents.capacity_bytes - self._extents.free_bytes

    def free(self, start: int, length: int) -> None:
        self._extents.free(start, length)

    def close(self) -> None:
        """Wait for all copies under way."""
        self.out.synchronize()
        self.back.synchronize()


class PinnedCopy:
    """A storage's copy in the arena."""

    def __init__(self, swap: PinnedSwap, storage: torch.UntypedStorage, start: int, length: int) -> None:
        self._swap, self._start, self._length, self._device = swap, start, length, storage.device
        self._size = storage.nbytes()
        self._buffer: torch.Tensor | None = None
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        swap.out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(swap.out):
            self._arena_bytes().copy_(source, non_blocking=True)
        # The storage is freed only after `written`; if the step is aborted, the allocator waits for this stream.
        source.record_stream(swap.out)
        self._written, self._fetched = swap.out.record_event(), None  # type: torch.cuda.Event, torch.cuda.Event | None

    def written(self) -> bool:
        return bool(self._written.query())  # type: ignore[no-untyped-call]

    def wait_written(self) -> None:
        self._written.synchronize()

    def cancel(self) -> bool:
        """Return False: a copy on its stream cannot be cancelled."""
        return False

    def fetch(self) -> None:
        """Begin to copy it back, into memory that the computing stream no longer uses."""
        current = torch.cuda.current_stream(self._device)
        self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self._swap.back.wait_stream(current)
        with torch.cuda.stream(self._swap.back):
            self._buffer.copy_(self._arena_bytes(), non_blocking=True)
        self._buffer.record_stream(self._swap.back)
        self._fetched = self._swap.back.record_event()

    def fetched(self) -> torch.UntypedStorage:
        """Return the storage; the computing stream, not this thread, waits until it is complete."""
        assert self._buffer is not None
        assert self._fetched
        torch.cuda.current_stream(self._device).wait_event(self._fetched)
        storage, self._buffer = self._buffer.untyped_storage(), None
        return storage

    def drop(self) -> None:
        """Free its range of the arena after its copies."""
        self._written.synchronize()
        if self._fetched:
            self._fetched.synchronize()
        self._buffer = None
        self._swap.free(self._start, self._length)

    def _arena_bytes(self) -> torch.Tensor:
        return self._swap.arena[self._start : self._start + self._size]
