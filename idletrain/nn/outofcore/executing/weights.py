"""Hold parameters and optimizer state of a subnet trained out of core: load them from the state file when their units
run, update them as gradients become ready, and store them as they become final.

If they are streamed, three segments' buffers are in memory at once: in the forward pass the computing one and two that
load; in the backward pass the computing one, one that loads and one that is written back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.nn.local_steps import Update
from idletrain.nn.outofcore.executing.backing_file import StateFile
from idletrain.nn.outofcore.executing.saved_tensors import Copy, Swap
from idletrain.nn.outofcore.planning.simulate import LOOKAHEAD

Members = Sequence[tuple[int, nn.Parameter]]  # parameters with their numbers
Final = Callable[[Sequence[int]], None]  # (numbers)


class _Group:
    """One segment's parameters: a flat tensor of values `[P]` and one of state `[slots * P]`, in memory or swapped."""

    def __init__(self, members: Members, slots: int, *, streamed: bool) -> None:
        self.members, self.slots, self.streamed = members, slots, streamed
        self.numbers = [number for number, _ in members]
        self.count = sum(p.numel() for _, p in members)
        self.parts: list[Tensor | None] = [None, None]  # values, state
        self.copies: list[Copy | None] = [None, None]
        self.arriving = [False, False]
        self.loaded = self.changed = self.stored = False
        self.not_updated: set[int] = set()  # numbers still to be updated in the last step

    def views(self, part: int) -> list[list[Tensor]]:
        """Return each parameter's view, per slot, of values (part 0) or state (part 1)."""
        flat, slots = self.parts[part], self.slots if part else 1
        assert flat is not None
        rows = []
        for slot in range(slots):
            offset, row = slot * self.count, []
            for _, p in self.members:
                row.append(flat[offset : offset + p.numel()].view(p.shape))
                offset += p.numel()
            rows.append(row)
        return rows


