"""Compare what a network learns without rounds (`preemption.policy: rolling`) with what it learns in rounds.

The families of `accuracy`, each trained in rounds of six subnets, and in four lanes whose subnets are as wide, as the
default slack leaves a third of the neurons free. Both end once a neuron has had as many steps on average; so do four
lanes of wider subnets, with less slack. It runs the code that workers run, without Dask, with lanes that commit in
turn; three seeds.

    python -m benchmarks.rolling [--tiny] [--only FAMILY ...] [--json FILE]

Targets: an accuracy at most 0.2 points lower, and of what has no classes a loss at most 2 % higher.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import accuracy
from benchmarks.accuracy import POINTS, Family, Row
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_least, at_most, parser, report
from idletrain.nn import alone
from idletrain.nn.network import Network
from idletrain.nn.prepare import from_settings

SUBNETS, LANES, SEEDS = 6, 4, (0, 1, 2)  # 4 lanes with a slack of a half hold as much each as 6 subnets
FEWER_POINTS, MORE_LOSS = 0.2, 1.02
SLACKS = {"rolling": 0.5, "rolling, slack 0.25": 0.25, "rolling, slack 0.1": 0.1}
POLICIES = ("reissue", *SLACKS)


def run_one(name: str, family: Family, policy: str, seed: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    optimizer = next(row.optimizer for row in family.rows if row.subnets > 1)
    job = accuracy.job_of(family, Row(LANES if policy in SLACKS else SUBNETS, optimizer, {}), seed)
    training = job.training.model_copy(update={"slack": SLACKS.get(policy, job.training.slack)})
    prepared = from_settings(job.model, job.data, training)
    program, network = prepared.program, Network.of(prepared.program, prepared.network)
    if policy in SLACKS:
        alone.train_rolling(program, network, program.source.open())
    else:
        alone.train_rounds(program, network, program.source.open(), program.training.rounds)
    end = accuracy.held_out_score(prepared, network, seed)
    print(f"{name}, {policy}, seed {seed}: {end}", flush=True)
    run = {"family": name, "policy": policy, "seed": seed}
    return {**run, "loss": end.loss, "accuracy": end.accuracy, "ece": end.calibration_error}


def figures_of(name: str, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return a family's figures."""
    figures, losses, accuracies = [], {}, {}
    for policy in POLICIES:
        own = [run for run in runs if run["policy"] == policy]
        found = [run["loss"] for run in own]
        losses[policy], what = statistics.mean(found), f"{name}, {policy}"
        figures.append(Figure(f"{what}: loss", losses[policy], "", samples=found))
        if own[0]["accuracy"] is not None:
            points = [POINTS * run["accuracy"] for run in own]
            accuracies[policy] = statistics.mean(points)
            calibration = statistics.mean(run["ece"] for run in own)
            figures.append(Figure(f"{what}: accuracy", accuracies[policy], "%", samples=points))
            figures.append(Figure(f"{what}: calibration error", calibration, ""))
    ratio = losses["rolling"] / losses["reissue"]
    if not accuracies:
        return [*figures, at_most(f"{name}: loss of rolling / reissue", ratio, "", MORE_LOSS)]
    more = accuracies["rolling"] - accuracies["reissue"]
    return [
        *figures,
        Figure(f"{name}: loss of rolling / reissue", ratio, ""),
        at_least(f"{name}: accuracy of rolling - reissue", more, "points", -FEWER_POINTS),
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    command = parser(__doc__)
    names = accuracy.FAMILIES
    command.add_argument("--only", nargs="+", choices=names, metavar="FAMILY", help=", ".join(names))
    options = command.parse_args(argv)
    families = accuracy.TINY if options.tiny else accuracy.available(options.only or names)
    calls = (
        (name, family, policy, seed)
        for seed in (SEEDS[:1] if options.tiny else SEEDS)
        for name, family in families.items()
        for policy in POLICIES
    )
    runs = call_all(run_one, calls, tiny=options.tiny)
    figures = [figure for name in families for figure in figures_of(name, [r for r in runs if r["family"] == name])]
    return report("rolling", options, figures, runs=runs)


if __name__ == "__main__":
    main()
