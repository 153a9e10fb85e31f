"""Compare the optimizer's defaults in subnets with their alternatives: kept or reset state, warm-up, local steps.

A plain MLP on Fashion-MNIST and a pre-LN transformer on text, as four subnets, which take as many steps each in all of
them; two seeds, one learning rate an optimizer. It runs the code that workers run, without Dask.

    python -m benchmarks.defaults [--tiny] [--json FILE]

Target: no alternative has a loss more than 2 % lower than the default's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import accuracy
from benchmarks.accuracy import ADAMW, MOMENTUM, Family, Row
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_most, parser, report
from idletrain.nn import alone
from idletrain.nn.network import Network
from idletrain.nn.prepare import from_settings

SUBNETS, SEEDS = 4, (0, 1)
WORSE = 0.02
DEFAULT = "default"
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {"sgd with momentum": MOMENTUM, "adamw": ADAMW}
FAMILIES = {
    "MLP": (replace(accuracy.FAMILIES["mlp"], rounds=12), ("sgd with momentum", "adamw")),
    "pre-LN transformer": (replace(accuracy.FAMILIES["pre-LN transformer"], rounds=8), ("adamw",)),
}
TINY = {"MLP": (replace(accuracy.TINY["mlp"], local_steps=20, rounds=4), ("sgd with momentum",))}
# What differs from the default: settings of the optimizer, and how many times as many local steps a round has.
ALTERNATIVES: Mapping[str, tuple[Mapping[str, Any], float]] = {
    DEFAULT: ({}, 1),
    "state reset": ({"state": "reset"}, 1),
    "50 warm-up steps": ({"warmup_steps": 50}, 1),
    "half of the local steps": ({}, 0.5),
    "a fifth of the local steps": ({}, 0.2),
    "four times the local steps": ({}, 4),
}


def run_one(name: str, family: Family, optimizer: str, alternative: str, seed: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    changes, longer = ALTERNATIVES[alternative]
    family = replace(family, local_steps=round(family.local_steps * longer), rounds=round(family.rounds / longer))
    job = accuracy.job_of(family, Row(SUBNETS, {**OPTIMIZERS[optimizer], **changes}, {}), seed)
    prepared = from_settings(job.model, job.data, job.training)
    program, network = prepared.program, Network.of(prepared.program, prepared.network)
    alone.train_rounds(program, network, program.source.open(), program.training.rounds)
    end = accuracy.held_out_score(prepared, network, seed)
    print(f"{name}, {optimizer}, {alternative}, seed {seed}: {end}", flush=True)
    run = {"family": name, "optimizer": optimizer, "alternative": alternative, "seed": seed}
    return {**run, "loss": end.loss, "accuracy": end.accuracy, "ece": end.calibration_error}


def figures_of(name: str, optimizer: str, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return a family's figures with an optimizer."""
    figures, losses = [], {}
    for alternative in ALTERNATIVES:
        own = [run for run in runs if run["alternative"] == alternative]
        found = [run["loss"] for run in own]
        losses[alternative], what = statistics.mean(found), f"{name}, {optimizer}, {alternative}"
        figures += [
            Figure(f"{what}: loss", losses[alternative], "", samples=found),
            Figure(f"{what}: accuracy", 100 * statistics.mean(run["accuracy"] for run in own), "%"),
            Figure(f"{what}: calibration error", statistics.mean(run["ece"] for run in own), ""),
        ]
    ratio = losses[DEFAULT] / min(losses.values())
    figures.append(at_most(f"{name}, {optimizer}: loss by default / at its best", ratio, "", 1 + WORSE))
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    options = parser(__doc__).parse_args(argv)
    families, seeds = (TINY, SEEDS[:1]) if options.tiny else (FAMILIES, SEEDS)
    calls = (
        (name, family, optimizer, alternative, seed)
        for seed in seeds
        for name, (family, optimizers) in families.items()
        for optimizer in optimizers
        for alternative in ALTERNATIVES
    )
    runs = call_all(run_one, calls, tiny=options.tiny)
    figures = [
        figure
        for name, (_, optimizers) in families.items()
        for optimizer in optimizers
        for figure in figures_of(
            name, optimizer, [run for run in runs if (run["family"], run["optimizer"]) == (name, optimizer)]
        )
    ]
    return report("defaults", options, figures, runs=runs)


if __name__ == "__main__":
    main()
