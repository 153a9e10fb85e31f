"""Test the search: no worse than any single technique, within its budget, close to the optimum of small cases."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idletrain.nn.outofcore.planning.plan import (
    InfeasibleError,
    MemoryPlan,
    least_bytes,
    legal,
    make_memory_plan,
    singles,
    usable,
)
from idletrain.nn.outofcore.planning.profile import Profile, SwapLink, Unit
from idletrain.nn.outofcore.planning.simulate import Footprint, simulate
from outofcore.made_up import MB, made_up


def in_core_bytes(profile: Profile) -> int:
    units = profile.units
    return simulate(Footprint(units, "K" * len(units), 10**15, 0, streamed=False), profile.link).peak_bytes


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 6), st.integers(0, 10**6), st.floats(0.25, 1.3), st.sampled_from([10, 100, 1000]), st.booleans())
def test_a_plan_fits_and_is_no_worse_than_any_single_technique(
    n: int, seed: int, part: float, mbs: float, parameters: bool
) -> None:
    profile = made_up(n, seed, mbs, parameters)
    budget = int(in_core_bytes(profile) * part)
    least = least_bytes(profile)
    if budget < least:
        budget = least  # below it: see the test of the smallest budget
    plan = make_memory_plan(profile, budget)
    assert plan.peak_bytes <= usable(budget)
    outcome = simulate(plan.footprint(profile), profile.link)
    assert (outcome.seconds, outcome.peak_bytes, outcome.shortfall_bytes) == (plan.seconds, plan.peak_bytes, 0)
    assert {technique.name for technique in plan.techniques} >= set(singles(profile.units))
    fitting = [technique.seconds for technique in plan.techniques if not technique.shortfall_bytes]
    assert all(plan.seconds <= seconds + 1e-12 for seconds in fitting)


@pytest.mark.parametrize("seed", range(12))
def test_the_search_ends_at_the_optimum_or_within_a_third_of_a_percent(seed: int) -> None:
    profile = made_up(5, seed, 60)
    budget = int(in_core_bytes(profile) * 0.75)
    every = {legal(profile.units, modes) for modes in itertools.product("KSRQm", repeat=5)}
    costs = [simulate(Footprint(profile.units, c, usable(budget), 0, streamed=False), profile.link).cost for c in every]
    fitting = [seconds for shortfall, seconds in costs if not shortfall]
    if not fitting:
        with pytest.raises(InfeasibleError):
            make_memory_plan(profile, budget)
        return
    assert make_memory_plan(profile, budget).seconds <= min(fitting) * 1.0035


def test_most_of_those_cases_have_a_plan() -> None:
    assert sum(least_bytes(p) < 0.75 * in_core_bytes(p) for p in (made_up(5, s, 60) for s in range(12))) >= 8


def test_the_smallest_budget_is_the_smallest() -> None:
    profile = made_up(4, 3)
    least = least_bytes(profile)
    assert make_memory_plan(profile, least).peak_bytes <= least
    with pytest.raises(InfeasibleError, match=r"no plan fits .* the smallest budget that one fits is .* MiB \(unit u"):
        make_memory_plan(profile, least - 2)


def test_where_all_fits_all_is_kept() -> None:
    profile = made_up(6, 1)
    plan = make_memory_plan(profile, 2 * in_core_bytes(profile))
    assert plan.unit_modes == ("K",) * 6
    assert plan.seconds == pytest.approx(profile.compute_seconds)


def test_a_joint_plan_beats_every_single_technique_where_neither_link_nor_compute_is_to_spare() -> None:
    units = tuple(
        Unit(f"u{i}", 0.1, 0.2, 0.09 if i % 2 else 0.02, 4 * MB, 4 * MB, (2 if i % 2 else 12) * MB, follows=i > 0)
        for i in range(10)
    )
    profile = Profile(units, SwapLink(50e6, 50e6), across_batch="its BatchNorm")
    plan = make_memory_plan(profile, int(in_core_bytes(profile) * 0.45))
    best = min(technique.seconds for technique in plan.techniques if not technique.shortfall_bytes)
    assert plan.seconds < 0.99 * best
    assert {"R", "S"} <= set(plan.unit_modes) | {"S" if letter == "Q" else letter for letter in plan.unit_modes}


def test_parameters_are_streamed_where_they_do_not_fit() -> None:
    units = tuple(
        Unit(f"u{i}", 0.1, 0.2, 0.1, MB, MB, MB, parameter_bytes=20 * MB, state_bytes=40 * MB) for i in range(6)
    )
    profile = Profile(units, SwapLink(1e9, 1e9))
    plan = make_memory_plan(profile, 300 * MB)
    assert plan.streamed
    assert plan.peak_bytes <= 270 * MB < 6 * 60 * MB
    assert not make_memory_plan(profile, 2000 * MB).streamed
    with pytest.raises(InfeasibleError):
        make_memory_plan(profile, 200 * MB)


@pytest.mark.parametrize(
    ("across", "allowed", "note", "count"),
    [
        ("its BatchNorm sees the whole batch", True, "not possible, its BatchNorm", 1),
        ("", False, "not allowed, as they sum gradients in another order", 1),
        ("", True, None, 4),
    ],
)
def test_micro_batches_are_taken_where_they_may_be(across: str, allowed: bool, note: str | None, count: int) -> None:
    units = tuple(Unit(f"u{i}", 0.1, 0.2, 0.1, 4 * MB, 4 * MB, 32 * MB) for i in range(8))
    profile = Profile(units, SwapLink(1e7, 1e7), batch_size=16, across_batch=across)
    plan = make_memory_plan(profile, 100 * MB, micro_batches=allowed)
    assert plan.micro_batches == count
    assert [n for n in plan.notes if note and note in n] == list(plan.notes)
    if count > 1:
        assert plan.seconds == pytest.approx(profile.compute_seconds)
        assert plan.peak_bytes <= 90 * MB


def test_a_unit_is_only_given_what_it_allows() -> None:
    profile = made_up(5, 2)
    assert legal(profile.units, "mmmmm")[0] == "R"
    keep = Profile(
        tuple(Unit(u.name, 1, 2, 1, MB, MB, MB, modes="K" if i == 2 else "KS") for i, u in enumerate(profile.units)),
        profile.link,
    )
    assert legal(keep.units, "RQmSS") == ("K", "K", "K", "S", "S")
    assert legal(keep.units, "SSSSS") == ("S", "S", "K", "S", "S")


def test_fifty_units_are_planned_within_a_second_of_cpu_time() -> None:
    profile = made_up(50, 7, 60)
    started = time.thread_time()
    plan = make_memory_plan(profile, int(in_core_bytes(profile) * 0.4))
    assert time.thread_time() - started < 1.0
    assert isinstance(plan, MemoryPlan)
