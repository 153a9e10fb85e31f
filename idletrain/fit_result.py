"""The result of `idletrain.fit`: the trained module, and what happened on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from idletrain.errors import RunError
from idletrain.observe.records import Record

SHOWN_SCORES = ("accuracy", "loss", "constant_loss", "train_loss")  # in one line; the last one is the last round's
FIGURE_INCHES = 4.0  # width and height of each curve


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of a training.

    Attributes:
        module: The trained module, in evaluation mode, in the number formats of the one given, its BatchNorm statistics
            estimated: the best one if `stop` says what tells it (`{"patience": 3}`, `{"metric": "accuracy"}`), else the
            last one.
        records: Every event of the run, in order (their fields are documented in `idletrain.observe.records`).
        summary: Totals of the events: goodput, preemptions, `params_sha256`, ...; `accuracy`, `loss` and `metrics` are
            those of `module`.
        run_dir: The directory that holds the run's durable state.
        rounds: The rounds after which the module was so.
    """

    module: nn.Module
    records: tuple[Record, ...]
    summary: Mapping[str, Any]
    run_dir: Path
    rounds: int

    def __repr__(self) -> str:
        """Return one line: a notebook shows the result of its last call."""
        names = SHOWN_SCORES if self.rounds == self.summary["rounds"] else SHOWN_SCORES[:-1]
        scores = [f"{name} {self.summary[name]:.4g}" for name in names if self.summary.get(name) is not None]
        told = ", ".join([f"{self.rounds} rounds", *scores, str(self.run_dir)])
        return f"FitResult({type(self.module).__name__}, {told})"

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return by name the training loss of the rounds, and the test loss, the accuracy and the metrics of the
        evaluations: pairs of the round, from 1 on, and the value.
        """
        found: dict[str, list[tuple[int, float]]] = {}
        for event in self.records:
            values: dict[str, Any] = {}
            if event["kind"] == "round_committed":
                values, rounds = {"train_loss": event.get("loss")}, event["round"] + 1
            elif event["kind"] == "evaluated":
                scores = {name: event[name] for name in ("loss", "accuracy")}
                values, rounds = {**scores, **event.get("metrics", {})}, event["round"]
            for name, value in values.items():
                if value is not None:
                    found.setdefault(name, []).append((rounds, value))
        return found

    def plot(self) -> Any:
        """Draw the curves over rounds: the losses together, and each other value for itself.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows.

        Raises:
            RunError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise RunError("plot needs matplotlib; pip install matplotlib") from None
        curves = self.curves()
        losses = [name for name in curves if name in ("train_loss", "loss")]
        panels = [losses, *([name] for name in curves if name not in losses)] if losses else [[name] for name in curves]
        figure = Figure(figsize=(FIGURE_INCHES * max(1, len(panels)), FIGURE_INCHES), layout="constrained")
        for axes, names in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=False):
            for name in names:
                axes.plot(
                    *zip(*curves[name], strict=True), label={"loss": "test loss"}.get(name, name.replace("_", " "))
                )
            axes.set_xlabel("rounds")
            axes.legend()
        return figure
