"""Measure the cost of a step as labels grow, the share of time for rebuilding tables, and memory.

Steps of a batch of 256 with 1,000 to 1,300 active labels, hidden 64, at 10,000, 100,000 and 1,000,000 labels, each in a
process of its own; one thread. Tables are rebuilt every 500 steps, as a job of so many local steps does, and once more
as often as the layer does by itself (SLIDE's 50).

    python -m benchmarks.label_cost [--tiny] [--json FILE]

Targets: a step takes at most 1.5 times as long for 10 times the labels; rebuilds below 10 % of the time; peak resident
memory at most 1.3 times parameters and optimizer state, beside what the interpreter and torch take.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.report import Figure, at_most, report, with_preset
from benchmarks.wide_training import Recipe, make, peak_rss_bytes, samples_of, steps
from idletrain.nn.data.csr import Csr
from idletrain.nn.data.extreme import SparseSamples
from idletrain.nn.wide.layers import SLIDE_REBUILD

SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"name": "uniform", "negatives": 1000},
    "simhash": {"name": "simhash", "negatives": 256},
    "simhash, 16 tables": {"name": "simhash", "tables": 16, "negatives": 256},
    "inverted-file": {"name": "inverted-file", "negatives": 512},
}
OFTEN = "simhash, 16 tables"  # whose share of rebuilds is reported for SLIDE's interval, too


@dataclass(frozen=True)
class Preset:
    """Sizes."""

    labels: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    features: int = 50_000
    rows: int = 100_000
    words: int = 40
    hidden: int = 64
    batch: int = 256
    steps: int = 500
    rebuild_every: int = 500


TINY = Preset((100, 1000), features=100, rows=200, words=4, hidden=8, batch=16, steps=6, rebuild_every=3)


def rows_of(preset: Preset, labels: int) -> SparseSamples:
    """Return random rows with a label each."""
    random = np.random.default_rng(0)
    columns = np.sort(random.integers(0, preset.features, (preset.rows, preset.words)), axis=1).astype(np.int32)
    x = Csr(np.arange(preset.rows + 1) * preset.words, columns.ravel(), np.ones(columns.size, np.float32))
    y = Csr(np.arange(preset.rows + 1), random.integers(0, labels, preset.rows).astype(np.int32))
    return samples_of(x, y, preset.features, labels)


def measure(preset: Preset, sampler: str, labels: int) -> dict[str, float]:
    """Return milliseconds a step, the share of rebuilds, and memory over parameters and state."""
    torch.set_num_threads(1)
    recipe = Recipe(sampler, SAMPLERS[sampler], 0.05, "random", preset.hidden, preset.batch, preset.rebuild_every)
    few, train = rows_of(preset, preset.labels[0]), rows_of(preset, labels)
    next(steps(make(recipe, few, 0), recipe, few, 0))  # what torch and compiled loops take whatever there is to train
    before = psutil.Process().memory_info().rss
    network = make(recipe, train, 0)
    stepping = steps(network, recipe, train, 0)
    warm = next(stepping)
    times, rebuilt = [], warm
    for _ in range(preset.steps):  # the last of them is the first behind a rebuild
        started, before_it = time.perf_counter(), rebuilt
        rebuilt = next(stepping)
        times.append(time.perf_counter() - started - (rebuilt - before_it))
    parameters = sum(p.nbytes + 4 * len(p) for p in network.parameters())
    rebuilding = rebuilt - warm
    return {
        "ms": statistics.median(times) * 1000,
        "rebuilds": rebuilding / (sum(times) + rebuilding),
        "memory": (peak_rss_bytes() - before) / parameters,
    }


def in_a_process(preset: Preset, sampler: str, labels: int) -> dict[str, float]:
    """Measure in a process whose memory is its own."""
    arguments = json.dumps([asdict(preset), sampler, labels])
    command = [sys.executable, "-m", "benchmarks.label_cost", "--measure", arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    figures: list[Figure] = []
    by_sampler = {}
    for sampler in ("uniform",) if options.tiny else SAMPLERS:
        by_sampler[sampler] = results = {labels: in_a_process(preset, sampler, labels) for labels in preset.labels}
        for few, many in itertools.pairwise(preset.labels):
            growth = results[many]["ms"] / results[few]["ms"]
            figures.append(at_most(f"{sampler}: a step at {many:,} labels / at {few:,}", growth, "", 1.5))
        most = results[preset.labels[-1]]
        figures.append(Figure(f"{sampler}: a step at {preset.labels[-1]:,} labels", most["ms"], "ms"))
        figures.append(at_most(f"{sampler}: rebuilds' share of the time", most["rebuilds"], "", 0.1))
        figures.append(at_most(f"{sampler}: peak memory / parameters and state", most["memory"], "", 1.3))
    if not options.tiny:
        often = in_a_process(replace(preset, rebuild_every=SLIDE_REBUILD), OFTEN, preset.labels[-1])
        what = f"{OFTEN}: rebuilds' share of the time, every {SLIDE_REBUILD} steps"
        figures.append(Figure(what, often["rebuilds"], ""))
    return report("label_cost", options, figures, results=by_sampler)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        sizes, name, count = json.loads(sys.argv[2])
        print(json.dumps(measure(Preset(**sizes), name, count)))
    else:
        main()