class Weights:
    """Holds a module's parameters and their optimizer state.

    Args:
        state_file: The file that they are loaded from and stored to.
        groups: Each segment's own parameters.
        others: Parameters that several segments use, or none does; they stay in memory.
        swap: Swap space for streamed parameters between two uses.
        update: Updates one parameter by its gradient.
        streamed: Whether only three segments' parameters are in memory at once.
    """

    def __init__(
        self,
        state_file: StateFile,
        groups: Sequence[Members],
        others: Members,
        swap: Swap,
        update: Update,
        *,
        streamed: bool,
    ) -> None:
        self._state_file, self._swap, self._update = state_file, swap, update
        slots = state_file.slots - 1
        self._groups = [_Group(members, slots, streamed=streamed) for members in groups]
        self._segments = len(groups)
        self._groups.append(_Group(others, slots, streamed=False))
        self._group_of: dict[int, int] = {}  # storage of values -> group
        self._final: tuple[int, Final] | None = None
        self._hooks = []
        for s, group in enumerate(self._groups):
            for number, p in group.members:
                if p.requires_grad:
                    hook = functools.partial(self._move, s, number)
                    self._hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._bring(self._segments, (0, 1))

    def close(self) -> None:
        """Bind every parameter to the state file again, and free the swap space."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            for copy in group.copies:
                if copy:
                    copy.drop()
            for number, p in group.members:
                p.data = self._state_file.slot(number)

    def store(self, state_file: StateFile, slots: int) -> None:
        """Write the first `slots` slots of all parameters to a state file."""
        for s in range(len(self._groups)):
            self._store(s, state_file, slots)

    def finish(self) -> None:
        """End a step: write back what was updated last; keep in memory what the next step needs first."""
        for s, group in enumerate(self._groups):
            if self._final and group.members and not group.stored:  # some had no gradient
                self._write_state(s)
            self._write_back(s)

    def last(self, slots: int, final: Final) -> None:
        """Make the next step the last: store a group's first `slots` slots when final, then call `final(numbers)`."""
        self._final = slots, final
        for group in self._groups:
            group.not_updated = {number for number, p in group.members if p.requires_grad}

    # --- called by the executor ---------------------------------------------------------------------------------

    def stand_in(self, tensor: Tensor) -> Any:
        """Return a saved parameter itself, or if it is streamed a function that loads it; None for other tensors."""
        s = self._group_of.get(tensor.untyped_storage()._cdata)
        if s is None:
            return None
        if not self._groups[s].streamed:
            return tensor
        layout = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        return functools.partial(self._reload, s, layout)

    def forward(self, s: int) -> None:
        """Load segment `s` for its forward pass, and begin to load the ones after it."""
        lowest = min(s, self._segments - 1 - LOOKAHEAD)  # the last segments stay: the backward pass begins with them
        for other in range(self._segments):
            if not lowest <= other <= s + LOOKAHEAD:
                self._write_back(other)
                self._release(other, 0)
                self._release(other, 1)
        self._bring(s, (0,))
        for upcoming in range(s + 1, min(s + LOOKAHEAD + 1, self._segments)):
            self._fetch(upcoming, 0)

    def backward(self, s: int) -> None:
        """Load segment `s` for its backward pass, and begin to load the one before it."""
        if s >= self._segments:
            return
        for other in range(self._segments):
            if other > s:
                self._write_back(other)
            if other > s + 1 or other < s - 1:
                self._release(other, 0)
                self._release(other, 1)
        self._fetch(s, 0)
        self._fetch(s, 1)
        if s:
            self._fetch(s - 1, 0)
            self._fetch(s - 1, 1)
        self._bring(s, (0, 1))

    # --- moving -------------------------------------------------------------------------------------------------

    def _load(self, s: int) -> None:
        """Load a group from the state file, once it has arrived."""
        group = self._groups[s]
        self._state_file.wait(group.numbers)
        device = group.members[0][1].device
        rows = [
            [self._state_file.read_slot(number, slot) for number in group.numbers] for slot in range(1 + group.slots)
        ]
        group.parts[0] = torch.cat(rows[0]).to(device)
        if group.slots:
            group.parts[1] = torch.cat([values for row in rows[1:] for values in row]).to(device)
        for start, stop in self._state_file.parts(group.numbers, 1 + group.slots):
            self._state_file.drop(start, stop)
        group.loaded = True
        self._bind(s)
        if group.streamed:
            for part, flat in enumerate(group.parts):
                if flat is not None:
                    group.copies[part] = self._swap.put(flat.untyped_storage())

    def _bind(self, s: int) -> None:
        group = self._groups[s]
        assert group.parts[0] is not None
        self._group_of[group.parts[0].untyped_storage()._cdata] = s
        for (_, p), view in zip(group.members, group.views(0)[0], strict=True):
            p.data = view

    def _fetch(self, s: int, part: int) -> None:
        """Begin to read a part back, or load the group if it has arrived."""
        group = self._groups[s]
        if not group.members or group.parts[part] is not None or group.arriving[part]:
            return
        if not group.loaded:
            if self._state_file.has_arrived(group.numbers):
                self._load(s)
            return
        if copy := group.copies[part]:
            copy.wait_written()
            copy.fetch()
            group.arriving[part] = True

    def _bring(self, s: int, parts: Sequence[int]) -> None:
        """Have a group's parts in memory, waiting for them if need be."""
        group = self._groups[s]
        if group.members and not group.loaded:
            self._load(s)
        for part in parts:
            self._fetch(s, part)
            if group.arriving[part]:
                copy = group.copies[part]
                assert copy
                storage, group.arriving[part] = copy.fetched(), False
                values = torch.empty(0, dtype=torch.float32, device=storage.device)
                group.parts[part] = values.set_(storage)
                if part == 0:
                    self._bind(s)

    def _release(self, s: int, part: int) -> None:
        """Free a part's memory; changes must have been written back."""
        group = self._groups[s]
        copy = group.copies[part]
        if group.arriving[part]:
            self._bring(s, (part,))
        flat = group.parts[part]
        if flat is None or copy is None:
            return
        copy.wait_written()
        if part == 0:
            self._group_of.pop(flat.untyped_storage()._cdata, None)
            for _, p in group.members:
                p.data = torch.full((1,), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)  # only the shape
        group.parts[part] = None

    def _write_back(self, s: int) -> None:
        group = self._groups[s]
        if not group.changed:
            return
        group.changed = False
        for part, flat in enumerate(group.parts):
            old = group.copies[part]
            if flat is not None and old:
                old.drop()
                group.copies[part] = self._swap.put(flat.untyped_storage())

    def _reload(self, s: int, layout: Any) -> Tensor:
        self._bring(s, (0,))
        flat = self._groups[s].parts[0]
        assert flat is not None
        dtype, offset, shape, stride = layout
        parameter = torch.empty(0, dtype=dtype, device=flat.device)
        return parameter.set_(flat.untyped_storage(), offset, shape, stride)

    @torch.no_grad()
    def _store(self, s: int, state_file: StateFile, slots: int) -> None:
        """Copy a group's first `slots` slots to a state file, swapped parts in memory only meanwhile."""
        group = self._groups[s]
        if not group.members:
            return
        parts = (0, 1) if slots > 1 and group.slots else (0,)
        in_memory = [part is not None for part in group.parts]
        self._bring(s, parts)
        rows = [row for part in parts for row in group.views(part)]
        for slot, row in enumerate(rows[:slots]):
            for number, values in zip(group.numbers, row, strict=True):
                state_file.write(number, slot, values)
        for start, stop in state_file.parts(group.numbers, slots):
            state_file.sync(start, stop)
        for part in parts:
            if not in_memory[part]:
                self._release(s, part)

    # --- updating -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _move(self, s: int, number: int, p: Tensor) -> None:
        """Update a parameter whose gradient is ready."""
        self._bring(s, (0, 1))
        group = self._groups[s]
        i = group.numbers.index(number)
        states = group.views(1) if group.slots else []
        assert isinstance(p, nn.Parameter)
        if not group.changed:
            for copy in group.copies:  # values must not change while they are written
                if copy:
                    copy.wait_written()
        self._update(number, p, [row[i] for row in states])
        group.changed = True
        p.grad = None
        if self._final:
            group.not_updated.discard(number)
            if not group.not_updated:
                self._write_state(s)

    def _write_state(self, s: int) -> None:
        """Store a final group in the state file, and report its numbers."""
        assert self._final
        slots, final = self._final
        group = self._groups[s]
        self._store(s, self._state_file, slots)
        group.stored, group.changed = True, False  # not read again
        final(group.numbers)
