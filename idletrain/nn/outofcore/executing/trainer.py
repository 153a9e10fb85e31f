"""Train steps by a plan that is chosen in the first step, and again when what it was chosen by is no longer true."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from idletrain.nn.data.batches import call, device_of, fresh
from idletrain.nn.data.seeding import seeded
from idletrain.nn.local_steps import Update
from idletrain.nn.outofcore.executing.backing_file import StateFile
from idletrain.nn.outofcore.executing.compiled import (
    CompiledExecutor,
    CompiledForward,
    CompiledPlan,
    CompiledSearch,
    NotCompiledError,
)
from idletrain.nn.outofcore.executing.disk import DiskSwap
from idletrain.nn.outofcore.executing.execute import Executor
from idletrain.nn.outofcore.executing.learn import LearntProfile, learn_profile
from idletrain.nn.outofcore.executing.measure import left_alone
from idletrain.nn.outofcore.executing.pinned import PinnedSwap
from idletrain.nn.outofcore.executing.resident import ResidentPeak
from idletrain.nn.outofcore.executing.trials import TIMED, WARM_UP, TriedStep, best_of, measured_plan
from idletrain.nn.outofcore.executing.weights import Final, Members, Weights
from idletrain.nn.outofcore.planning.extents import PAGE_BYTES
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile, Unit
from idletrain.nn.outofcore.planning.segments import Segment
from idletrain.nn.outofcore.planning.simulate import Footprint, simulate
from idletrain.nn.units import pieces_of

logger = logging.getLogger(__name__)
REPLAN_ERROR = 0.15  # a larger difference of measured to predicted seconds, or of two plans', is worth another look
PROBE_ROOM_BYTES = 32 << 20  # scratch space to measure the link's speed before there is a plan


def scratch_bytes(footprint: Footprint) -> int:
    """Return the scratch space for a plan's swapped tensors and streamed parameters, with a page at each end of every
    tensor for alignment, and as much again for fragmentation.
    """
    swapped = sum(segment.stored_bytes for segment in footprint.segments if segment.swapped)
    if footprint.streamed:
        swapped += sum(segment.parameter_bytes + segment.state_bytes for segment in footprint.segments)
    return 2 * swapped + 64 * PAGE_BYTES * len(footprint.segments)


@dataclass(frozen=True)
class PreparedSteps:
    """A module's units by name, the unit that owns each parameter, their profile, and the plan."""

    names: tuple[str, ...]
    owners: tuple[int | None, ...]
    profile: Profile
    plan: MemoryPlan


@dataclass(frozen=True)
class _Built:
    """A plan and the objects that run it."""

    plan: MemoryPlan
    footprint: Footprint
    swap: DiskSwap | PinnedSwap
    weights: Weights
    executor: Executor | CompiledExecutor
    forward: Callable[[Any], Any]

    def close(self) -> None:
        """Restore the module and free the scratch space."""
        self.weights.close()
        self.executor.close()
        self.swap.close()


@dataclass(frozen=True)
class MemoryRoom:
    """The memory and scratch space that steps may use.

    Attributes:
        budget_bytes: Memory for a whole step.
        resident_bytes: Its part that is used beside the module's parameters and their optimizer state.
        scratch: A folder on a local disk.
    """

    budget_bytes: int
    resident_bytes: int
    scratch: Path


Known = dict[tuple[tuple[int, ...], ...], PreparedSteps]


