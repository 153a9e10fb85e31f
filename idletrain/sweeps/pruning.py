"""Stop trials early that others are far ahead of: Optuna's successive halving."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Literal

from idletrain.errors import JobError

REDUCTION = 3  # of three trials that came as far, one goes on
HALVINGS = 2


def check_optuna() -> None:
    """Refuse to prune without Optuna.

    Raises:
        JobError: it is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise JobError("--prune: needs Optuna; pip install optuna")


class Halving:
    """Say which trials are to be stopped.

    Args:
        rounds: The rounds of a whole trial.
        better: Which of two values is the better one.

    Raises:
        JobError: Optuna is not installed.
    """

    def __init__(self, rounds: int, better: Literal["higher", "lower"]) -> None:
        check_optuna()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = max(1, rounds // REDUCTION**HALVINGS)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=REDUCTION)
        direction = "maximize" if better == "higher" else "minimize"
        self._study = optuna.create_study(direction=direction, pruner=pruner)
        self._pruned = optuna.trial.TrialState.PRUNED
        self._trials: dict[str, Any] = {}
        self._reported: dict[str, int] = {}  # rounds of each trial's last value

    def report(self, trial: str, rounds: int, value: float) -> bool:
        """Take note of a trial's value after so many rounds; return whether it is to be stopped."""
        known = self._trials.get(trial) or self._trials.setdefault(trial, self._study.ask())
        # An evaluation that was late comes with the last round, as the last one does.
        if math.isfinite(value) and rounds > self._reported.get(trial, 0):
            known.report(value, rounds)
            self._reported[trial] = rounds
        return bool(not math.isfinite(value) or known.should_prune())

    def end(self, trial: str, value: float | None) -> None:
        """Take note of a trial's end with a value, or without one where it was stopped."""
        known = self._trials.pop(trial, None)
        if known is not None:
            self._study.tell(known, value, **({} if value is not None else {"state": self._pruned}))
