"""Compare a sampled softmax with omikuji and napkinxc, linear tree models for the same task, on the same files.

The peers live in an environment of their own, which `--peers` names (its default is made with
`python -m venv ~/.cache/idletrain/peers-xc; ~/.cache/idletrain/peers-xc/bin/pip install omikuji napkinxc`). Each system
trains once on each set, one thread, the peers as they come, ours as long as each peer did, with the best of some
learning rates on validation rows; P@1 on the same test rows, and seconds of training, reading the files included. The
sets: confusable labels, centre words, and headwords, of which most have one to three short texts, weighted by tf-idf;
of those many are for held-out rows alone, which nothing can get right. The whole takes an hour, headwords half of it.

    python -m benchmarks.linear_trees [--tiny] [--only headwords] [--peers DIR] [--json FILE]

Target: ahead of both peers on headwords. For the others the table is for who has to choose.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
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
    headwords,
    make,
    split,
    steps,
    tuned,
    write_rows,
)
from idletrain import storage
from idletrain.nn.data.extreme import SparseFiles, SparseSamples, only

UNIFORM = {"name": "uniform", "negatives": 1000}
OURS = Recipe("idletrain, hidden 128", UNIFORM), Recipe("idletrain, hidden 512", UNIFORM, hidden=512)
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
    """Sizes and times.

    Attributes:
        seconds: How long ours trains if there is no peer.
    """

    labels: int = 30_000
    rows: int = 200_000
    held: int = 2000
    held_headwords: int = 5000
    seconds: float = 30.0
    recipes: tuple[Recipe, ...] = OURS
    rates: tuple[float, ...] = (0.001, 0.005, 0.02, 0.05)
    peer_seconds: float = 900.0


TINY_RECIPE = Recipe("idletrain, hidden 16", {"name": "uniform", "negatives": 20}, hidden=16, batch=32)
TINY = Preset(100, 800, 100, seconds=0.3, recipes=(TINY_RECIPE,))


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
    """Train all systems on one data set, the peers first: ours trains as long as they did."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        paths = [Path(folder) / f"{part}.txt" for part in ("train", "test")]
        for path, samples in zip(paths, (sets.train, sets.test), strict=True):
            write_rows(path, samples)
        results = {
            peer: ask(python, PEERS[peer], sets.train.census.labels, paths, preset.peer_seconds)
            for peer, python in peers.items()
        }
        figures = []
        for peer, result in results.items():
            figures.append(Figure(f"{name}: {peer}", result["precision"] * POINTS, "P@1"))
            figures.append(Figure(f"{name}: {peer} trains", result["seconds"], "s"))
        before = time.perf_counter()
        rows = SparseFiles((str(paths[0]),)).open()
        read_seconds = time.perf_counter() - before
        for recipe in preset.recipes:
            before = time.perf_counter()
            network = make(recipe, rows, 0)
            load_seconds = read_seconds + time.perf_counter() - before
            next(steps(network, recipe, sets.train, 0))  # loops are compiled once a machine, not once a training
            figures += against(name, recipe, sets, preset, results, load_seconds)
    return figures


def against(
    name: str, recipe: Recipe, sets: Sets, preset: Preset, results: dict[str, dict[str, float]], load_seconds: float
) -> list[Figure]:
    """Train ours and compare it with each peer when it had as long, `load_seconds` for files and first values included.

    The learning rate is the one that does best on validation rows in the end.
    """
    lengths = {peer: result["seconds"] for peer, result in results.items()} or {"": preset.seconds + load_seconds}
    moments = sorted({max(0.0, seconds - load_seconds) for seconds in lengths.values()})
    chosen, _, best, _ = tuned(recipe, preset.rates, sets, [0.0, *moments], 0)
    label = f"{name}: {recipe.name}"
    figures = [
        Figure(f"{label}, step 0", best.points[0].precision * POINTS, "P@1"),
        Figure(f"{label}, learning rate", chosen.lr, ""),
    ]
    for peer, seconds in lengths.items():
        point = best.points[1 + moments.index(max(0.0, seconds - load_seconds))]
        figures.append(Figure(f"{label}, as long as {peer or 'set'}", point.precision * POINTS, "P@1"))
        if peer:
            lead = (point.precision - results[peer]["precision"]) * POINTS
            what = f"{label} ahead of {peer} at equal time"
            must = name == "headwords" and recipe == preset.recipes[-1]
            figures.append(at_least(what, lead, "points", 0) if must else Figure(what, lead, "points"))
    return figures


def samples_by_name(preset: Preset, wanted: str, tiny: bool) -> dict[str, tuple[SparseSamples, int]]:
    """Return the data sets whose names hold `wanted`, each with the number of rows to hold out."""

    def words() -> SparseSamples:
        every = centre_words(preset.labels, 1_000_000)
        return only(every, data_rows(len(every), preset.rows))

    makers: dict[str, Callable[[], SparseSamples]] = {
        "confusable": lambda: confusable(preset.labels, rows_a_label=max(4, preset.rows // preset.labels))
    }
    if not tiny:
        makers |= {"centre words": words, "headwords": headwords}
    held = {"headwords": preset.held_headwords}
    return {name: (make_(), held.get(name, preset.held)) for name, make_ in makers.items() if wanted in name}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train every system and report."""
    command = parser(__doc__)
    command.add_argument("--peers", help="the environment that the peers are in")
    command.add_argument("--only", default="", help="sets whose name holds this")
    options = command.parse_args(argv)
    preset = TINY if options.tiny else Preset()
    peers = peers_of(Path(options.peers or storage.cache_folder() / "peers-xc"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = samples_by_name(preset, options.only, options.tiny)
    figures = [f for name, (s, held) in samples.items() for f in compare(name, split(s, held, 0), preset, peers)]
    figures.append(at_least("peers in the table", len(peers), "", 0 if options.tiny else len(PEERS)))
    torch.set_num_threads(threads)
    name = f"linear_trees, {options.only}" if options.only else "linear_trees"
    return report(name, options, figures, peers=sorted(peers))


def data_rows(rows: int, wanted: int) -> Any:
    """Return some row numbers, drawn once."""
    return np.sort(np.random.Generator(np.random.Philox(0)).permutation(rows)[:wanted])


if __name__ == "__main__":
    main()
