"""Training steps by a plan that is made in the first of them, and made again when it proves wrong."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from idletrain.nn.outofcore.disk import DiskSwap
from idletrain.nn.outofcore.execute import CHECKPOINT_BYTES, Executor
from idletrain.nn.outofcore.extents import PAGE
from idletrain.nn.outofcore.measure import across_batch, measure
from idletrain.nn.outofcore.pinned import PinnedSwap
from idletrain.nn.outofcore.plan import Plan, make_plan
from idletrain.nn.outofcore.profile import Link, Profile
from idletrain.nn.outofcore.simulate import Footprint
from idletrain.nn.outofcore.units import Piece, pieces_of

WRONG = 0.15  # measured and predicted CPU time differ by more: the profile is not this node's any more
PROBE_ROOM_BYTES = 32 << 20  # of scratch, to learn the link's speed before there is a plan


def profile_of(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    state_slots: int,
    resident_bytes: int,
    link: Link,
    names: Sequence[str] = (),
) -> tuple[list[Piece], Profile]:
    """A module's units and profile, from one batch.

    Args:
        module: In training mode.
        inputs: The batch.
        labels: Its labels.
        loss: `(outputs, labels) -> scalar`.
        state_slots: Tensors of optimizer state per parameter.
        resident_bytes: What is in memory beside parameters and optimizer state.
        link: To where tensors are swapped.
        names: Submodules that are a unit each; automatic if empty.
    """
    outputs: list[Tensor] = []

    def end(out: Tensor) -> Tensor:
        if not outputs:
            outputs.append(out.detach())
        return loss(out, labels)

    pieces, units = measure(module, pieces_of(module, names), inputs, end, state_slots)
    with torch.no_grad():
        across = across_batch(module, loss, outputs[0], labels)
    resident = resident_bytes + (CHECKPOINT_BYTES if inputs.device.type == "cpu" else 0)
    return pieces, Profile(units, link, resident, len(inputs), across)


def scratch_bytes(footprint: Footprint) -> int:
    """The scratch space that a plan's swapped tensors take, with a page at each end of every tensor for alignment and
    as much again for what is freed in pieces.
    """
    swapped = sum(segment.stored_bytes for segment in footprint.segments if segment.swapped)
    return 2 * swapped + 64 * PAGE * len(footprint.segments)


@dataclass(frozen=True)
class Prepared:
    """What was learnt of a module: its units by name, their profile, and the plan."""

    names: tuple[str, ...]
    profile: Profile
    plan: Plan


Known = dict[tuple[tuple[int, ...], ...], Prepared]


class PlannedSteps:
    """Runs a module's steps within a budget.

    Args:
        module: In training mode, its parameters in memory.
        loss: `(outputs, labels) -> scalar`.
        budget_bytes: For all that a step takes.
        resident_bytes: What is in memory beside the module's parameters and their optimizer state.
        state_slots: Tensors of optimizer state per parameter.
        scratch: A directory on a local disk; the system's for temporary files if None.
        known: Plans of modules trained before, by their parameters' shapes; used and added to.

    Attributes:
        plan: The plan that is followed, from the first step on.
        plans: How many were made or taken from `known`.
        swapped_bytes: Written by all steps.
        peak_bytes: Most bytes of saved tensors that lived at once.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        budget_bytes: int,
        resident_bytes: int,
        state_slots: int,
        scratch: Path | None,
        known: Known | None = None,
    ) -> None:
        self._module, self._loss = module, loss
        self._known: Known = {} if known is None else known
        self._shapes = tuple(tuple(p.shape) for p in module.parameters())
        self._budget, self._resident, self._slots = budget_bytes, resident_bytes, state_slots
        self._scratch = scratch or Path(tempfile.gettempdir())
        self._pieces: list[Piece] = []
        self._profile: Profile | None = None
        self._swap: DiskSwap | PinnedSwap | None = None
        self._executor: Executor | None = None
        self._footprint: Footprint | None = None
        self._steps = 0
        self.plan: Plan | None = None
        self.plans = 0
        self.swapped_bytes = self.peak_bytes = 0

    def backward(self, inputs: Tensor, labels: Tensor) -> None:
        """One forward and backward pass, with the bits of one in core.

        Raises:
            InfeasibleError: no plan fits the budget.
            ScratchError: there is no room to swap to; the step was not done.
            DamageError: a tensor came back changed.
        """
        if self._executor is None:
            self._begin(inputs, labels)
        assert self._executor
        with self._executor.step():
            self._loss(self._module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        self.swapped_bytes += self._executor.swapped_bytes
        self.peak_bytes = max(self.peak_bytes, self._executor.peak_bytes)
        if math.log2(self._steps).is_integer() and inputs.device.type == "cpu":  # a plan costs a fraction of a second
            self._look_again()

    def close(self) -> None:
        """Give module and scratch back."""
        if self._executor:
            self._executor.close()
        if self._swap:
            self._swap.close()
        self._executor = self._swap = None

    def _begin(self, inputs: Tensor, labels: Tensor) -> None:
        """Profile with this batch, plan, and make what the plan needs."""
        device = inputs.device
        if known := self._known.get(self._shapes):
            named = {piece.name: piece for piece in pieces_of(self._module)}
            self._pieces, self._profile = [named[name] for name in known.names], known.profile
            self._take(known.plan, device)
            return
        probe = self._make_swap(device, PROBE_ROOM_BYTES)
        link = probe.speed()
        probe.close()
        self._pieces, self._profile = profile_of(
            self._module,
            inputs,
            labels,
            self._loss,
            state_slots=self._slots,
            resident_bytes=self._resident,
            link=link,
        )
        self._take(make_plan(self._profile, self._budget, stream=False), device)

    def _take(self, plan: Plan, device: torch.device) -> None:
        assert self._profile
        self.close()
        self._footprint = plan.footprint(self._profile)
        self._swap = self._make_swap(device, scratch_bytes(self._footprint))
        self._executor = Executor(self._module, self._pieces, self._footprint, self._swap)
        self.plan, self.plans = plan, self.plans + 1
        names = tuple(piece.name for piece in self._pieces)
        self._known[self._shapes] = Prepared(names, self._profile, plan)

    def _make_swap(self, device: torch.device, size: int) -> DiskSwap | PinnedSwap:
        return PinnedSwap(device, size) if device.type == "cuda" else DiskSwap(self._scratch, size)

    def _look_again(self) -> None:
        """Plan anew where the last step's CPU time is far from what was predicted."""
        assert self._executor
        assert self._footprint
        assert self._profile
        segments = self._footprint.segments[:-1]  # without the loss, which has no module to time
        forward = [
            measured / max(s.forward_seconds, 1e-9)
            for measured, s in zip(self._executor.forward_seconds, segments, strict=False)
        ]
        backward = [
            measured / max(s.backward_seconds + s.recompute_seconds, 1e-9)
            for measured, s in zip(self._executor.backward_seconds, segments, strict=False)
        ]
        predicted = sum(s.forward_seconds + s.recompute_seconds + s.backward_seconds for s in segments)
        measured = sum(self._executor.forward_seconds[:-1]) + sum(self._executor.backward_seconds[:-1])
        if abs(measured / max(predicted, 1e-9) - 1) <= WRONG:
            return
        units = list(self._profile.units)
        for s, there, back in zip(segments, forward, backward, strict=True):
            for u in range(s.first, s.last + 1):
                units[u] = replace(
                    units[u],
                    forward_seconds=units[u].forward_seconds * there,
                    recompute_seconds=units[u].recompute_seconds * back,
                    backward_seconds=units[u].backward_seconds * back,
                )
        assert self._swap
        link = self._swap.speed() if isinstance(self._swap, DiskSwap) and self._swap.used else self._profile.link
        self._profile = replace(self._profile, units=tuple(units), link=link)
        self._take(make_plan(self._profile, self._budget, stream=False), next(self._module.parameters()).device)
