"""Parameters and optimizer state out of core: brought in a segment at a time, updated as gradients become ready.

Three segments' buffers are in memory at once: in the forward pass the one that computes and two on their way; in the
backward pass the one that computes, one on its way and one being written back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.nn.outofcore.saved import Copy, Swap
from idletrain.nn.outofcore.simulate import LOOKAHEAD

Update = Callable[[int, nn.Parameter, list[Tensor]], None]  # (the parameter's number, itself with .grad, its state)


class _Group:
    """One segment's parameters: a flat tensor of values `[P]` and one of state `[slots * P]`, here or away."""

    def __init__(self, members: list[tuple[int, nn.Parameter]], slots: int) -> None:
        self.members, self.slots = members, slots
        self.count = sum(p.numel() for _, p in members)
        self.parts: list[Tensor | None] = [None, None]  # values, state
        self.copies: list[Copy | None] = [None, None]
        self.arriving = [False, False]
        self.changed = False

    def views(self, part: int) -> list[list[Tensor]]:
        """Per slot, each parameter's view."""
        flat, slots = self.parts[part], self.slots if part else 1
        assert flat is not None
        found = []
        for slot in range(slots):
            offset, row = slot * self.count, []
            for _, p in self.members:
                row.append(flat[offset : offset + p.numel()].view(p.shape))
                offset += p.numel()
            found.append(row)
        return found


class Weights:
    """Keeps a module's parameters and their optimizer state on the other side of a link.

    Args:
        groups: Each segment's parameters with their numbers; one that several segments use belongs to `resident`.
        resident: Parameters that stay in memory, with their numbers.
        state: Of every parameter by number, its tensors of optimizer state, as they are now.
        swap: Where they go.
        update: Moves one parameter by its gradient.
    """

    def __init__(
        self,
        groups: Sequence[list[tuple[int, nn.Parameter]]],
        resident: Sequence[tuple[int, nn.Parameter]],
        state: Sequence[Sequence[Tensor]],
        swap: Swap,
        update: Update,
    ) -> None:
        self._swap, self._update, self._state = swap, update, state
        self._groups = [_Group(members, len(state[members[0][0]]) if members else 0) for members in groups]
        self._of: dict[int, int] = {}  # storage of resident values -> segment
        self._kept = {p.untyped_storage()._cdata for _, p in resident}
        self._hooks = []
        for number, p in resident:
            if p.requires_grad:
                hook = functools.partial(self._move_resident, number)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for s in range(len(groups)):
            self._take_in(s)

    def close(self) -> None:
        """Bind every parameter to memory again, with the values it has now."""
        for hook in self._hooks:
            hook.remove()
        for s in range(len(self._groups)):
            self._bring(s, (0,))

    def values(self) -> Iterable[tuple[int, Tensor, list[Tensor]]]:
        """Every streamed parameter's number, value and state, a segment at a time; each is good until the next."""
        for s, group in enumerate(self._groups):
            here = [part is not None for part in group.parts]
            self._bring(s, (0, 1))
            states = group.views(1) if group.slots else []
            for i, ((number, _), value) in enumerate(zip(group.members, group.views(0)[0], strict=True)):
                yield number, value, [row[i] for row in states]
            for part in (0, 1):
                if not here[part]:
                    self._release(s, part)

    def finish(self) -> None:
        """End a step: what was updated last is written back; what is needed first stays."""
        for s in range(len(self._groups)):
            self._write_back(s)

    # --- what the executor asks ---------------------------------------------------------------------------------

    def stand_in(self, tensor: Tensor) -> Any:
        """Something that gives a saved parameter back when it is needed; None if the tensor is none."""
        key = tensor.untyped_storage()._cdata
        if key in self._kept:
            return tensor
        s = self._of.get(key)
        if s is None:
            return None
        layout = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        return functools.partial(self._give, s, layout)

    def forward(self, s: int) -> None:
        """Segment `s` is about to run forward."""
        lowest = min(s, len(self._groups) - 1 - LOOKAHEAD)  # the last ones stay: the backward pass begins with them
        for other in range(len(self._groups)):
            if not lowest <= other <= s + LOOKAHEAD:
                self._write_back(other)
                self._release(other, 0)
                self._release(other, 1)
        for ahead in range(s, min(s + LOOKAHEAD + 1, len(self._groups))):
            self._fetch(ahead, 0)
        self._bring(s, (0,))

    def backward(self, s: int) -> None:
        """Segment `s`'s backward pass begins."""
        if s >= len(self._groups):
            return
        for other in range(len(self._groups)):
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

    def _take_in(self, s: int) -> None:
        """Send a segment's parameters and state away, as they are now."""
        group = self._groups[s]
        if not group.members:
            return
        group.parts[0] = torch.cat([p.detach().reshape(-1) for _, p in group.members])
        if group.slots:
            rows = [self._state[n][slot].reshape(-1) for slot in range(group.slots) for n, _ in group.members]
            group.parts[1] = torch.cat(rows).to(group.members[0][1].device)
        for part, flat in enumerate(group.parts):
            if flat is not None:
                group.copies[part] = self._swap.put(flat.untyped_storage())
        for number, p in group.members:
            if p.requires_grad:
                hook = functools.partial(self._move, s, number)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        for part in (0, 1):
            self._release(s, part)

    def _fetch(self, s: int, part: int) -> None:
        group = self._groups[s]
        copy = group.copies[part]
        if group.parts[part] is None and copy and not group.arriving[part]:
            copy.wait_written()
            copy.fetch()
            group.arriving[part] = True

    def _bring(self, s: int, parts: Sequence[int]) -> None:
        group = self._groups[s]
        for part in parts:
            self._fetch(s, part)
            copy = group.copies[part]
            if group.arriving[part]:
                assert copy
                storage, group.arriving[part] = copy.fetched(), False
                values = torch.empty(0, dtype=torch.float32, device=storage.device)
                group.parts[part] = values.set_(storage)
                if part == 0:
                    self._of[storage._cdata] = s
                    for (_, p), view in zip(group.members, group.views(0)[0], strict=True):
                        p.data = view

    def _release(self, s: int, part: int) -> None:
        """Free a part's memory; what was changed has been written back."""
        group = self._groups[s]
        copy, flat = group.copies[part], group.parts[part]
        if group.arriving[part]:
            self._bring(s, (part,))
            flat = group.parts[part]
        if flat is None or copy is None:
            return
        copy.wait_written()
        if part == 0:
            self._of.pop(flat.untyped_storage()._cdata, None)
            for _, p in group.members:
                p.data = torch.empty(1, dtype=p.dtype, device=p.device).expand(p.shape)  # its shape, but no memory
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

    def _give(self, s: int, layout: Any) -> Tensor:
        self._bring(s, (0,))
        flat = self._groups[s].parts[0]
        assert flat is not None
        dtype, offset, shape, stride = layout
        given = torch.empty(0, dtype=dtype, device=flat.device)
        return given.set_(flat.untyped_storage(), offset, shape, stride)

    # --- updating -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _move(self, s: int, number: int, p: Tensor) -> None:
        self._bring(s, (0, 1))
        group = self._groups[s]
        i = next(i for i, (n, _) in enumerate(group.members) if n == number)
        states = group.views(1) if group.slots else []
        assert isinstance(p, nn.Parameter)
        if not group.changed:
            for copy in group.copies:  # what is being written must not change
                if copy:
                    copy.wait_written()
        self._update(number, p, [row[i] for row in states])
        group.changed = True
        p.grad = None

    @torch.no_grad()
    def _move_resident(self, number: int, p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        self._update(number, p, list(self._state[number]))
        p.grad = None
