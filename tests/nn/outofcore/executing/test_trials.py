"""The plan that trials choose: the quickest that keeps to the budget, whatever was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.outofcore.executing.compiled import LIBRARY_BYTES, CompiledForward, CompiledPlan
from idletrain.nn.outofcore.executing.disk import ScratchError
from idletrain.nn.outofcore.executing.trials import MOST_SECONDS, VARIATION, TriedStep, measured_plan
from idletrain.nn.outofcore.planning.plan import InfeasibleError, MemoryPlan, candidate_plans, make_memory_plan
from outofcore.made_up import made_up

MB = 1 << 20
PROFILE, FEW = made_up(8, 3), made_up(3, 3)
BUDGET, FEW_BUDGET = 100 * MB, 80 * MB


class Machine:
    """Runs plans in the time and memory that a test says, and notes them."""

    def __init__(self, seconds: Callable[[MemoryPlan], float], more_bytes: int = 0) -> None:
        self._seconds, self._more_bytes = seconds, more_bytes
        self.ran: list[MemoryPlan] = []

    def __call__(self, plan: MemoryPlan) -> TriedStep:
        self.ran.append(plan)
        return TriedStep(self._seconds(plan), plan.peak_bytes + self._more_bytes)


def test_the_plan_is_the_predicted_one_where_it_is_the_quickest() -> None:
    predicted = make_memory_plan(PROFILE, BUDGET)
    chosen = measured_plan(PROFILE, BUDGET, Machine(lambda plan: 1.0 if plan.unit_modes == predicted.unit_modes else 9))
    assert (chosen.unit_modes, chosen.seconds) == (predicted.unit_modes, 1.0)


def test_a_single_technique_is_taken_where_it_is_quicker_than_predicted() -> None:
    first, *others = candidate_plans(make_memory_plan(PROFILE, BUDGET))
    for quick in (first, *others):
        machine = Machine(lambda plan, quick=quick: 1.0 if plan.unit_modes == quick.unit_modes else 9.0)  # type: ignore[misc]
        assert measured_plan(PROFILE, BUDGET, machine).unit_modes == quick.unit_modes
        assert len(machine.ran) == 1 + 1 + len(others)


def test_plans_that_are_close_have_another_trial_which_decides() -> None:
    predicted = make_memory_plan(PROFILE, BUDGET)
    (other, *_) = candidate_plans(predicted)
    seconds = {predicted.unit_modes: [1.0, 2.0], other.unit_modes: [1.1, 0.9]}
    machine = Machine(lambda plan: seconds[plan.unit_modes].pop(0) if plan.unit_modes in seconds else 9.0)
    chosen = measured_plan(PROFILE, BUDGET, machine)
    assert chosen.unit_modes == other.unit_modes
    assert chosen.seconds == 0.9


def test_of_plans_that_are_alike_the_one_that_swaps_least_is_taken() -> None:
    machine = Machine(lambda plan: 1.0 if "S" in plan.unit_modes else 1.04)
    chosen = measured_plan(PROFILE, BUDGET, machine)
    assert any("S" in plan.unit_modes for plan in machine.ran)
    assert not {"S", "Q"} & set(chosen.unit_modes)
    assert chosen.seconds == 1.04
    machine = Machine(lambda plan: 1.0 if "S" in plan.unit_modes else 1.06)
    assert "S" in measured_plan(PROFILE, BUDGET, machine).unit_modes


def test_a_plan_that_takes_more_than_the_budget_is_made_tighter_until_one_keeps_to_it() -> None:
    predicted = make_memory_plan(PROFILE, BUDGET)
    more = BUDGET - predicted.peak_bytes + 5 * MB
    machine = Machine(lambda plan: plan.seconds, more)
    chosen = measured_plan(PROFILE, BUDGET, machine)
    assert predicted.peak_bytes + more > BUDGET
    assert chosen.peak_bytes <= BUDGET * (1 - VARIATION)
    assert chosen.budget_bytes < predicted.budget_bytes


def test_where_no_plan_keeps_to_the_budget_it_is_the_one_of_least_memory() -> None:
    machine = Machine(lambda plan: plan.seconds, 10 * BUDGET)
    chosen = measured_plan(PROFILE, BUDGET, machine)
    assert chosen.peak_bytes == min(plan.peak_bytes for plan in machine.ran) + 10 * BUDGET
    with pytest.raises(InfeasibleError):
        measured_plan(PROFILE, MB, machine)


def test_what_fits_in_core_has_no_trial_of_others() -> None:
    machine = Machine(lambda _plan: 1.0)
    assert set(measured_plan(PROFILE, 10 * BUDGET, machine).unit_modes) == {"K"}
    assert len(machine.ran) == 1


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2 * FEW_BUDGET), st.floats(0.1, 20), st.integers(0, 2 * FEW_BUDGET), st.floats(0.1, 20))
def test_compiled_steps_are_kept_if_and_only_if_they_are_the_quickest_within_the_budget(
    peak: int, seconds: float, plan_peak: int, plan_seconds: float
) -> None:
    most, asked = int(FEW_BUDGET * (1 - VARIATION)), []

    def run(plan: MemoryPlan) -> TriedStep:
        return TriedStep(seconds, peak) if isinstance(plan, CompiledPlan) else TriedStep(plan_seconds, plan_peak)

    def compiled(plan: MemoryPlan, most_bytes: int) -> MemoryPlan:
        asked.append((plan.seconds, most_bytes))
        fields = {name: getattr(plan, name) for name in plan.__slots__}
        return CompiledPlan(**fields | {"unit_modes": ("K",) * len(plan.unit_modes)}, part=0.5)

    chosen = measured_plan(FEW, FEW_BUDGET, run, compiled=compiled)
    assert asked == [(plan_seconds, most)]
    kept = peak <= most and (plan_peak > most or seconds < plan_seconds)
    assert isinstance(chosen, CompiledPlan) == kept
    assert chosen.peak_bytes == (peak if kept else plan_peak)


def test_nothing_is_compiled_where_a_step_fits_in_core_and_what_cannot_be_run_is_left_out() -> None:
    def compiled(_plan: MemoryPlan, _most: int) -> MemoryPlan:
        asked.append(1)
        return replace(plan, unit_modes=("K",) * len(plan.unit_modes))

    asked: list[int] = []
    plan = make_memory_plan(PROFILE, BUDGET)
    measured_plan(PROFILE, 10 * BUDGET, Machine(lambda _plan: 1.0), compiled=compiled)
    assert asked == []

    def seconds(plan: MemoryPlan) -> float:
        if set(plan.unit_modes) == {"K"}:
            raise ScratchError("the disk is full")
        return 1.0

    assert set(measured_plan(PROFILE, BUDGET, Machine(seconds), compiled=compiled).unit_modes) != {"K"}
    assert asked == [1]


def test_plans_keep_to_the_budget_beside_compiled_code_that_was_loaded_and_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, libraries = int(BUDGET * (1 - VARIATION)), [0]
    monkeypatch.setattr(CompiledForward, "library_bytes", lambda: libraries[0])
    quick, *_ = plans = [make_memory_plan(PROFILE, BUDGET), *candidate_plans(make_memory_plan(PROFILE, BUDGET))]

    def run(plan: MemoryPlan) -> TriedStep:
        if isinstance(plan, CompiledPlan):
            libraries[0] = LIBRARY_BYTES
            return TriedStep(9.0, most)
        return TriedStep(1.0, most) if plan.unit_modes == quick.unit_modes else TriedStep(2.0, most - LIBRARY_BYTES)

    def compiled(plan: MemoryPlan, _most: int) -> MemoryPlan:
        return CompiledPlan(**{name: getattr(plan, name) for name in plan.__slots__}, part=0.5)

    assert len(plans) > 1
    assert measured_plan(PROFILE, BUDGET, run).unit_modes == quick.unit_modes
    chosen = measured_plan(PROFILE, BUDGET, run, compiled=compiled)
    assert libraries == [LIBRARY_BYTES]
    assert (chosen.seconds, chosen.peak_bytes) == (2.0, most)


def test_no_other_plan_is_tried_where_steps_take_long() -> None:
    now = [0.0]

    def slow(plan: MemoryPlan) -> float:
        now[0] += MOST_SECONDS + 1
        return plan.seconds

    machine = Machine(slow)
    chosen = measured_plan(PROFILE, BUDGET, machine, clock=lambda: now[0])
    assert chosen.unit_modes == make_memory_plan(PROFILE, BUDGET).unit_modes
    assert len(machine.ran) == 1


def test_a_single_technique_that_cannot_run_here_is_left_out() -> None:
    predicted = make_memory_plan(PROFILE, BUDGET)

    def seconds(plan: MemoryPlan) -> float:
        if plan.unit_modes != predicted.unit_modes:
            raise ScratchError("the disk is full")
        return 1.0

    machine = Machine(seconds)
    assert measured_plan(PROFILE, BUDGET, machine).unit_modes == predicted.unit_modes
    assert len(machine.ran) == 1 + len(candidate_plans(predicted)) > 1
