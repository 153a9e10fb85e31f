"""Draw a run's accuracy over time with its preemptions, from its records alone.

python -m benchmarks.churn_curve runs/fashion-mnist benchmarks/results/churn.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from idletrain.observe.summary import Summary, summarise

mpl.use("svg")
from matplotlib import pyplot as plt  # after the backend: there may be no screen

COLOURS = {"notice": "#d98e04", "kill": "#c0392b"}
LABELS = {"notice": "taken with notice", "kill": "killed"}


def draw(summary: Summary, to: Path) -> None:
    """Write the picture."""
    figure, axes = plt.subplots(figsize=(8, 3.2))
    points = [(point.seconds, point.accuracy) for point in summary.curve if point.accuracy is not None]
    axes.plot(*zip(*points, strict=True), marker="o", color="#1f6f8b", label="accuracy on the test set")
    for cause, colour in COLOURS.items():
        times = [preemption.seconds for preemption in summary.preempted if preemption.cause == cause]
        for k, seconds in enumerate(times):
            axes.axvline(seconds, color=colour, alpha=0.7, linewidth=1, label=None if k else LABELS[cause])
    axes.set_xlabel("seconds")
    axes.set_ylabel("accuracy")
    axes.set_title(f"{summary.run}: {summary.rounds} rounds, {len(summary.preempted)} workers taken", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str]) -> None:
    """Draw the run in `argv[0]` to the file `argv[1]`."""
    draw(summarise(Path(argv[0]) / "events.jsonl"), Path(argv[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
