"""Find the right learning rate for each number of subnets.

A plain MLP without norm on Fashion-MNIST and a pre-LN transformer on text, trained whole and as 2, 4 and 8 subnets at
several rates of SGD and AdamW that rise and fall as most people let them, each subnet as many steps; the loss on
held-out data at the end. It runs the code that workers run, without Dask; one seed.

    python -m benchmarks.learning_rates [--tiny] [--only FAMILY ...] [--json FILE]

Without the factors of `nn.rate_factors` another rate is right for each number of subnets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import accuracy
from benchmarks.accuracy import FAMILIES, Family, Row
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_most, parser, report


@dataclass(frozen=True)
class Sweep:
    """A family, and the numbers of subnets and learning rates to train it with."""

    family: Family
    subnets: Sequence[int]
    rates: Mapping[str, Sequence[float]]


FULL = {
    "mlp": Sweep(
        replace(FAMILIES["mlp"], rounds=20),
        (1, 2, 4, 8),
        {"sgd": (0.05, 0.1, 0.2, 0.4, 0.8), "adamw": (5e-4, 1e-3, 2e-3, 4e-3)},
    ),
    "pre-LN transformer": Sweep(
        replace(FAMILIES["pre-LN transformer"], rounds=10), (1, 2, 4, 8), {"adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
    ),
}
TINY = {"mlp": Sweep(accuracy.TINY["mlp"], (1, 2), {"sgd": (0.05, 0.1), "adamw": (1e-3,)})}
SCHEDULE = {"schedule": "cosine", "warmup_steps": 50}
NEAR = 1.02  # a loss this many times the best is as good


def run_one(name: str, family: Family, optimizer: str, rate: float, subnets: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    row = Row(subnets, {"name": optimizer, "lr": rate, **SCHEDULE}, {})
    _, end = accuracy.simulate(accuracy.job_of(family, row, seed=0))
    print(f"{name}, {subnets} subnets, {optimizer} {rate:g}: {end}", flush=True)
    result = {"family": name, "optimizer": optimizer, "rate": rate, "subnets": subnets}
    return {**result, "loss": end.loss, "accuracy": end.accuracy}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train at every rate and report the best one of each number of subnets."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", choices=FULL, metavar="FAMILY", help=", ".join(FULL))
    options = command.parse_args(argv)
    sweeps = TINY if options.tiny else {name: FULL[name] for name in accuracy.available(options.only or FULL)}
    calls = (
        (name, sweep.family, optimizer, rate, subnets)
        for name, sweep in sweeps.items()
        for optimizer, rates in sweep.rates.items()
        for subnets in sweep.subnets
        for rate in rates
    )
    runs = call_all(run_one, calls, tiny=options.tiny)
    figures = [figure for name, sweep in sweeps.items() for figure in figures_of(name, sweep, runs)]
    return report("learning_rates", options, figures, runs=runs)


def figures_of(name: str, sweep: Sweep, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return for every optimizer and number of subnets the best rate, and what the rate that is best whole costs."""
    figures = []
    for optimizer in sweep.rates:
        own = [run for run in runs if (run["family"], run["optimizer"]) == (name, optimizer)]
        losses = {(run["subnets"], run["rate"]): run["loss"] for run in own}
        best = {n: min(sweep.rates[optimizer], key=lambda rate, n=n: losses[n, rate]) for n in sweep.subnets}  # type: ignore[misc]
        for n in sweep.subnets:
            what = f"{name}, {optimizer}, {n} subnets"
            figures.append(Figure(f"{what}: best rate", best[n], ""))
            figures.append(Figure(f"{what}: loss at it", losses[n, best[n]], ""))
            ratio = losses[n, best[1]] / losses[n, best[n]]
            figures.append(at_most(f"{what}: loss at the rate best whole / at its best", ratio, "", NEAR))
    return figures


if __name__ == "__main__":
    main()
