"""Measure bytes and time to train a network with very many outputs on four slow links.

Four nodes in network namespaces with links of 100 Mbit/s (`idletrain-testbed`; needs root) train a bag of embeddings
with 250,000 confusable labels (wide_training.py), 128 rows a step: dense data parallel (DDP on gloo; five steps), row-
sparse data parallel (all-gather of the gradients' rows, the honest baseline), and idletrain in both modes. Bytes are
counted on the links, pulls and pushes included. Time is that to the first commit with 90 % of the best P@1 that dense
data parallel reaches in so many steps, whose own time is computed: steps of one dense process to there, at the learning
rate that did best on validation rows, times a step over links.

    python -m benchmarks.wide_exchange [--tiny] [--json FILE]

Targets: bytes a step 900 times below dense data parallel in lockstep and 700 in rounds, 10 and 7 times below
row-sparse; 100 times less time to the same P@1.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch

from benchmarks.machines import Bed, Cast, Counter, free_port, machines
from benchmarks.peers.node import Spec
from benchmarks.race import own_snapshots, run_folder
from benchmarks.report import Figure, at_least, report, with_preset
from benchmarks.wide_training import (
    ALWAYS,
    POINTS,
    Point,
    Recipe,
    Sets,
    confusable,
    make,
    precision_at_1,
    split,
    steps,
    time_to,
)
from idletrain.nn.evaluate import assembled
from idletrain.nn.ist.subnets import views
from idletrain.nn.wide.models import WideNetwork

LONGEST_WAIT_SECONDS = 900.0
MB = 1e6


@dataclass(frozen=True)
class Preset:
    """Sizes; `dense_steps` are those of one process."""

    labels: int = 250_000
    rows_a_label: int = 4
    hidden: int = 128
    batch: int = 128
    nodes: int = 4
    link: str = "100mbit"
    held: int = 2000
    negatives: int = 1000
    lr: float = 0.05
    ddp_steps: int = 5
    rows_steps: int = 100
    dense_steps: int = 1000
    tuning_steps: int = 150
    dense_rates: tuple[float, ...] = (0.02, 0.05, 0.15)
    modes: tuple[tuple[str, int, int], ...] = (("rounds", 1000, 4), ("lockstep", 2250, 2))
    """Mode, local steps, rounds."""


TINY = Preset(
    400, 6, 16, 16, 2, "none", 100, 20, 0.05, 2, 3, 20, 5, (0.05, 0.1), (("rounds", 10, 2), ("lockstep", 10, 2))
)


@dataclass(frozen=True)
class Timing:
    """A run: seconds and bytes over all links a step, and (ours) P@1 after so many seconds."""

    step_seconds: float
    step_bytes: float | None
    points: tuple[Point, ...] = ()


def files_of(sets: Sets, folder: Path) -> dict[str, list[str]]:
    """Write both parts as CSR files; return their paths."""
    named: dict[str, list[str]] = {}
    for part, samples in (("train", sets.train), ("test", sets.test)):
        for kind, matrix, columns in (
            ("x", samples.x, samples.census.features),
            ("y", samples.y, samples.census.labels),
        ):
            values = np.ones(len(matrix.columns), np.float32) if matrix.values is None else matrix.values
            path = folder / f"{part}-{kind}.npz"
            features = scipy.sparse.csr_matrix((values, matrix.columns, matrix.starts), shape=(len(matrix), columns))
            scipy.sparse.save_npz(path, features, compressed=False)
            named.setdefault(part, []).append(str(path))
    return named


def data_parallel(preset: Preset, kind: str, count: int, sizes: dict[str, int], data: dict[str, Any]) -> Timing:
    """Train so many steps on all nodes, each with its part of the batch."""
    with run_folder() as folder, machines(preset.nodes, preset.link) as bed, Cast(bed, folder) as cast:
        port = free_port()
        nodes = list(bed.names)[1:]
        for rank, node in enumerate(nodes):
            spec = Spec(
                rank=rank,
                nodes=preset.nodes,
                address=bed.address(node),
                root=bed.address("n0"),
                port=port,
                model=sizes,
                data=data,
                batch_size=preset.batch // preset.nodes,
                seed=0,
                steps=count,
                settings={"kind": kind, "lr": preset.lr, "sampler": sampler(preset)},
            )
            cast.start(node, [sys.executable, "-m", "benchmarks.peers.wide_node", json.dumps(asdict(spec))])
        start = max(line["t"] for line in cast.output.wait("ready", preset.nodes, LONGEST_WAIT_SECONDS, cast.all_alive))
        counter = Counter(bed)
        cast.output.wait("done", preset.nodes, LONGEST_WAIT_SECONDS, lambda: True)
        counter.close()
        ended = max(line["t"] for line in cast.output.of("step"))
        carried = counter.between(start, ended)
    return Timing((ended - start) / count, None if carried is None else carried / count)


def sampler(preset: Preset) -> dict[str, Any]:
    """Return uniform labels for both modes and for row-sparse data parallel."""
    return {"name": "uniform", "negatives": preset.negatives}


def ours(
    preset: Preset,
    mode: tuple[str, int, int],
    sizes: dict[str, int],
    data: dict[str, Any],
    score: Callable[[Path], float],
) -> Timing:
    """Run idletrain in one mode, scoring its snapshots off the clock."""
    name, local_steps, rounds = mode
    with run_folder() as folder, machines(preset.nodes, preset.link) as bed:
        with Cast(bed, folder) as cast:
            _start(cast, bed, preset, tree(preset, mode, sizes, data, folder))
            start = cast.output.wait("leased", 1, LONGEST_WAIT_SECONDS, cast.all_alive)[0]["t"]
            counter = Counter(bed)
            (ended,) = cast.output.wait("run_ended", 1, LONGEST_WAIT_SECONDS, cast.all_alive)
            counter.close()
            commits = {line["round"] + 1: line["t"] for line in cast.output.of("round_committed")}
            done = {number: number * local_steps for number in commits}
            last = max(commits.values())
            carried = counter.between(start, last)
        points = [Point(commits[n] - start, done[n], score(file)) for n, file in own_snapshots(folder) if n in commits]
    count = rounds * local_steps
    print(f"{name}: {ended['status']}, " + ", ".join(f"{p.seconds:.0f} s {p.precision:.4f}" for p in points))
    return Timing((last - start) / count, None if carried is None else carried / count, tuple(points))


def tree(
    preset: Preset, mode: tuple[str, int, int], sizes: dict[str, int], data: dict[str, Any], to: Path
) -> dict[str, Any]:
    """Return the job."""
    name, local_steps, rounds = mode
    args = {**sizes, "sampler": sampler(preset), "start": "random"}
    return {
        "name": "bench",
        "model": {"factory": "idletrain.nn.wide.models:wide", "args": args, "exclude": ["hidden"]},
        "data": data,
        "training": {
            "mode": name,
            "subnets": preset.nodes,
            "local_steps": local_steps,
            "rounds": rounds,
            "batch_size": preset.batch,
            "loss": "sampled_softmax",
            "optimizer": {"name": "row-adagrad", "lr": preset.lr, "start": {"output.weight": ALWAYS[0]}},
            "evaluate_every": 1_000_000,
        },
        "nodes": {"count": preset.nodes},
        "preemption": {"progress_every": "1h", "lease": "60s"},
        "checkpoint": {"to": str(to), "every": 0.001, "keep": 1_000_000},
    }


def _start(cast: Cast, bed: Bed, preset: Preset, job: dict[str, Any]) -> None:
    address = bed.address("head")
    spec = Spec(
        rank=0,
        nodes=preset.nodes,
        address=address,
        root=address,
        port=free_port(),
        model=job["model"],
        data=job["data"],
        batch_size=preset.batch,
        seed=0,
        steps=0,
        settings={"tree": job},
    )
    cast.start("head", [sys.executable, "-m", "benchmarks.peers.idletrain_head", json.dumps(asdict(spec))])
    serving = cast.output.wait("serving", 1, LONGEST_WAIT_SECONDS, cast.all_alive)[0]["address"]
    for node in list(bed.names)[1:]:
        cast.start(node, [sys.executable, "-m", "idletrain", "worker", serving, "--memory", "2GiB"])


def dense_curve(preset: Preset, sets: Sets) -> list[Point]:
    """Train one dense process, its time counted in steps."""
    recipe = max((_dense(preset, lr) for lr in preset.dense_rates), key=lambda one: _after_tuning(preset, one, sets))
    network = make(recipe, sets.train, 0)
    points, going = [Point(0.0, 0, precision_at_1(network, sets.test))], steps(network, recipe, sets.train, 0)
    every = max(1, preset.dense_steps // 10)
    for done in range(1, preset.dense_steps + 1):
        next(going)
        if done % every == 0:
            points.append(Point(float(done), done, precision_at_1(network, sets.test)))
            print(f"dense: {done} steps, {points[-1].precision:.4f}")
    return points


def _dense(preset: Preset, lr: float) -> Recipe:
    return Recipe("dense", "all", lr=lr, start="random", hidden=preset.hidden, batch=preset.batch)


def _after_tuning(preset: Preset, recipe: Recipe, sets: Sets) -> float:
    network = make(recipe, sets.train, 0)
    for _ in itertools.islice(steps(network, recipe, sets.train, 0), preset.tuning_steps):
        pass
    precision = precision_at_1(network, sets.valid)
    print(f"dense, lr {recipe.lr:g}: {precision:.4f} on validation rows after {preset.tuning_steps} steps")
    return precision


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    options, preset = with_preset(__doc__, argv, Preset(), TINY)
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    sets = split(confusable(preset.labels, rows_a_label=preset.rows_a_label), preset.held, 0)
    census = sets.train.census
    sizes = {"features": census.features, "hidden": preset.hidden, "labels": census.labels}
    recipe = Recipe("ours", sampler(preset), start="random", hidden=preset.hidden)
    network = make(recipe, sets.train, 0)
    shapes = [p.shape for p in network.parameters()]

    def score(file: Path) -> float:
        flat = torch.from_numpy(np.fromfile(file, np.float32, count=sum(s.numel() for s in shapes)))
        trained = assembled(network, list(views(flat, shapes)))
        assert isinstance(trained, WideNetwork)
        return precision_at_1(trained, sets.test)

    with run_folder() as folder:
        data = files_of(sets, folder)
        timings = {mode[0]: ours(preset, mode, sizes, data, score) for mode in preset.modes}
        timings["row-sparse data parallel"] = data_parallel(preset, "rows", preset.rows_steps, sizes, data)
        timings["dense data parallel"] = data_parallel(preset, "dense", preset.ddp_steps, sizes, data)
    curve = dense_curve(preset, sets)
    torch.set_num_threads(threads)
    figures = figures_of(timings, curve, preset.modes)
    return report(
        "wide_exchange",
        options,
        figures,
        sizes=sizes,
        dense_curve=[asdict(p) for p in curve],
        runs={name: asdict(timing) for name, timing in timings.items()},
        seconds=time.monotonic() - started,
    )


def figures_of(
    timings: dict[str, Timing], dense: Sequence[Point], modes: Sequence[tuple[str, int, int]]
) -> list[Figure]:
    """Return bytes and seconds a step, their ratios, and the time to each mode's final P@1."""
    figures = [Figure(f"{name}: a step", timing.step_seconds * 1000, "ms") for name, timing in timings.items()]
    figures += [
        Figure(f"{name}: bytes a step", timing.step_bytes / MB, "MB")
        for name, timing in timings.items()
        if timing.step_bytes
    ]
    level = 0.9 * max(point.precision for point in dense)
    theirs = time_to(dense, level) * timings["dense data parallel"].step_seconds
    what = (
        f"dense data parallel: computed time to {level * POINTS:.1f} P@1, 90 % of its best in {dense[-1].steps:,} steps"
    )
    figures.append(Figure(what, theirs, "s"))
    limits = {"lockstep": (900.0, 10.0), "rounds": (700.0, 7.0)}
    for name, local_steps, _ in modes:
        own = timings[name]
        figures.append(Figure(f"{name}: steps between two commits", local_steps, ""))
        for other, limit in zip(("dense data parallel", "row-sparse data parallel"), limits[name], strict=True):
            theirs_bytes = timings[other].step_bytes
            if own.step_bytes and theirs_bytes:
                figures.append(at_least(f"{name}: {other}'s bytes / its own", theirs_bytes / own.step_bytes, "", limit))
        seconds = min((point.seconds for point in own.points if point.precision >= level), default=math.inf)
        ratio = theirs / seconds if seconds < float("inf") else 0.0
        figures.append(Figure(f"{name}: P@1 in the end", own.points[-1].precision * POINTS, "P@1"))
        figures.append(Figure(f"{name}: time to {level * POINTS:.1f} P@1", min(seconds, 1e6), "s"))
        figures.append(at_least(f"{name}: dense data parallel's computed time to there / its own", ratio, "", 100.0))
    return figures


if __name__ == "__main__":
    main()
