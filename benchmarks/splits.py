"""Compare splits of a network: by its neurons, by its residual blocks, and by both.

Two residual networks of six blocks, a pre-LN transformer on text and an MLP on Fashion-MNIST, are trained whole, and as
four subnets that have each neuron or block once or twice. All take as many steps a subnet, at one learning rate.
Reported are held-out losses, as means of three seeds, and the share of the parameters that a subnet holds. It runs the
code that workers run, without Dask.

    python -m benchmarks.splits [--tiny] [--json FILE]

It needs the Debian package dict-gcide for text. Target: the default split, by neurons, is within 2 % of the best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy import held_out_score
from benchmarks.cores import call_all
from benchmarks.report import Figure, at_most, parser, report
from idletrain.job_file import parse_job
from idletrain.nn import alone
from idletrain.nn.network import Network
from idletrain.nn.prepare import Prepared, from_settings

SPLITS, COPIES = ("neurons", "blocks", "both"), (1, 2)
SUBNETS, SEEDS, WORSE = 4, (0, 1, 2), 0.02


@dataclass(frozen=True)
class Family:
    """A model, its data and how it is trained."""

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    training: Mapping[str, Any]


_TEXT = {"factory": "benchmarks.accuracy:bytes_of_text"}
FAMILIES = {
    "pre-LN transformer": Family(
        {
            "factory": "idletrain.nn.models:transformer",
            "args": {"vocabulary": 128, "context": 64, "width": 64, "heads": 4, "hidden": 256, "blocks": 6},
        },
        _TEXT, {"batch_size": 32, "local_steps": 25, "rounds": 12, "optimizer": {"name": "adamw", "lr": 0.002}},
    ),
    "residual MLP": Family(
        {"factory": "benchmarks.splits:residual_mlp", "args": {"inputs": 784, "width": 128, "blocks": 6}},
        {"name": "fashion-mnist"},
        {"batch_size": 128, "local_steps": 25, "rounds": 30, "optimizer": {"name": "adamw", "lr": 0.001}},
    ),
}  # fmt: skip
TINY = {
    "residual MLP": Family(
        {"factory": "benchmarks.splits:residual_mlp", "args": {"inputs": 64, "width": 16, "blocks": 6}},
        {"name": "digits"},
        {"batch_size": 32, "local_steps": 5, "rounds": 4, "optimizer": {"name": "adamw", "lr": 0.01}},
    )
}


class ResidualBlock(nn.Module):
    """Add to a hidden state `[N, width]` what two layers make of it, normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden state with its change."""
        changed: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return changed


def residual_mlp(inputs: int, width: int, blocks: int) -> nn.Module:
    """Build a network of residual blocks for samples `[N, ...]` of as many values as inputs, of ten classes."""
    body = [ResidualBlock(width) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *body, nn.LayerNorm(width), nn.Linear(width, 10))


def ways() -> list[tuple[str, int]]:
    """Return the splits with their copies, the whole network first."""
    return [("whole", 1), *((split, copies) for copies in COPIES for split in SPLITS)]


def prepared(family: Family, split: str, copies: int, seed: int) -> Prepared:
    """Return a family's network and data, divided so."""
    divided = {"method": "ist", "subnets": SUBNETS, "copies": copies}
    training = {
        **family.training,
        "seed": seed,
        **({"method": "local-sgd", "subnets": 1} if split == "whole" else divided),
    }
    model = {**family.model, **({} if split == "whole" else {"split": split})}
    job = parse_job({"name": "splits", "model": model, "data": dict(family.data), "training": training})
    return from_settings(job.model, job.data, job.training)


def run_one(name: str, family: Family, split: str, copies: int, seed: int) -> dict[str, Any]:
    """Train once on one thread, in a process of its own."""
    torch.set_num_threads(1)
    made = prepared(family, split, copies, seed)
    program, network = made.program, Network.of(made.program, made.network)
    alone.train_rounds(program, network, program.source.open(), program.training.rounds)
    phase = program.training.phase(0)
    subnets = program.subnets(0, program.specs(phase.equal_shares, phase.copies))
    share = max(subnet.parameters for subnet in subnets) / sum(math.prod(t.shape) for t in program.layout.tensors)
    end = held_out_score(made, network, seed)
    print(f"{name}, {split}, copies {copies}, seed {seed}: {end}", flush=True)
    way = {"family": name, "split": split, "copies": copies, "seed": seed}
    return {**way, "loss": end.loss, "accuracy": end.accuracy, "ece": end.calibration_error, "share": share}


def figures_of(name: str, runs: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return a family's figures."""
    figures, losses = [], {}
    for split, copies in ways():
        own = [run for run in runs if (run["family"], run["split"], run["copies"]) == (name, split, copies)]
        what = f"{name}, whole" if split == "whole" else f"{name}, {split}, copies {copies}"
        found = [run["loss"] for run in own]
        losses[split, copies] = statistics.mean(found)
        figures += [
            Figure(f"{what}: loss", losses[split, copies], "", samples=found),
            Figure(f"{what}: accuracy", 100 * statistics.mean(run["accuracy"] for run in own), "%"),
            Figure(f"{what}: calibration error", statistics.mean(run["ece"] for run in own), ""),
            Figure(f"{what}: a subnet's parameters / whole", own[0]["share"], ""),
        ]
    for copies in COPIES:
        ratio = losses["neurons", copies] / min(losses[split, copies] for split in SPLITS)
        figures.append(at_most(f"{name}, copies {copies}: loss by neurons / by the best split", ratio, "", 1 + WORSE))
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, compare and report."""
    options = parser(__doc__).parse_args(argv)
    families, seeds = (TINY, SEEDS[:1]) if options.tiny else (FAMILIES, SEEDS)
    calls = (
        (name, family, split, copies, seed)
        for name, family in families.items()
        for seed in seeds
        for split, copies in ways()
    )
    runs = call_all(run_one, calls, tiny=options.tiny)
    figures = [figure for name in families for figure in figures_of(name, runs)]
    return report("splits", options, figures, runs=runs)


if __name__ == "__main__":
    main()
