"""Shared parts of the benchmarks with very many outputs: data sets, and timed training with evaluations beside it."""

from __future__ import annotations

import gzip
import importlib
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from idletrain import storage
from idletrain.autotune.sampler_trial import SamplerTrial
from idletrain.nn.data.csr import Csr, canonical, transpose
from idletrain.nn.data.extreme import DataCensus, SparseFiles, SparseSamples, only
from idletrain.nn.optim.rowwise import RowAdagrad
from idletrain.nn.wide.models import WideNetwork, wide
from idletrain.nn.wide.ranking import hits

SamplerWords = str | Mapping[str, Any]
POINTS = 100.0
ALWAYS = 1e-4, 1e-6  # what Adagrad's sums start from: the output's, the embeddings'
TURNS = 8  # that recipes are timed in


@dataclass(frozen=True)
class Sets:
    """Rows to train on, to choose learning rates by, and to report."""

    train: SparseSamples
    valid: SparseSamples
    test: SparseSamples


@dataclass(frozen=True)
class Recipe:
    """A sampler and its settings for training."""

    name: str
    sampler: SamplerWords
    lr: float = 0.05
    start: str = "data"
    hidden: int = 128
    batch: int = 256
    rebuild_every: int = 500


@dataclass(frozen=True)
class Point:
    """P@1 on held-out rows after so much training (evaluations are not counted)."""

    seconds: float
    steps: int
    precision: float


@dataclass(frozen=True)
class Curve:
    """A training against the clock: points, and in the end its network and which held-out rows that has right."""

    points: list[Point]
    right: NDArray[np.bool_]
    network: WideNetwork


def samples_of(x: Csr, y: Csr, features: int, labels: int) -> SparseSamples:
    """Return rows in memory as samples."""
    return SparseSamples(x, y, transpose(y, labels), DataCensus(len(x), features, labels, 0, 0))


def split(samples: SparseSamples, held: int, seed: int) -> Sets:
    """Deal rows out without overlap: `held` to validate, `held` to test, the rest to train."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(samples))
    return Sets(*(only(samples, np.sort(part)) for part in (order[2 * held :], order[:held], order[held : 2 * held])))


def confusable(labels: int, siblings: int = 20, rows_a_label: int = 6, seed: int = 0) -> SparseSamples:
    """Make rows of most words of a label, and noise; sibling labels share ten words and differ in three."""
    random = np.random.Generator(np.random.Philox(seed))
    features = max(200, labels // 2)
    groups = -(-labels // siblings)
    shared = random.integers(0, features, (groups, 10))
    own = random.integers(0, features, (labels, 3))
    label = np.repeat(np.arange(labels), rows_a_label)
    words = np.hstack([shared[label // siblings], own[label], random.integers(0, features, (len(label), 2))])
    mask = random.random(words.shape) < np.array([0.7] * 10 + [0.6] * 3 + [1.0] * 2)
    starts = np.concatenate([[0], mask.sum(1).cumsum()])
    values = np.ones(starts[-1], np.float32)
    x, _ = canonical(Csr(starts, words[mask].astype(np.int32), values))
    y = Csr(np.arange(len(label) + 1), label.astype(np.int32))
    return samples_of(x, y, features, labels)


def centre_words(vocabulary: int, rows: int) -> SparseSamples:
    """Return the real data set of workflows/build_centre_word.py, built once into the cache."""
    return _built(
        "build_centre_word", f"centre-word-{vocabulary}-{rows}", f"--vocabulary={vocabulary}", f"--rows={rows}"
    )


def headwords() -> SparseSamples:
    """Return the real data set of workflows/build_headword.py, built once into the cache."""
    return _built("build_headword", "headword")


def _built(builder: str, name: str, *options: str) -> SparseSamples:
    sys.path.insert(0, str(Path(__file__).parent.parent / "workflows"))
    folder = storage.cache_folder() / name
    if not (folder / "train.txt.gz").exists():
        importlib.import_module(builder).main([str(folder), *options])
    return SparseFiles((str(folder / "train.txt.gz"),)).open()


def write_rows(path: Path, samples: SparseSamples) -> None:
    """Write a file in the Extreme Classification Repository's format, for other systems."""
    census = samples.census
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(f"{len(samples)} {census.features} {census.labels}\n")
        for row in range(len(samples)):
            x, y = samples.batch(np.array([row]))
            values = torch.ones(len(x.indices)) if x.values is None else x.values
            words = " ".join(f"{i}:{v:g}" for i, v in zip(x.indices.tolist(), values.tolist(), strict=True))
            file.write(f"{','.join(map(str, y.indices.tolist()))} {words}\n")


def make(recipe: Recipe, train: SparseSamples, seed: int) -> WideNetwork:
    """Return a network with its initial values."""
    torch.manual_seed(seed)
    census = train.census
    network = wide(census.features, recipe.hidden, census.labels, sampler=recipe.sampler, start=recipe.start)  # type: ignore[arg-type]
    network.output.hold(None)
    network.output.learn_counts(np.diff(train.rows_of.starts))
    network.start_from(train)
    return network