class PlannedSteps:
    """Runs a module's steps within a budget.

    Args:
        module: The module in training mode; its parameters are bound to `state_file`, whose values may still arrive.
        loss: `(outputs, target) -> scalar`.
        state_file: The file that parameters and optimizer state are loaded from and stored to.
        update: Updates one parameter by its gradient.
        room: The memory and scratch space that steps may use.
        on_leave: For the last step, the number of slots to store as they become final, and a function called with the
            numbers of the tensors that are stored.
        known: Plans of modules trained before, by their parameters' shapes; used and added to.
        units: Submodules that are a unit each; automatic if empty.
        compiler_room: Tells the bytes that a process that compiles may take, where steps may be taken in compiled code,
            which has other bits; None where they may not.

    Attributes:
        plan: The plan that the next step follows; None before the first.
        plans: Number of plans made or taken from `known`.
        swapped_bytes: Bytes written by all steps.
        peak_bytes: Peak of live saved tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        state_file: StateFile,
        update: Update,
        room: MemoryRoom,
        *,
        on_leave: tuple[int, Final] | None = None,
        known: Known | None = None,
        units: Sequence[str] = (),
        compiler_room: Callable[[], int] | None = None,
    ) -> None:
        self._module, self._loss, self._state_file, self._update = module, loss, state_file, update
        self._known: Known = {} if known is None else known
        self._on_leave, self._units, self._compiler_room = on_leave, units, compiler_room
        self._search: CompiledSearch | None = None
        self._loads = False  # compiled code
        self._parameters = list(module.parameters())
        self._shapes = tuple(tuple(p.shape) for p in self._parameters)
        self._room = room
        self._learnt: LearntProfile | None = None
        self._built: _Built | None = None
        self._steps = 0
        self.plan: MemoryPlan | None = None
        self.plans = 0
        self.swapped_bytes = self.peak_bytes = 0

    def step(self, inputs: Any, target: Any, *, last: bool = False) -> Tensor:
        """Do one step, with the same bits as in core if it is not compiled, and return the batch's loss before it `[]`.

        Args:
            inputs: The batch.
            target: Its target.
            last: Whether to store final tensors, and report them, while the rest still computes.

        Raises:
            InfeasibleError: no plan fits the budget.
            ScratchError: the scratch space is full; the step was not done.
            DamageError: a tensor was read back changed.
        """
        built = self._ready(inputs, target)
        try:
            loss = self._step(built, inputs, target, last=last)
        except NotCompiledError as error:
            logger.warning("memory.compile: steps follow a plan from now on, as %s", error)
            self._forget_compiled()
            built = self._ready(inputs, target)
            loss = self._step(built, inputs, target, last=last)
        self._steps += 1
        self.swapped_bytes += built.executor.swapped_bytes
        self.peak_bytes = max(self.peak_bytes, built.executor.peak_bytes)
        is_due = math.log2(self._steps).is_integer() and not last  # planning takes time, so rarely
        if is_due and _on_cpu(inputs) and not isinstance(built.plan, CompiledPlan):
            self._check_profile(built)
        return loss.detach()

    @property
    def compiling(self) -> bool:
        """Whether a compiler runs in the first step, which takes up to minutes, or what it has made is loaded."""
        return self._loads or bool(self._search and self._search.running)

    def store(self, state_file: StateFile) -> None:
        """Write parameters and state, as they are now, to a state file."""
        if self._built:
            self._built.weights.store(state_file, state_file.slots)

    def close(self) -> None:
        """Restore the module and free the scratch space."""
        if self._built:
            self._built.close()
        self._built = None

    def _ready(self, inputs: Any, target: Any) -> _Built:
        """Return what runs the plan: planned with this batch the first time, rebuilt when the plan has changed."""
        device = device_of(inputs)
        if self.plan is None:
            with seeded(0):
                self._choose_plan(inputs, target)
        assert self.plan
        if self._built and self._built.plan is not self.plan:
            self.store(self._state_file)
            self.close()
        if self._built is None:
            assert self._learnt
            self._built = self._build(self._learnt, self.plan, device, self._update)
        return self._built

    def _step(self, built: _Built, inputs: Any, target: Any, *, last: bool) -> Tensor:
        """Do one step and return the batch's loss `[]`."""
        if last and self._on_leave:
            built.weights.last(*self._on_leave)
        self._loads = isinstance(built.plan, CompiledPlan) and not self._steps
        try:
            with built.executor.step():
                loss = self._loss(built.forward(inputs), target)
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._loads = False
        built.weights.finish()
        return loss

    def _forget_compiled(self) -> None:
        """Have a plan chosen anew for the next step, without compiled code, and for modules of the same shapes."""
        self.store(self._state_file)
        self.close()
        self._known.pop(self._shapes, None)
        self.plan, self._compiler_room = None, None

    def _choose_plan(self, inputs: Any, target: Any) -> None:
        """Take the known plan, or profile with this batch and make one."""
        if known := self._known.get(self._shapes):
            named = {piece.name: piece for piece in pieces_of(self._module, self._units)}
            self._adopt(LearntProfile([named[name] for name in known.names], known.owners, known.profile), known.plan)
            return
        self._state_file.wait(range(len(self._parameters)))
        with contextlib.closing(self._make_swap(device_of(inputs), PROBE_ROOM_BYTES)) as probe:
            link = probe.speed()
        learnt = learn_profile(
            self._module,
            inputs,
            target,
            self._loss,
            state_slots=self._state_file.slots - 1,
            resident_bytes=self._room.resident_bytes + CompiledForward.library_bytes(),
            link=link,
            names=self._units,
            by_kernel=True,
        )
        before = CompiledForward.library_bytes()
        plan = self._best_plan(learnt, inputs, target)
        resident = learnt.profile.resident_bytes + CompiledForward.library_bytes() - before
        self._adopt(replace(learnt, profile=replace(learnt.profile, resident_bytes=resident)), plan)

    def _best_plan(self, learnt: LearntProfile, inputs: Any, target: Any) -> MemoryPlan:
        """Return the quickest plan as measured in trials, on a GPU as predicted."""
        profile, budget = learnt.profile, self._room.budget_bytes
        if not _on_cpu(inputs):
            if self._compiler_room:
                logger.warning("memory.compile: is for CPUs, so this worker compiles nothing")
            return make_memory_plan(profile, budget, stream=False)
        if self._compiler_room:
            batch, unwanted = (fresh(inputs), target), self._state_file.unwanted
            self._search = CompiledSearch(self._module, self._loss, profile, batch, unwanted, self._compiler_room)
        trial = functools.partial(self._trial, learnt, inputs=inputs, target=target)
        return measured_plan(profile, budget, trial, compiled=self._search)

    def _trial(self, learnt: LearntProfile, plan: MemoryPlan, inputs: Any, target: Any) -> TriedStep:
        """Run steps by a plan that leave the module as it was; return the best of them."""
        built, tried = self._build(learnt, plan, device_of(inputs), _unmoved), []
        try:
            peak, self._loads = ResidentPeak(), isinstance(plan, CompiledPlan)
            for _ in range(WARM_UP + TIMED):
                peak = peak if self._loads else ResidentPeak()  # what loading leaves in memory counts, too
                started = time.perf_counter()
                with left_alone(self._module, inputs), built.executor.step():
                    loss = self._loss(built.forward(fresh(inputs)), target)
                    loss.backward()  # type: ignore[no-untyped-call]
                built.weights.finish()
                tried.append(TriedStep(time.perf_counter() - started, built.footprint.resident_bytes + peak.bytes))
        except NotCompiledError as error:
            logger.warning("memory.compile: not taken for this subnet: %s", error)
            raise
        finally:
            self._loads = False
            built.close()
        best = best_of(tried[WARM_UP:])
        logger.info("a trial of %s steps: %.3g s, %d MiB", _named(plan), best.seconds, best.peak_bytes >> 20)
        return best

    def _adopt(self, learnt: LearntProfile, plan: MemoryPlan) -> None:
        self._learnt, self.plan, self.plans = learnt, plan, self.plans + 1
        names = tuple(piece.name for piece in learnt.pieces)
        self._known[self._shapes] = PreparedSteps(names, learnt.owners, learnt.profile, plan)

    def _build(self, learnt: LearntProfile, plan: MemoryPlan, device: torch.device, update: Update) -> _Built:
        footprint = plan.footprint(learnt.profile)
        swap = self._make_swap(device, scratch_bytes(footprint))
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(swap.close)
            if isinstance(plan, CompiledPlan):
                everything = list(enumerate(self._parameters))
                weights = Weights(self._state_file, [], everything, swap, update, streamed=False)
                forward = CompiledForward(self._module, plan)
                built = _Built(plan, footprint, swap, weights, CompiledExecutor(), forward)
            else:
                groups, others = self._groups(learnt, footprint)
                weights = Weights(self._state_file, groups, others, swap, update, streamed=plan.streamed)
                executor = Executor(self._module, learnt.pieces, footprint, swap, weights)
                built = _Built(plan, footprint, swap, weights, executor, functools.partial(call, self._module))
            cleanup.pop_all()
        return built

    def _groups(self, learnt: LearntProfile, footprint: Footprint) -> tuple[list[Members], Members]:
        """Return each segment's own parameters, and those of several units or none."""
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

    def _check_profile(self, built: _Built) -> None:
        """Correct the profile if the last step's CPU time or the link's speed is far from it, and take another plan if
        that is much quicker by the corrected one alone.
        """
        assert self._learnt
        profile, executor = self._learnt.profile, built.executor
        link = built.swap.speed() if isinstance(built.swap, DiskSwap) and built.swap.used else profile.link
        segments = built.plan.footprint(profile).segments[:-1]  # without the loss, which has no module to time
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
        with contextlib.suppress(InfeasibleError):  # the present plan is feasible
            behind, quickest = _behind(built.plan, learnt.profile)
            if behind > 1 + REPLAN_ERROR:  # or trials chose it, though it was as far behind by the profile of then
                behind /= _behind(built.plan, profile)[0]
            self._adopt(learnt, quickest if behind > 1 + REPLAN_ERROR else built.plan)


