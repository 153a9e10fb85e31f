"""The best evaluation and how many came since, by hand."""

from __future__ import annotations

import pytest

from idletrain.rounds.best import Scores, best_round, evaluations_since_best


@pytest.mark.parametrize(
    ("scores", "higher", "best", "since"),
    [
        ({}, True, None, 0),
        ({10: 0.5}, True, 10, 0),
        ({10: 0.5, 20: 0.6, 30: 0.55}, True, 20, 1),
        ({10: 0.5, 20: 0.6, 30: 0.55}, False, 10, 2),
        ({10: 0.5, 20: 0.5, 30: 0.5}, True, 10, 2),  # the first of equals: more of the same is no progress
        ({10: None, 20: None}, True, None, 2),
        ({10: None, 20: 1.0, 30: None}, False, 20, 1),
        ({30: 1.0, 10: 2.0, 20: 0.5}, False, 20, 1),
    ],
)
def test_the_first_best_and_the_evaluations_since(scores: Scores, higher: bool, best: int | None, since: int) -> None:
    assert best_round(scores, higher=higher) == best
    assert evaluations_since_best(scores, higher=higher) == since
