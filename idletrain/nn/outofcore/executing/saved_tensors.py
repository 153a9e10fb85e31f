"""Keep or swap the tensors that a step saves for its backward pass, and count their live bytes.

All decisions are made on the computing thread; the swap's threads only move bytes. Tensors are counted exactly, by
storage (a ReLU's output is the next layer's input): a storage lives until autograd drops the last handle on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from idletrain.errors import RunError
from idletrain.nn.outofcore.executing.resident import give_back_pages
from idletrain.nn.outofcore.planning.simulate import Footprint

SMALL_BYTES = 64 << 10  # smaller tensors stay in memory: to transfer sixteen pages costs more than it frees
UNLIMITED_BYTES = 1 << 62
OUTSIDE_SEGMENTS = -1  # the segment of tensors saved between units
# Segments between two returns of free pages to the kernel: a ResNet-200 of small tensors took 19.7 instead of 24 MB, in
# the same time; with one at every segment 19.1 MB, in 1.2 times the time.
PAGES_EVERY = 8


class Copy(Protocol):
    """A storage's copy in swap space."""

    def written(self) -> bool: ...
    def wait_written(self) -> None: ...
    def cancel(self) -> bool: ...
    def fetch(self) -> None: ...
    def fetched(self) -> torch.UntypedStorage: ...
    def drop(self) -> None: ...


class Swap(Protocol):
    """Swap space for storages."""

    def put(self, storage: torch.UntypedStorage) -> Copy: ...


class Slot:
    """A saved storage, in memory or swapped out."""

    __slots__ = ("arriving", "copy", "key", "needed_at", "owner", "size", "storage", "users", "weak")

    def __init__(self, storage: torch.UntypedStorage, key: tuple[int, int], owner: int) -> None:
        self.key = key
        self.storage: torch.UntypedStorage | None = storage
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # while it exists, no other storage gets the address
        self.size = storage.nbytes()
        self.users = 0
        self.owner = self.needed_at = owner
        self.copy: Copy | None = None
        self.arriving = False


class Handle:
    """Stands for a saved tensor in autograd's graph; its deletion means that the tensor is no longer needed."""

    __slots__ = ("_saved", "layout", "segment", "slot", "version", "witness")

    def __init__(self, saved: SavedTensors, slot: Slot, tensor: Tensor, segment: int) -> None:
        self._saved, self.slot, self.segment = saved, slot, segment
        self.layout = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        self.version, self.witness = tensor._version, _witness(tensor)
        slot.users += 1

    def __del__(self) -> None:
        self._saved.release(self.slot)


class KeptTensor:
    """A saved tensor that the step does not swap.

    Attributes:
        give: Returns the tensor in a segment's backward pass; None if `tensor` holds its values.
    """

    __slots__ = ("give", "segment", "tensor", "version")

    def __init__(
        self, tensor: Tensor, segment: int = OUTSIDE_SEGMENTS, give: Callable[[], Tensor] | None = None
    ) -> None:
        self.tensor = _witness(tensor) if give else tensor
        self.version, self.segment, self.give = tensor._version, segment, give


