"""Find the right learning rate for each number of subnets.

A plain MLP without norm on Fashion-MNIST, trained whole and as 2, 4 and 8 subnets at several rates of SGD and AdamW,
each subnet as many steps; the loss on held-out data at the end. It runs the code that workers run, without Dask; one
seed.

    python -m benchmarks.learning_rates [--tiny] [--json FILE]

A scaled weight is 1/share times as large in a subnet, and its gradient as large as in the whole network. So a step of
either optimizer is share times as long relative to the weight, and a larger rate may be right for more subnets.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import accuracy
from benchmarks.accuracy import FAMILIES, Family, Row
from benchmarks.report import Figure, at_most, report, with_preset


@dataclass(frozen=True)
class Preset:
    """Sizes of the training."""

    family: Family
    subnets: Sequence[int]
    rates: Mapping[str, Sequence[float]]


FULL = Preset(
    replace(FAMILIES["mlp"], rounds=20),
    (1, 2, 4, 8),
    {"sgd": (0.05, 0.1, 0.2, 0.4, 0.8), "adamw": (5e-4, 1e-3, 2e-3, 4e-3)},
)
TINY = Preset(accuracy.TINY["mlp"], (1, 2), {"sgd": (0.05, 0.1), "adamw": (1e-3,)})
NEAR = 1.02  # a loss this many times the best is as good


def run_one(plan: Preset, optimizer: str, rate: float, subnets: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    row = Row(subnets, {"name": optimizer, "lr": rate}, {})
    _, end = accuracy.simulate(accuracy.job_of(plan.family, row, seed=0))
    print(f"{subnets} subnets, {optimizer} {rate:g}: {end}", flush=True)
    return {"optimizer": optimizer, "rate": rate, "subnets": subnets, "loss": end.loss, "accuracy": end.accuracy}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train at every rate and report the best one of each number of subnets."""
    options, plan = with_preset(__doc__, argv, FULL, TINY)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        futures = [
            pool.submit(run_one, plan, optimizer, rate, subnets)
            for optimizer, rates in plan.rates.items()
            for subnets in plan.subnets
            for rate in rates
        ]
        runs = [future.result() for future in futures]
    return report("learning_rates", options, figures_of(plan, runs), runs=runs)


def figures_of(plan: Preset, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return for every optimizer and number of subnets the best rate, and what the rate that is best whole costs."""
    figures = []
    for optimizer in plan.rates:
        losses = {(run["subnets"], run["rate"]): run["loss"] for run in runs if run["optimizer"] == optimizer}
        best = {n: min(plan.rates[optimizer], key=lambda rate, n=n: losses[n, rate]) for n in plan.subnets}  # type: ignore[misc]
        for n in plan.subnets:
            figures.append(Figure(f"{optimizer}, {n} subnets: best rate", best[n], ""))
            figures.append(Figure(f"{optimizer}, {n} subnets: loss at it", losses[n, best[n]], ""))
            ratio = losses[n, best[1]] / losses[n, best[n]]
            figures.append(
                at_most(f"{optimizer}, {n} subnets: loss at the rate best whole / at its best", ratio, "", NEAR)
            )
    return figures


if __name__ == "__main__":
    main()
