"""What a training gives back is shown in one line, and as curves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from idletrain.errors import RunError
from idletrain.fit_result import FitResult

RECORDS: tuple[dict[str, Any], ...] = (
    {"kind": "round_committed", "round": 0, "loss": 2.0},
    {"kind": "evaluated", "round": 1, "loss": 1.5, "accuracy": 0.5, "metrics": {"f1": 0.25}},
    {"kind": "round_committed", "round": 1, "loss": None},
    {"kind": "round_committed", "round": 2, "loss": 1.0},
    {"kind": "evaluated", "round": 3, "loss": 1.25, "accuracy": None},
)


def result(records: tuple[dict[str, Any], ...] = RECORDS, rounds: int = 7, **scores: float) -> FitResult:
    summary = {"accuracy": 0.98765, "loss": None, "train_loss": 0.25, "rounds": rounds, **scores}
    return FitResult(nn.Linear(2, 2), records, summary, Path("runs/fit"), 7)


def test_it_is_shown_in_one_line() -> None:
    assert repr(result()) == "FitResult(Linear, 7 rounds, accuracy 0.9877, train_loss 0.25, runs/fit)"
    assert ", loss 0.5, constant_loss 2.3, train_loss 0.25, " in repr(result(loss=0.5, constant_loss=2.3))
    assert repr(result(rounds=9)) == "FitResult(Linear, 7 rounds, accuracy 0.9877, runs/fit)"  # the best of nine


def test_curves_are_values_over_rounds_without_those_that_are_none() -> None:
    assert result().curves() == {
        "train_loss": [(1, 2.0), (3, 1.0)],
        "loss": [(1, 1.5), (3, 1.25)],
        "accuracy": [(1, 0.5)],
        "f1": [(1, 0.25)],
    }
    assert result(()).curves() == {}


def test_a_plot_has_the_losses_together_and_each_other_curve_for_itself() -> None:
    figure = result().plot()
    drawn = [[line.get_label() for line in axes.get_lines()] for axes in figure.axes]
    assert drawn == [["train loss", "test loss"], ["accuracy"], ["f1"]]
    assert list(figure.axes[0].get_lines()[0].get_xdata()) == [1, 3]
    assert len(result(()).plot().axes) == 1


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RunError, match="plot needs matplotlib; pip install matplotlib"):
        result().plot()
