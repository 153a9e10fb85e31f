"""Check that a network of two billion parameters trains on eight small nodes.

A real run of 100 steps: 135,909 features, hidden 2,560, 670,091 labels, which are the counts of Amazon-670K in the IST
paper (data generated: as many features and labels a row, fewer rows). Hidden units and labels are both partitioned over
eight local workers, so that a worker holds an eighth of the embeddings and a 64th of the output; uniform negatives.
The head holds the network twice while it begins and once from then on (`workflows/amazon-670k-ist.yaml`), beside what
workers pull and push. With less memory the bench refuses to begin. The head's peak is that of this process, which also
makes the data.

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
import psutil
import scipy.sparse

from benchmarks.memory import Watch
from benchmarks.report import Figure, at_most, report, with_preset
from benchmarks.runs import of_kind, run, temporary_job
from benchmarks.wide_training import peak_rss_bytes

GB, MB = 1e9, 1e6
LIBRARY_BYTES = 250_000_000


@dataclass(frozen=True)
class Preset:
    """Sizes; a row's words and labels are Amazon-670K's means."""

    features: int = 135_909
    hidden: int = 2560
    labels: int = 670_091
    rows: int = 40_000
    words: int = 76
    row_labels: int = 5
    batch: int = 256
    local_steps: int = 50
    rounds: int = 2
    workers: int = 8

    @property
    def memory_bytes(self) -> int:
        """Return about what a run takes at most: the network twice, and each worker's libraries and part."""
        network = 4 * self.hidden * (self.features + self.labels)
        part = 4 * self.hidden * (self.features // self.workers + self.labels // self.workers**2)
        return 2 * network + self.workers * (LIBRARY_BYTES + part)


TINY = Preset(300, 16, 500, 400, 5, 2, batch=16, local_steps=5, workers=2)


def generate(preset: Preset, folder: Path) -> list[str]:
    """Write features and labels as CSR files."""
    random, names = np.random.default_rng(0), []
    for name, width, columns in (("x", preset.words, preset.features), ("y", preset.row_labels, preset.labels)):
        entries = random.integers(0, columns, (preset.rows, width))
        matrix = scipy.sparse.csr_matrix(
            (np.ones(entries.size, np.float32), entries.ravel(), np.arange(preset.rows + 1) * width),
            shape=(preset.rows, columns),
        )
        names.append(str(folder / f"{name}.npz"))
        scipy.sparse.save_npz(names[-1], matrix, compressed=False)
    return names


def tree(preset: Preset, files: list[str]) -> dict[str, Any]:
    """Return the job."""
    sizes = {"features": preset.features, "hidden": preset.hidden, "labels": preset.labels}
    sampler = {"name": "uniform", "negatives": min(1000, preset.labels // 4)}
    return {
        "model": {
            "factory": "idletrain.nn.wide.models:wide",
            "args": {**sizes, "sampler": sampler, "start": "random"},
        },
        "data": {"train": files},
        "training": {
            "subnets": preset.workers,
            "local_steps": preset.local_steps,
            "rounds": preset.rounds,
            "batch_size": preset.batch,
            "evaluate_every": preset.rounds,
            "loss": "sampled_softmax",
            "optimizer": {"name": "row-adagrad", "lr": 0.05},
        },
        "preemption": {"progress_every": "30s"},
        "nodes": {"count": preset.workers, "memory": "2900MB"},
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run, watch and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    needed, free = preset.memory_bytes, psutil.virtual_memory().available
    if free < needed:
        raise SystemExit(f"wide_scale: it takes some {needed / GB:.0f} GB of memory, and {free / GB:.0f} are free")
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        files = generate(preset, Path(folder))
        with temporary_job(tree(preset, files)) as job:
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
        Figure("the head's peak memory", peak_rss_bytes() / GB, "GB"),
        Figure("steps of all subnets, rounds and exchange included", steps / seconds, "1/s"),
        Figure("a worker's step", trained / steps * 1000, "ms"),
        Figure("bytes moved a step", moved / steps / MB, "MB"),
    ]
    return report("wide_scale", options, figures, workers=preset.workers, local_steps=preset.local_steps)


if __name__ == "__main__":
    main()
