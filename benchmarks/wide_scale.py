"""Does a network of 0.8 billion parameters train on four small nodes?

A real run: 135,909 features, hidden 1,024, 670,091 labels, which are Amazon-670K's counts (data generated: as many
features and labels a row, fewer rows). Hidden units and labels are both partitioned over four local workers, so that a
worker holds a quarter of the embeddings and a sixteenth of the output; uniform negatives.

    python -m benchmarks.wide_scale [--tiny] [--json FILE]

Target: each worker's peak resident memory below 3 GB; steps per second are reported.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.memory import Watch
from benchmarks.report import Figure, arguments, at_most, report
from benchmarks.runs import of_kind, run, temporary_job

GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Plan:
    """Sizes; a row's words and labels are Amazon-670K's means."""

    features: int = 135_909
    hidden: int = 1024
    labels: int = 670_091
    rows: int = 40_000
    words: int = 76
    row_labels: int = 5
    batch: int = 256
    local_steps: int = 50
    rounds: int = 2
    workers: int = 4


TINY = Plan(300, 16, 500, 400, 5, 2, batch=16, local_steps=5, workers=2)


def generate(plan: Plan, folder: Path) -> list[str]:
    """Features and labels as CSR files."""
    random, names = np.random.default_rng(0), []
    for name, width, columns in (("x", plan.words, plan.features), ("y", plan.row_labels, plan.labels)):
        entries = random.integers(0, columns, (plan.rows, width))
        matrix = scipy.sparse.csr_matrix(
            (np.ones(entries.size, np.float32), entries.ravel(), np.arange(plan.rows + 1) * width),
            shape=(plan.rows, columns),
        )
        names.append(str(folder / f"{name}.npz"))
        scipy.sparse.save_npz(names[-1], matrix, compressed=False)
    return names


def tree(plan: Plan, files: list[str]) -> dict[str, Any]:
    """The job."""
    sizes = {"features": plan.features, "hidden": plan.hidden, "labels": plan.labels}
    sampler = {"name": "uniform", "negatives": min(1000, plan.labels // 4)}
    return {
        "model": {
            "factory": "idletrain.nn.wide.models:wide",
            "args": {**sizes, "sampler": sampler, "start": "random"},
        },
        "data": {"train": files},
        "training": {
            "subnets": plan.workers,
            "local_steps": plan.local_steps,
            "rounds": plan.rounds,
            "batch_size": plan.batch,
            "evaluate_every": plan.rounds,
            "loss": "sampled_softmax",
            "optimizer": {"name": "adagrad", "lr": 0.05},
        },
        "preemption": {"progress_every": "30s"},
        "nodes": {"count": plan.workers, "memory": "2900MB"},
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, watch and report."""
    options = arguments(__doc__, argv)
    plan = TINY if options.tiny else Plan()
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        files = generate(plan, Path(folder))
        with temporary_job(tree(plan, files)) as job:
            events = asyncio.run(run(job, [watch]))
    (started,) = of_kind(events, "run_started")
    commits = of_kind(events, "round_committed")
    steps, seconds = sum(c["steps"] for c in commits), sum(c["seconds"] for c in commits)
    trained = sum(e["train_seconds"] for e in of_kind(events, "staged"))
    peaks = [peak / GB for peak in watch.peak.values()]
    moved = sum(c["bytes_down"] + c["bytes_up"] for c in commits)
    figures = [
        Figure("parameters", started["parameters"] / MB, "million"),
        at_most("a worker's peak memory", max(peaks), "GB", 3.0, peaks),
        Figure("steps of all subnets, rounds and exchange included", steps / seconds, "1/s"),
        Figure("a worker's step", trained / steps * 1000, "ms"),
        Figure("bytes moved a step", moved / steps / MB, "MB"),
    ]
    return report("wide_scale", options, figures, workers=plan.workers, local_steps=plan.local_steps)


if __name__ == "__main__":
    main()