@torch.no_grad()
def right_at_1(network: WideNetwork, samples: SparseSamples) -> NDArray[np.bool_]:
    """Return in which rows the best-scored label is one of the row's labels."""
    network.eval()
    parts = np.array_split(np.arange(len(samples)), -(-len(samples) // 256))
    top = [network(samples.batch(part)[0]).topk(1)[1].numpy() for part in parts]
    network.train()
    return hits(np.concatenate(top), samples.y)[:, 0]


def precision_at_1(network: WideNetwork, samples: SparseSamples) -> float:
    """Compute the exact P@1."""
    return float(right_at_1(network, samples).mean())


def steps(network: WideNetwork, recipe: Recipe, train: SparseSamples, seed: int) -> Iterator[float]:
    """Train for ever; yields the seconds that rebuilds took so far, after every step."""
    output: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in network.named_parameters():
        (output if name.startswith("output") else others).append(parameter)
    groups = [{"params": p, "start": start} for p, start in zip((output, others), ALWAYS, strict=True)]
    optimizer = RowAdagrad(groups, lr=recipe.lr)
    random, order, done, rebuilding = np.random.Generator(np.random.Philox(seed)), np.empty(0, np.int64), 0, 0.0
    network.train()
    while True:
        if done % recipe.rebuild_every == 0 and network.output.retrieves:
            started = time.perf_counter()
            network.output.rebuild(done)
            rebuilding += time.perf_counter() - started
        if len(order) < recipe.batch:
            order = random.permutation(len(train))
        x, y = train.batch(order[: recipe.batch])
        order = order[recipe.batch :]
        optimizer.zero_grad(set_to_none=True)
        network(x).loss(y).backward()
        optimizer.step()
        done += 1
        yield rebuilding


def curve(recipe: Recipe, train: SparseSamples, held: SparseSamples, seconds: Sequence[float], seed: int) -> Curve:
    """Score after each of so many seconds of training (0: before it)."""
    network, points = make(recipe, train, seed), list[Point]()
    going, spent, done = steps(network, recipe, train, seed), 0.0, 0
    for until in seconds:
        while spent < until:
            started = time.perf_counter()
            next(going)
            spent, done = spent + time.perf_counter() - started, done + 1
        right = right_at_1(network, held)
        points.append(Point(spent, done, float(right.mean())))
    curve_text = ", ".join(f"{p.seconds:.0f} s {p.precision:.4f}" for p in points)
    print(f"{recipe.name}, lr {recipe.lr:g}, seed {seed}: {curve_text}", flush=True)
    return Curve(points, right, network)


def tuned(
    recipe: Recipe, rates: Sequence[float], sets: Sets, moments: Sequence[float], seed: int
) -> tuple[Recipe, SamplerTrial, Curve, list[tuple[Recipe, list[Point]]]]:
    """Return the recipe at the learning rate that does best on validation rows, its result there, its curve on test
    rows, and the points at all rates.
    """
    tried = []
    for candidate in (replace(recipe, lr=lr) for lr in rates):
        result = curve(candidate, sets.train, sets.test, moments, seed)
        end = result.points[-1]
        trial = SamplerTrial(recipe.name, end.steps, end.seconds, right_at_1(result.network, sets.valid))
        tried.append((candidate, trial, result))
    return *max(tried, key=lambda candidate: candidate[1].precision), [
        (candidate, result.points) for candidate, _, result in tried
    ]


def step_seconds(
    recipes: Sequence[Recipe], train: SparseSamples, threads: int, budget_seconds: float
) -> dict[str, float]:
    """Return the median time of each recipe's step on so many threads, in turns: a shared machine's speed varies."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    stepping = {recipe.name: steps(make(recipe, train, 0), recipe, train, 0) for recipe in recipes}
    times: dict[str, list[float]] = {name: [] for name in stepping}
    for iterator in stepping.values():
        next(iterator)
    for name in list(stepping) * TURNS:
        ends, first = time.perf_counter() + budget_seconds / TURNS, len(times[name])
        while len(times[name]) == first or time.perf_counter() < ends:
            started = time.perf_counter()
            next(stepping[name])
            times[name].append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return {name: statistics.median(many) for name, many in times.items()}


def time_to(points: Sequence[Point], target: float) -> float:
    """Return training seconds until P@1 is first reached, on a straight line between points; infinite if never."""
    before = points[0]
    for point in points:
        if point.precision >= target:
            gained = point.precision - before.precision
            share = 1.0 if gained <= 0 else (target - before.precision) / gained
            return before.seconds + max(0.0, share) * (point.seconds - before.seconds)
        before = point
    return math.inf


def doubling(first: float, last: float) -> list[float]:
    """Return moments to evaluate at: before, and then each twice the one before."""
    count = max(1, math.ceil(math.log2(last / first)))
    return [0.0, *(last / 2**i for i in reversed(range(count + 1)))]


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds."""
    return statistics.mean(values)


def peak_rss_bytes() -> int:
    """Return the most memory that this process had (not getrusage, which remembers the process before an exec)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
