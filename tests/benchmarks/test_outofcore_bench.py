"""How the bench of out-of-core training picks the best of several techniques."""

from __future__ import annotations

from benchmarks.outofcore import best_over_plan


def row(same_plan: list[str], **seconds: list[float]) -> dict[str, object]:
    return {"seconds": {name.replace("_", " "): taken for name, taken in seconds.items()}, "same_plan": same_plan}


def test_luck_in_one_turn_does_not_make_the_best() -> None:
    lucky = row([], plan=[1.0] * 5, swap_all=[0.5, 2.0, 2.0, 2.0, 2.0], recompute_all=[1.5] * 5)
    assert best_over_plan(lucky, ("swap all", "recompute all")) == 1.5


def test_a_technique_that_is_the_plan_s_own_counts_as_once_its_time() -> None:
    own = row(["swap all"], plan=[1.0, 2.0, 1.0], recompute_all=[4.0, 4.0, 4.0])
    assert best_over_plan(own, ("swap all", "recompute all")) == 1.0


def test_where_none_fits_there_is_no_best() -> None:
    assert best_over_plan(row([], plan=[1.0]), ("swap all",)) is None
