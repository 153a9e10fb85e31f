"""Compare a sampled softmax with omikuji and napkinxc, linear tree models for the same task, on the same files.

The peers live in an environment of their own, which `--peers` names (its default is made with
`python -m venv ~/.cache/idletrain/peers-xc; ~/.cache/idletrain/peers-xc/bin/pip install omikuji napkinxc`). Each system
trains once on a set with confusable labels and on centre words, one thread, the peers as they come, ours with the best
of some learning rates on validation rows; P@1 on the same test rows, and seconds of that training, reading the files
included.

    python -m benchmarks.linear_trees [--tiny] [--peers DIR] [--json FILE]

There is no target: the table is for who has to choose.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Figure, at_least, parser, report
from benchmarks.wide_training import (
    POINTS,
    Recipe,
    Sets,
    centre_words,
    confusable,
    make,
    split,
    tuned,
    write_rows,
)
from idletrain import storage
from idletrain.nn.data.extreme import SparseFiles, only

OURS = Recipe("idletrain, uniform 1k", {"name": "uniform", "negatives": 1000})
OMIKUJI = """
import json, sys, time, omikuji
train, test, _ = sys.argv[1:4]
started = time.perf_counter()
settings = omikuji.Model.default_hyper_param()
model = omikuji.Model.train_on_data(train, settings, n_threads=1)
seconds = time.perf_counter() - started
right = total = 0
for line in list(open(test))[1:]:
    names, _, rest = line.partition(" ")
    row = [(int(i), float(v)) for i, v in (pair.split(":") for pair in rest.split())]
    best = model.predict(row, top_k=1)
    right += bool(best) and str(best[0][0]) in names.split(",")
    total += 1
print(json.dumps({"seconds": seconds, "precision": right / total}))
"""
NAPKINXC = """
import json, sys, tempfile, time
from napkinxc.datasets import load_libsvm_file
from napkinxc.models import PLT
from napkinxc.metrics import precision_at_k
started = time.perf_counter()
x, y = load_libsvm_file(sys.argv[1])
tx, ty = load_libsvm_file(sys.argv[2])
with tempfile.TemporaryDirectory() as folder:
    model = PLT(folder, threads=1, verbose=False)
    model.fit(x, y)
    seconds = time.perf_counter() - started
    predicted = model.predict(tx, top_k=1)
print(json.dumps({"seconds": seconds, "precision": float(precision_at_k(ty, predicted, k=1)[0])}))
"""
PEERS = {"omikuji": OMIKUJI, "napkinxc": NAPKINXC}


@dataclass(frozen=True)
class Preset:
    """Sizes and times."""

    labels: int = 30_000
    rows: int = 200_000
    held: int = 2000
    seconds: float = 30.0
    recipe: Recipe = OURS
    rates: tuple[float, ...] = (0.0003, 0.001, 0.005, 0.015, 0.05)
    peer_seconds: float = 900.0


TINY = Preset(100, 800, 100, 0.3, Recipe("idletrain", {"name": "uniform", "negatives": 20}, hidden=16, batch=32))


def peers_of(folder: Path) -> dict[str, Path]:
    """Return the Python of each installed peer."""
    python = folder / "bin" / "python"
    if not python.exists():
        return {}
    exit_codes = {
        name: subprocess.run([python, "-c", f"import {name}"], check=False, capture_output=True).returncode
        for name in PEERS
    }
    return {name: python for name, code in exit_codes.items() if code == 0}


def ask(python: Path, program: str, labels: int, paths: Sequence[Path], patience_seconds: float) -> dict[str, float]:
    """Train and score a peer in its own environment; what it says goes to this process's error output."""
    command = [str(python), "-c", program, *map(str, paths), str(labels)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=patience_seconds)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(name: str, sets: Sets, preset: Preset, peers: dict[str, Path]) -> list[Figure]:
    """Train all systems on one data set."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        paths = [Path(folder) / f"{part}.txt" for part in ("train", "test")]
        for path, samples in zip(paths, (sets.train, sets.test), strict=True):
            write_rows(path, samples)
        before = time.perf_counter()
        make(preset.recipe, SparseFiles((str(paths[0]),)).open(), 0)
        load_seconds = time.perf_counter() - before
        _, _, best_curve, _ = tuned(preset.recipe, preset.rates, sets, [0.0, preset.seconds], 0)
        points = best_curve.points
        figures = [
            Figure(f"{name}: {preset.recipe.name}, step 0", points[0].precision * POINTS, "P@1"),
            Figure(f"{name}: {preset.recipe.name}", points[-1].precision * POINTS, "P@1"),
            Figure(f"{name}: {preset.recipe.name} trains", load_seconds + points[-1].seconds, "s"),
        ]
        for peer, python in peers.items():
            result = ask(python, PEERS[peer], sets.train.census.labels, paths, preset.peer_seconds)
            figures += [
                Figure(f"{name}: {peer}", result["precision"] * POINTS, "P@1"),
                Figure(f"{name}: {peer} trains", result["seconds"], "s"),
            ]
    return figures


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train every system and report."""
    command = parser(__doc__)
    command.add_argument("--peers", help="the environment that the peers are in")
    options = command.parse_args(argv)
    preset = TINY if options.tiny else Preset()
    peers = peers_of(Path(options.peers or storage.cache_folder() / "peers-xc"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = {"confusable": confusable(preset.labels, rows_a_label=max(4, preset.rows // preset.labels))}
    if not options.tiny:
        words_ = centre_words(preset.labels, 1_000_000)
        samples["centre words"] = only(words_, data_rows(len(words_), preset.rows))
    figures = [f for name, s in samples.items() for f in compare(name, split(s, preset.held, 0), preset, peers)]
    figures.append(at_least("peers in the table", len(peers), "", 0 if options.tiny else len(PEERS)))
    torch.set_num_threads(threads)
    return report("linear_trees", options, figures, peers=sorted(peers))


def data_rows(rows: int, wanted: int) -> Any:
    """Return some row numbers, drawn once."""
    return np.sort(np.random.Generator(np.random.Philox(0)).permutation(rows)[:wanted])


if __name__ == "__main__":
    main()