def _witness(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares a tensor's version counter, but not its memory."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def _check_unchanged(witness: Tensor, version: int) -> None:
    if witness._version != version:
        raise RunError(
            "a tensor needed for the backward pass was changed in place after it was saved; "
            "make that operation out of place, or keep both in one unit"
        )


class SavedTensors:
    """All saved tensors of one step.

    Args:
        swap: The swap space.
        footprint: The plan's limits.
        parameter: Returns a parameter, or a function that returns it later; None for other tensors.
        entered: Called with a segment's number when its backward pass begins.
    """

    def __init__(
        self,
        swap: Swap,
        footprint: Footprint,
        parameter: Callable[[Tensor], Any],
        entered: Callable[[int], None] = lambda _segment: None,
    ) -> None:
        self._swap, self._footprint = swap, footprint
        self._parameter, self._entered = parameter, entered
        self._slots: dict[tuple[int, int], Slot] = {}
        self._leaving: deque[Slot] = deque()
        self._away: list[tuple[int, Slot]] = []  # (segment that needs it, slot), in the order of the forward pass
        self._at = len(footprint.segments)
        self._backward = False
        self.live_bytes = self.peak_bytes = self.swapped_bytes = 0

    # --- forward ------------------------------------------------------------------------------------------------

    def make_room(self, segment: int) -> None:
        """Wait until there is room for a segment's forward pass."""
        self._settle(self._footprint.forward_room(segment))
        if segment % PAGES_EVERY == 0:
            give_back_pages()

    def pack(self, tensor: Tensor, segment: int, swap: bool) -> Handle | KeptTensor:
        """Take a tensor that autograd saves, and begin to swap it out if `swap`."""
        unsupported = tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter)
        if unsupported or tensor.is_conj() or tensor.is_neg() or not tensor.untyped_storage().nbytes():
            return KeptTensor(tensor)
        if (stand_in := self._parameter(tensor)) is not None:
            return KeptTensor(tensor) if isinstance(stand_in, Tensor) else KeptTensor(tensor, segment, stand_in)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version  # a later version has other values
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = Slot(storage, key, segment)
            self._count(slot.size)
            if swap and slot.size >= SMALL_BYTES:
                slot.copy = self._swap.put(storage)
                self.swapped_bytes += slot.size
                self._leaving.append(slot)
                self._away.append((segment, slot))
        if slot.copy and slot.needed_at < segment:
            slot.needed_at = segment
            self._away.append((segment, slot))
        return Handle(self, slot, tensor, segment)

    def _settle(self, room: int) -> None:
        """Free written storages, waiting for writes until at most `room` bytes are live."""
        while self._leaving:
            slot = self._leaving[0]
            if slot.users and slot.copy:
                if self.live_bytes > room:
                    slot.copy.wait_written()
                elif not slot.copy.written():
                    return
                slot.storage = None
                self.live_bytes -= slot.size
            self._leaving.popleft()

    # --- backward -----------------------------------------------------------------------------------------------

    def unpack(self, handle: Handle | KeptTensor) -> Tensor:
        """Return a saved tensor.

        Raises:
            RunError: it was changed in place after it was saved.
        """
        if isinstance(handle, KeptTensor):
            _check_unchanged(handle.tensor, handle.version)
            if handle.give is None:
                return handle.tensor
            self.enter(handle.segment)
            return handle.give()
        _check_unchanged(handle.witness, handle.version)
        self.enter(handle.segment)
        storage = self._bring(handle.slot)
        dtype, offset, shape, stride = handle.layout
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)

    def enter(self, segment: int) -> None:
        """Note that a segment's backward pass has begun, and read ahead for the next ones."""
        if segment == OUTSIDE_SEGMENTS:
            return
        if not self._backward:
            self._rewind()
        if segment < self._at:
            self._at = segment
            self._entered(segment)
            if segment % PAGES_EVERY == 0:
                give_back_pages()
            self._prefetch()  # only here: bytes that a segment frees are room for its own later operations

    def _rewind(self) -> None:
        """Turn from forward to backward: keep in memory what is not written yet, as far as there is room."""
        self._backward = True
        self._settle(UNLIMITED_BYTES)
        while self._leaving and self._footprint.excess(self.live_bytes, self._here()) > 0:
            self._settle(self.live_bytes - 1)
        for slot in self._leaving:  # needed before it could be read back
            if slot.users and slot.copy and slot.copy.cancel():
                slot.copy = None
        self._leaving.clear()

    def _here(self) -> list[int]:
        """Return each segment's saved bytes that are in memory."""
        here = [segment.freed_bytes for segment in self._footprint.segments]
        for segment, slot in self._away:
            if segment == slot.owner and slot.storage is None:
                here[segment] -= slot.size
        return here

    def _prefetch(self) -> None:
        room = self._footprint.room
        while self._away:
            segment, slot = self._away[-1]
            if slot.users and slot.copy and slot.storage is None and not slot.arriving:
                held = self.live_bytes + self._footprint.gradients(self._at)
                if segment < self._at and held + slot.size > room(self._at, segment):
                    return
                self._fetch(slot)
            self._away.pop()

    def _fetch(self, slot: Slot) -> None:
        assert slot.copy
        slot.copy.fetch()
        slot.arriving = True
        self._count(slot.size)

    def _bring(self, slot: Slot) -> torch.UntypedStorage:
        if slot.storage is None:
            assert slot.copy
            if not slot.arriving:
                self._fetch(slot)
            slot.storage, slot.arriving = slot.copy.fetched(), False
        return slot.storage

    def release(self, slot: Slot) -> None:
        """Count the end of a handle; free its storage with the last one."""
        slot.users -= 1
        if slot.users:
            return
        if slot.storage is not None or slot.arriving:
            self.live_bytes -= slot.size
        if slot.copy:
            slot.copy.drop()
        slot.storage = slot.copy = None
        self._slots.pop(slot.key, None)

    def end(self) -> None:
        """Free what remains after a step that failed or had no backward pass."""
        for slot in list(self._slots.values()):
            slot.storage = None
            if slot.copy:
                slot.copy.drop()
                slot.copy = None

    def _count(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
