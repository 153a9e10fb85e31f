"""Of trials that came as far, those that are far behind are stopped; a value that is no number stops its trial."""

from __future__ import annotations

import sys
from typing import Literal

import pytest

from idletrain.errors import JobError
from idletrain.sweeps.pruning import Halving


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_the_best_goes_on_and_the_worst_is_stopped(better: Literal["higher", "lower"]) -> None:
    halving = Halving(27, better)
    values = {f"t{n}": float(n if better == "higher" else -n) for n in range(9)}  # t8 is the best
    stopped = set()
    for rounds in range(1, 28):
        for trial in sorted(values, reverse=True):
            if trial not in stopped and halving.report(trial, rounds, values[trial]):
                stopped.add(trial)
                halving.end(trial, None)
    assert "t8" not in stopped
    assert {"t0", "t1", "t2", "t3"} <= stopped
    halving.end("t8", values["t8"])


def test_a_trial_that_diverges_is_stopped() -> None:
    assert Halving(10, "lower").report("a", 1, float("nan"))


def test_what_never_began_ends_without_a_word() -> None:
    Halving(10, "lower").end("a", None)


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(JobError, match="--prune: needs Optuna; pip install optuna"):
        Halving(10, "lower")


def test_of_two_values_after_as_many_rounds_the_first_counts() -> None:
    halving = Halving(10, "lower")
    assert not halving.report("a", 10, 0.5)
    assert not halving.report("a", 10, 0.4)  # Optuna takes one a round, and warns
    halving.end("a", 0.4)
