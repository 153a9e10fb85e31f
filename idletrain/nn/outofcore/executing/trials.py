"""Choose among plans by steps on the machine itself: predictions tell the few best, and measurements the best of them.

The bits of a step do not depend on its plan, so neither does a run's result depend on what was measured; unless the
job allows compiled code (`memory.compile`), whose bits are others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from idletrain.errors import RunError
from idletrain.nn.outofcore.executing.compiled import CompiledForward, CompiledPlan
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, candidate_plans, make_memory_plan
from idletrain.nn.outofcore.planning.profile import Profile

VARIATION = 0.05  # of a budget, by which the peaks of steps by one plan differ
CLOSE = 1.15  # times the quickest plan's seconds: within it, another trial decides
# Times the quickest plan's seconds: within it, the plan that swaps least is taken. Steps of one plan differ by more
# (the bench outofcore), and what is swapped costs others the disk and a core.
ALIKE = 1.05
WARM_UP, TIMED = 1, 2  # steps of a trial; the first loads parameters, and takes memory for code
TIGHTER = 3  # plans for smaller budgets, where steps take more memory than was predicted
MOST_SECONDS = 15.0  # after which no other trial begins: a worker that is silent for a minute counts as hung


class TriedStep(NamedTuple):
    """The seconds and the peak, resident bytes included, of a step by a plan."""

    seconds: float
    peak_bytes: int


def measured_plan(
    profile: Profile,
    budget_bytes: int,
    run: Callable[[MemoryPlan], TriedStep],
    *,
    stream: bool = True,
    compiled: Callable[[MemoryPlan, int], MemoryPlan | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> MemoryPlan:
    """Return the quickest of the plans that are predicted to be good and that keep to a budget, with its seconds as
    measured; of those that are as quick, the one that swaps least.

    Where none keeps to it, plans for less memory are tried; the one that takes least is the last resort. Where steps
    take long, few plans are tried.

    Args:
        profile: The network.
        budget_bytes: Memory for a whole step.
        run: Runs some steps by a plan, and returns the best of them.
        stream: Whether parameters and optimizer state may be streamed.
        compiled: Finds steps in compiled code to try beside the best plan, within the bytes of a step; it has a limit
            of time of its own.
        clock: Tells the seconds.

    Raises:
        InfeasibleError: no plan is predicted to fit the budget.
    """
    plan = make_memory_plan(profile, budget_bytes, stream=stream)
    ends = clock() + MOST_SECONDS
    most, tried = int(budget_bytes * (1 - VARIATION)), [(plan, run(plan))]
    for _ in range(TIGHTER):
        if tried[-1][1].peak_bytes <= most or clock() > ends:
            break
        less = plan.budget_bytes - (tried[-1][1].peak_bytes - most)
        try:
            plan = make_memory_plan(profile, less, stream=stream)
            tried.append((plan, run(plan)))
        except (InfeasibleError, RunError):
            break
    for candidate in candidate_plans(plan):
        if clock() > ends:
            break
        with contextlib.suppress(RunError):  # it needs more scratch space than there is, or recomputes what differs
            tried.append((candidate, run(candidate)))
    before = clock()
    if compiled:
        tried = _with_compiled(tried, most, compiled, run)
    fitting, ends = _fitting(most, tried), ends + clock() - before
    close = _quickest(CLOSE, fitting) if fitting else []
    if len(close) > 1 and clock() < ends:
        again = [(plan, best_of([trial, run(plan)])) for plan, trial in close]
        return _best(_fitting(most, again) or close, most, profile)
    return _best(tried, most, profile)


_Tried = list[tuple[MemoryPlan, TriedStep]]


def _with_compiled(
    tried: _Tried,
    most_bytes: int,
    compiled: Callable[[MemoryPlan, int], MemoryPlan | None],
    run: Callable[[MemoryPlan], TriedStep],
) -> _Tried:
    """Return the trials, and one of compiled steps unless what is quickest fits in core, none are found, or they take
    more than so many bytes.
    """
    best, before = _quickest_or_least(most_bytes, tried), CompiledForward.library_bytes()
    fits = set(best.unit_modes) == {"K"} and not best.streamed and best.peak_bytes <= most_bytes
    trials: _Tried = []
    if found := None if fits else compiled(best, most_bytes):
        with contextlib.suppress(RunError):
            trials = _fitting(most_bytes, [(found, run(found))])
    libraries = CompiledForward.library_bytes() - before  # which steps by a plan have beside them from now on
    return [(plan, trial._replace(peak_bytes=trial.peak_bytes + libraries)) for plan, trial in tried] + trials


def _quickest_or_least(most_bytes: int, tried: _Tried) -> MemoryPlan:
    """Return the quickest plan that took at most so many bytes; if none did, the plan that took least."""
    fitting = _fitting(most_bytes, tried)
    if not fitting:
        return _as_measured(*min(tried, key=lambda pair: pair[1].peak_bytes))
    return _as_measured(*min(fitting, key=lambda pair: pair[1].seconds))


def _fitting(most_bytes: int, tried: _Tried) -> _Tried:
    """Return those of the trials that took at most so many bytes."""
    return [(plan, trial) for plan, trial in tried if trial.peak_bytes <= most_bytes]


def _best(tried: _Tried, most_bytes: int, profile: Profile) -> MemoryPlan:
    """Return the quickest plan that took at most so many bytes, or one as quick that swaps less; if none did, the plan
    that took least. Compiled steps must be quicker than all plans: their bits are others.
    """
    fitting, quickest = _fitting(most_bytes, tried), _quickest_or_least(most_bytes, tried)
    if not fitting or isinstance(quickest, CompiledPlan):
        return quickest
    alike = [pair for pair in _quickest(ALIKE, fitting) if not isinstance(pair[0], CompiledPlan)]
    return _as_measured(*min(alike, key=lambda pair: (_swapped_bytes(pair[0], profile), pair[1].seconds)))


def _quickest(times: float, tried: _Tried) -> _Tried:
    """Return the quickest plan and those that take at most so many times its seconds."""
    limit = times * min(trial.seconds for _, trial in tried)
    return [(plan, trial) for plan, trial in tried if trial.seconds <= limit]


def _swapped_bytes(plan: MemoryPlan, profile: Profile) -> int:
    """Return the bytes that a step by a plan writes to the disk."""
    segments = plan.footprint(profile).segments
    streamed = sum(s.parameter_bytes + s.state_bytes for s in segments) if plan.streamed else 0
    return streamed + sum(s.stored_bytes for s in segments if s.swapped)


def best_of(steps: Sequence[TriedStep]) -> TriedStep:
    """Return the least seconds, as other processes only add to them, and the highest peak."""
    return TriedStep(min(step.seconds for step in steps), max(step.peak_bytes for step in steps))


def _as_measured(plan: MemoryPlan, trial: TriedStep) -> MemoryPlan:
    return replace(plan, seconds=trial.seconds, peak_bytes=trial.peak_bytes)
