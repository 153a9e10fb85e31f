"""Training steps by a plan that is made in the first of them, and made again when it proves wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from idletrain.nn.local_steps import Update
from idletrain.nn.outofcore.executing.backing_file import StateFile
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import CHECKPOINT_BYTES, Executor
from idletrain.nn.outofcore.executing.measure import across_batch, measure_units
from idletrain.nn.outofcore.executing.pinned import PinnedSwap
from idletrain.nn.outofcore.executing.trace import BETWEEN, trace
from idletrain.nn.outofcore.executing.weights import Final, Members, Weights
from idletrain.nn.outofcore.planning.extents import PAGE_BYTES
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink, Unit
from idletrain.nn.outofcore.planning.simulate import Footprint, Segment
from idletrain.nn.units import Piece, pieces_of

REPLAN_ERROR = 0.15  # measured and predicted differ by more: the profile is not this node's any more
PROBE_ROOM_BYTES = 32 << 20  # of scratch, to learn the link's speed before there is a plan


@dataclass(frozen=True)
class LearntProfile:
    """What one batch tells of a module.

    Attributes:
        pieces: Its units in the order in which they run.
        owners: Of every parameter by number the unit that alone uses it; None for several or none.
        profile: Its units' seconds and bytes.
    """

    pieces: list[Piece]
    owners: tuple[int | None, ...]
    profile: Profile


def learn_profile(
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    state_slots: int,
    resident_bytes: int,
    link: SwapLink,
    names: Sequence[str] = (),
    by_kernel: bool = False,
) -> LearntProfile:
    """A module's units and profile, from one batch.

    Args:
        module: In training mode; its buffers and torch's random state are left as they were.
        inputs: The batch.
        labels: Its labels.
        loss: `(outputs, labels) -> scalar`.
        state_slots: Tensors of optimizer state per parameter.
        resident_bytes: What is in memory beside parameters and optimizer state.
        link: To where tensors are swapped.
        names: Submodules that are a unit each; automatic if empty.
        by_kernel: See `measure`.
    """
    outputs: list[Tensor] = []

    def end(out: Tensor) -> Tensor:
        if not outputs:
            outputs.append(out.detach())
        return loss(out, labels)

    pieces, measured = measure_units(module, pieces_of(module, names), inputs, end, state_slots, by_kernel=by_kernel)
    users, held, waiting = trace(module, pieces, inputs)
    owners = tuple(next(iter(mine)) if len(mine) == 1 and BETWEEN not in mine else None for mine in users)
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        across = across_batch(module, loss, outputs[0], labels)
    parameters = list(zip(module.parameters(), owners, strict=True))
    units = list(measured)
    for u in range(len(pieces)):
        mine = [p for p, owner in parameters if owner == u]
        state = state_slots * sum(p.nbytes for p in mine if p.requires_grad)
        units[u] = replace(
            units[u],
            held=held[u],
            waiting_bytes=waiting[u],
            parameter_bytes=sum(p.nbytes for p in mine),
            state_bytes=state,
        )
    others = sum(p.nbytes for p, owner in parameters if owner is None)
    resident = resident_bytes + (2 + state_slots) * others + (CHECKPOINT_BYTES if inputs.device.type == "cpu" else 0)
    return LearntProfile(pieces, owners, Profile(tuple(units), link, resident, len(inputs), across))


def scratch_bytes(footprint: Footprint) -> int:
    """The scratch space that a plan's swapped tensors and streamed parameters take, with a page at each end of every
    tensor for alignment and as much again for what is freed in pieces.
    """
    swapped = sum(segment.stored_bytes for segment in footprint.segments if segment.swapped)
    if footprint.streamed:
        swapped += sum(segment.parameter_bytes + segment.state_bytes for segment in footprint.segments)
    return 2 * swapped + 64 * PAGE_BYTES * len(footprint.segments)


@dataclass(frozen=True)
class PreparedSteps:
    """What was learnt of a module: its units by name, whose its parameters are, their profile, and the plan."""

    names: tuple[str, ...]
    owners: tuple[int | None, ...]
    profile: Profile
    plan: MemoryPlan


@dataclass(frozen=True)
class _Built:
    """A plan and what carries it out."""

    plan: MemoryPlan
    footprint: Footprint
    swap: DiskSwap | PinnedSwap
    weights: Weights
    executor: Executor


@dataclass(frozen=True)
class MemoryRoom:
    """What steps may use.

    Attributes:
        budget_bytes: Memory, for all that a step takes.
        resident_bytes: What of it is taken beside the module's parameters and their optimizer state.
        scratch: A directory on a local disk.
    """

    budget_bytes: int
    resident_bytes: int
    scratch: Path


Known = dict[tuple[tuple[int, ...], ...], PreparedSteps]


class PlannedSteps:
    """Runs a module's steps within a budget.

    Args:
        module: In training mode; its parameters are bound to `home`, whose values may still be on their way.
        loss: `(outputs, labels) -> scalar`.
        home: Where parameters and optimizer state are taken from, and given back to.
        update: Moves one parameter by its gradient.
        room: What steps may use.
        leaving: In the last step, the slots that are given home, and who is told of tensors that are there.
        known: Plans of modules trained before, by their parameters' shapes; used and added to.
        units: Submodules that are a unit each; automatic if empty.

    Attributes:
        plan: The plan that the next step follows, from the first on.
        plans: How many were made or taken from `known`.
        swapped_bytes: Written by all steps.
        peak_bytes: Most bytes of saved tensors that lived at once.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        state_file: StateFile,
        update: Update,
        room: MemoryRoom,
        *,
        on_leave: tuple[int, Final] | None = None,
        known: Known | None = None,
        units: Sequence[str] = (),
    ) -> None:
        self._module, self._loss, self._state_file, self._update = module, loss, state_file, update
        self._known: Known = {} if known is None else known
        self._leaving, self._units = on_leave, units
        self._parameters = list(module.parameters())
        self._shapes = tuple(tuple(p.shape) for p in self._parameters)
        self._room = room
        self._learnt: LearntProfile | None = None
        self._built: _Built | None = None
        self._steps = 0
        self.plan: MemoryPlan | None = None
        self.plans = 0
        self.swapped_bytes = self.peak_bytes = 0

    def step(self, inputs: Tensor, labels: Tensor, *, last: bool = False) -> Tensor:
        """Do one step, with the bits of one in core, and return the batch's loss before it `[]`.

        Args:
            inputs: The batch.
            labels: Its labels.
            last: Whether to give home, and tell of, what is final while the rest still computes.

        Raises:
            InfeasibleError: no plan fits the budget.
            ScratchError: there is no room to swap to; the step was not done.
            DamageError: a tensor came back changed.
        """
        built = self._ready(inputs, labels)
        if last and self._leaving:
            built.weights.last(*self._leaving)
        with built.executor.step():
            loss = self._loss(self._module(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        built.weights.finish()
        self._steps += 1
        self.swapped_bytes += built.executor.swapped_bytes
        self.peak_bytes = max(self.peak_bytes, built.executor.peak_bytes)
        if math.log2(self._steps).is_integer() and not last and inputs.device.type == "cpu":  # a plan takes a moment
            self._check_prediction(built)
        return loss.detach()

    def store(self, state_file: StateFile) -> None:
        """Write parameters and state, as they are, to a home."""
        if self._built:
            self._built.weights.store(state_file, state_file.slots)

    def close(self) -> None:
        """Give module and scratch back."""
        if self._built:
            self._built.weights.close()
            self._built.executor.close()
            self._built.swap.close()
        self._built = None

    def _ready(self, inputs: Tensor, labels: Tensor) -> _Built:
        """What the plan needs, made with this batch if there is none, made anew if another was found better."""
        device = inputs.device
        if self.plan is None:
            self._begin(inputs, labels)
        assert self.plan
        if self._built and self._built.plan is not self.plan:
            self.store(self._state_file)
            self.close()
        if self._built is None:
            self._built = self._build(self.plan, device)
        return self._built

    def _begin(self, inputs: Tensor, labels: Tensor) -> None:
        """Take the plan that is known, or profile with this batch and make one."""
        if known := self._known.get(self._shapes):
            named = {piece.name: piece for piece in pieces_of(self._module, self._units)}
            self._adopt(LearntProfile([named[name] for name in known.names], known.owners, known.profile), known.plan)
            return
        self._state_file.wait(range(len(self._parameters)))
        with contextlib.closing(self._make_swap(inputs.device, PROBE_ROOM_BYTES)) as probe:
            link = probe.speed()
        learnt = learn_profile(
            self._module,
            inputs,
            labels,
            self._loss,
            state_slots=self._state_file.slots - 1,
            resident_bytes=self._room.resident_bytes,
            link=link,
            names=self._units,
            by_kernel=True,
        )
        self._adopt(
            learnt, make_memory_plan(learnt.profile, self._room.budget_bytes, stream=inputs.device.type == "cpu")
        )

    def _adopt(self, learnt: LearntProfile, plan: MemoryPlan) -> None:
        self._learnt, self.plan, self.plans = learnt, plan, self.plans + 1
        names = tuple(piece.name for piece in learnt.pieces)
        self._known[self._shapes] = PreparedSteps(names, learnt.owners, learnt.profile, plan)

    def _build(self, plan: MemoryPlan, device: torch.device) -> _Built:
        learnt = self._learnt
        assert learnt
        footprint = plan.footprint(learnt.profile)
        swap = self._make_swap(device, scratch_bytes(footprint))
        with contextlib.ExitStack() as failed:
            failed.callback(swap.close)
            groups, others = self._groups(learnt, footprint)
            weights = Weights(self._state_file, groups, others, swap, self._update, streamed=plan.streamed)
            executor = Executor(self._module, learnt.pieces, footprint, swap, weights)
            failed.pop_all()
        return _Built(plan, footprint, swap, weights, executor)

    def _groups(self, learnt: LearntProfile, footprint: Footprint) -> tuple[list[Members], Members]:
        """Each segment's own parameters, and those of several units or none."""
        members = list(enumerate(self._parameters))
        groups: list[Members] = [
            [
                (i, p)
                for (i, p), owner in zip(members, learnt.owners, strict=True)
                if owner is not None and segment.first <= owner <= segment.last
            ]
            for segment in footprint.segments
            if segment.last < len(learnt.pieces)
        ]
        return groups, [pair for pair, owner in zip(members, learnt.owners, strict=True) if owner is None]

    def _make_swap(self, device: torch.device, size: int) -> DiskSwap | PinnedSwap:
        return PinnedSwap(device, size) if device.type == "cuda" else DiskSwap(self._room.scratch, size)

    def _check_prediction(self, built: _Built) -> None:
        """Plan anew where the last step's CPU time, or the link's speed, is far from what was predicted."""
        assert self._learnt
        profile, executor = self._learnt.profile, built.executor
        link = built.swap.speed() if isinstance(built.swap, DiskSwap) and built.swap.used else profile.link
        segments = built.plan.footprint(profile).segments[:-1]  # without the loss: no module to time
        handling = [s.swapped_tensors * link.seconds_per_tensor / 2 for s in segments]
        forward = [max(m - h, 0.0) for m, h in zip(executor.forward_seconds, handling, strict=False)]
        backward = [max(m - h, 0.0) for m, h in zip(executor.backward_seconds, handling, strict=False)]
        predicted = sum(s.forward_seconds + s.recompute_seconds + s.backward_seconds for s in segments)
        units = profile.units
        if wrong := _far(sum(forward) + sum(backward), predicted):
            units = _scaled(units, segments, forward, backward)
        if not wrong and not any(map(_far, link[:2], profile.link[:2])):
            return
        learnt = replace(self._learnt, profile=replace(profile, units=units, link=link))
        with contextlib.suppress(InfeasibleError):  # one is at work, so one is feasible
            plan = make_memory_plan(learnt.profile, self._room.budget_bytes)
            same = (plan.unit_modes, plan.streamed) == (built.plan.unit_modes, built.plan.streamed)
            self._adopt(learnt, built.plan if same else plan)


def _far(measured: float, predicted: float) -> bool:
    return abs(measured / max(predicted, 1e-9) - 1) > REPLAN_ERROR


def _scaled(
    units: Sequence[Unit], segments: Sequence[Segment], forward: Sequence[float], backward: Sequence[float]
) -> tuple[Unit, ...]:
    """Units that take the seconds that were measured of their segments."""
    made = list(units)
    for s, there, back in zip(segments, forward, backward, strict=True):
        f, b = there / max(s.forward_seconds, 1e-9), back / max(s.recompute_seconds + s.backward_seconds, 1e-9)
        for u in range(s.first, s.last + 1):
            unit = made[u]
            made[u] = replace(
                unit,
                forward_seconds=unit.forward_seconds * f,
                recompute_seconds=unit.recompute_seconds * b,
                backward_seconds=unit.backward_seconds * b,
            )
    return tuple(made)
