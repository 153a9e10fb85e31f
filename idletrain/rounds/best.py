"""Find the evaluation with the best network, and count those since: pure functions of the scores by round."""

from __future__ import annotations

from collections.abc import Mapping

Scores = Mapping[int, float | None]  # by the number of committed rounds; None where the score is no number


def best_round(scores: Scores, *, higher: bool) -> int | None:
    """Return the first round with the best score; None if no score is a number.

    Args:
        scores: The scores.
        higher: Whether a higher score is better than a lower one.
    """
    known = {round_: score for round_, score in scores.items() if score is not None}
    if not known:
        return None
    best = max(known.values()) if higher else min(known.values())
    return min(round_ for round_, score in known.items() if score == best)


def evaluations_since_best(scores: Scores, *, higher: bool) -> int:
    """Count the evaluations after the best one; all of them if none has a number."""
    best = best_round(scores, higher=higher)
    return len(scores) if best is None else sum(round_ > best for round_ in scores)