def _behind(plan: MemoryPlan, profile: Profile) -> tuple[float, MemoryPlan]:
    """Return how many times as long as the quickest plan one takes by a profile, and the quickest."""
    quickest = make_memory_plan(profile, plan.budget_bytes)
    return simulate(plan.footprint(profile), profile.link).seconds / quickest.seconds, quickest


def _named(plan: MemoryPlan) -> str:
    return f"compiled ({plan.part:g})" if isinstance(plan, CompiledPlan) else "".join(plan.unit_modes)


def _on_cpu(inputs: Any) -> bool:
    return device_of(inputs).type == "cpu"


def _unmoved(_number: int, _parameter: nn.Parameter, _state: list[Tensor]) -> None:
    """Update nothing: a trial's step."""


def _far(measured: float, predicted: float) -> bool:
    return abs(measured / max(predicted, 1e-9) - 1) > REPLAN_ERROR


def _scaled(
    units: Sequence[Unit], segments: Sequence[Segment], forward: Sequence[float], backward: Sequence[float]
) -> tuple[Unit, ...]:
    """Scale the units' seconds to those measured for their segments."""
    scaled = list(units)
    for s, f_seconds, b_seconds in zip(segments, forward, backward, strict=True):
        f, b = f_seconds / max(s.forward_seconds, 1e-9), b_seconds / max(s.recompute_seconds + s.backward_seconds, 1e-9)
        for u in range(s.first, s.last + 1):
            unit = scaled[u]
            scaled[u] = replace(
                unit,
                forward_seconds=unit.forward_seconds * f,
                recompute_seconds=unit.recompute_seconds * b,
                backward_seconds=unit.backward_seconds * b,
            )
    return tuple(scaled)
