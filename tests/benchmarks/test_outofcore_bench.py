"""How the bench of out-of-core training picks the best of several techniques."""

from __future__ import annotations

import pytest

from benchmarks.outofcore_figures import best_over_plan, figures_of


def row(same_plan: list[str], **seconds: list[float]) -> dict[str, object]:
    return {"seconds": {name.replace("_", " "): value for name, value in seconds.items()}, "same_plan": same_plan}


def test_luck_in_one_turn_does_not_make_the_best() -> None:
    lucky = row([], plan=[1.0] * 5, swap_all=[0.5, 2.0, 2.0, 2.0, 2.0], recompute_all=[1.5] * 5)
    assert best_over_plan(lucky, ("swap all", "recompute all")) == 1.5


def test_a_technique_that_is_the_plan_s_own_counts_as_once_its_time() -> None:
    own = row(["swap all"], plan=[1.0, 2.0, 1.0], recompute_all=[4.0, 4.0, 4.0])
    assert best_over_plan(own, ("swap all", "recompute all")) == 1.0


def test_where_none_fits_there_is_no_best() -> None:
    assert best_over_plan(row([], plan=[1.0]), ("swap all",)) is None


def case(network: str, swapped: float) -> dict[str, object]:
    seconds = {"plan": [1.0] * 3, "in core": [1.0] * 3, "swap all": [swapped] * 3}
    sizes = {"predicted_bytes": 1, "step_bytes": [1] * 3, "budget": 1}
    about = {"network": network, "mb_per_second": 100.0, "same_plan": [], "same_bits": True}
    return {**about, **sizes, "seconds": seconds, "predicted_seconds": 1.0, "tried_in_core_seconds": 1.0}


def test_models_count_alike_however_many_budgets_a_plan_fits() -> None:
    native = {**case("a", 1.0), "mb_per_second": 0.0, "network": "c"}
    figures = figures_of([case("a", 4.0), case("a", 4.0), case("a", 4.0), case("b", 1.0), native])
    by_name = {figure.what: figure for figure in figures}
    assert by_name["best swap-style / plan at 100 MB/s, mean over models"].value == pytest.approx(2.0)
    assert by_name["best swap-style / plan at 100 MB/s, mean over models"].met


def test_every_step_by_a_plan_counts_towards_those_beyond_the_budget() -> None:
    over = {**case("a", 1.0), "mb_per_second": 0.0, "step_bytes": [1, 2, 2]}
    by_name = {figure.what: figure for figure in figures_of([over, case("b", 1.0)])}
    beyond = by_name["steps by a plan that took more than the budget"]
    assert (beyond.value, beyond.unit, beyond.met) == (2.0, "of 6", False)


def test_a_machine_that_is_slower_all_along_is_no_error_of_the_prediction_beside_steps_in_core() -> None:
    slow = {**case("a", 1.0), "mb_per_second": 0.0}
    slow["seconds"] = {"plan": [3.0] * 3, "in core": [2.0] * 3}
    slow |= {"predicted_seconds": 1.5, "tried_in_core_seconds": 1.0}
    by_name = {figure.what: figure.value for figure in figures_of([slow])}
    assert by_name["step time against its prediction, worst error"] == pytest.approx(1.0)
    assert by_name["plan / in core against its prediction, worst error"] == pytest.approx(0.0)
