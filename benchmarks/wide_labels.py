"""Does a sampled softmax over very many labels save time against the dense one, and does retrieval beat uniform labels?

One network (a bag of embeddings, hidden 128, one row a label), one optimizer (row-wise Adagrad), the same data, one
thread; every recipe's learning rate is chosen on validation rows with seed 0, and with it three seeds are trained
against the clock and scored on test rows. The score of step 0 (label rows started from the data) is part of every
curve. For two threads, steps are timed anew and the ratio is computed from how many steps each needed. Data:
the centre-word set of workflows/build_centre_word.py, its 30,000 most frequent words and all there are, and labels in
groups of 20 that differ in three words of thirteen, from random rows and from the data (where nothing trained ends
above its start). The whole takes two hours; `--only` takes one set, whose result is one of its own.

    python -m benchmarks.wide_labels [--tiny] [--only confusable] [--json FILE]

What `sampler: auto` keeps is decided as the product does, on the validation rows.

Targets: 10 times less time to 90 % of dense's best P@1 at 30,000 labels, 50 times at all of them, and as good in the
end (0.3 points); the best sampler 3 points better than uniform at equal time on confusable labels, what auto keeps
never 0.2 points worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.wide_training import (
    POINTS,
    Point,
    Recipe,
    Sets,
    centre_words,
    confusable,
    curve,
    doubling,
    mean,
    split,
    step_seconds,
    time_to,
    tuned,
)
from idletrain.nn.extreme import SparseSamples
from idletrain.nn.trial import Trial, best

DENSE = Recipe("dense", "all")
UNIFORM = Recipe("uniform 1k", {"name": "uniform", "negatives": 1000})
RETRIEVING = (
    Recipe("uniform 4k", {"name": "uniform", "negatives": 4000}),
    Recipe("SimHash", {"name": "simhash", "negatives": 256}),
    Recipe("DWTA", {"name": "dwta", "negatives": 256}),
    Recipe("inverted file", {"name": "inverted-file", "negatives": 512}),
)


@dataclass(frozen=True)
class Contest:
    """One data set, who is trained on it, and for how long.

    Attributes:
        rates: Learning rates to choose from.
        start: What label rows start from.
        speedup: What the target says of the time to 90 % of dense's best; 0 without dense.
        margin: By how many points the best retrieval should beat uniform, where it should.
    """

    name: str
    labels: int
    rows: int
    others: tuple[Recipe, ...]
    seconds: float
    rates: tuple[float, ...]
    start: str = "data"
    dense_seconds: float = 0.0
    speedup: float = 0.0
    margin: float | None = None


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    contests: tuple[Contest, ...]
    held: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)


PLAN = Plan(
    (
        Contest("centre words, 30,000", 30_000, 1_000_000, (), 20, (0.005, 0.015, 0.05), dense_seconds=160, speedup=10),
        Contest(
            "confusable, from random rows", 100_000, 600_000, RETRIEVING, 40, (0.003, 0.01, 0.03), "random", margin=3.0
        ),
        Contest("confusable, from the data", 100_000, 600_000, RETRIEVING, 24, (0.0003, 0.001)),
        Contest(
            "centre words, all", 250_000, 1_000_000, RETRIEVING, 20, (0.005, 0.015, 0.05), dense_seconds=600, speedup=50
        ),
    )
)
SMALL = (
    Recipe(
        "inverted file", {"name": "inverted-file", "lists": 16, "negatives": 30}, hidden=16, batch=32, rebuild_every=20
    ),
)
TINY = Plan(
    (
        Contest("confusable, small", 200, 1200, SMALL, 0.4, (0.05,), dense_seconds=0.8, speedup=10),
        Contest("confusable, siblings", 200, 1200, SMALL, 0.4, (0.05,), margin=3.0),
    ),
    held=100,
    seeds=(0, 1),
)


@dataclass(frozen=True)
class Trained:
    """A recipe with its best learning rate: how it did on validation rows, and a curve a seed on test rows."""

    recipe: Recipe
    trial: Trial
    curves: list[list[Point]]

    def seconds_to(self, precision: float) -> float:
        """Mean over seeds; infinite if one does not get there."""
        return mean([time_to(points, precision) for points in self.curves])

    def steps_to(self, precision: float) -> float:
        """The same in steps."""
        by_steps = [[replace(p, seconds=float(p.steps)) for p in points] for points in self.curves]
        return mean([time_to(points, precision) for points in by_steps])


def rows_of(contest: Contest) -> SparseSamples:
    """The contest's data."""
    if contest.name.startswith("confusable"):
        return confusable(contest.labels, rows_a_label=contest.rows // contest.labels)
    return centre_words(contest.labels, contest.rows)


def compete(contest: Contest, plan: Plan, tiny: bool) -> tuple[list[Figure], list[Trained]]:
    """Tune, train and compare."""
    sets = split(rows_of(contest), plan.held, seed=0)
    asked: dict[str, Any] = {"start": contest.start, **({"hidden": 16, "batch": 32} if tiny else {})}
    small_uniform = {"name": "uniform", "negatives": 30}
    uniform = replace(UNIFORM, sampler=small_uniform if tiny else UNIFORM.sampler, **asked)
    moments = doubling(min(1.25, contest.seconds / 8), contest.seconds)
    others = [replace(recipe, start=contest.start) for recipe in contest.others]
    found = [train(recipe, contest.rates, plan.seeds, sets, moments) for recipe in (uniform, *others)]
    figures = [Figure(f"{contest.name}: step 0", mean([c[0].precision for c in found[0].curves]) * POINTS, "P@1")]
    figures += [_last(contest, one) for one in found]
    if contest.speedup:
        moments = doubling(contest.dense_seconds / 64, contest.dense_seconds)
        dense = train(replace(DENSE, **asked), contest.rates, plan.seeds, sets, moments)
        figures += against_dense(contest, dense, found[0], sets)
    if contest.others:
        figures += against_uniform(contest, found)
    return figures, [*found, dense] if contest.speedup else found


def train(
    recipe: Recipe, rates: Sequence[float], seeds: Sequence[int], sets: Sets, moments: Sequence[float]
) -> Trained:
    """Choose the learning rate with the first seed, then train the others with it."""
    first, *others = seeds
    chosen, trial, points = tuned(recipe, rates, sets, moments, first)
    rest = [curve(chosen, sets.train, sets.test, moments, seed)[0] for seed in others]
    return Trained(chosen, trial, [points, *rest])


def against_dense(contest: Contest, dense: Trained, ours: Trained, sets: Sets) -> list[Figure]:
    """Time to 90 % of dense's best, on one thread and on two, and the end."""
    best = mean([max(p.precision for p in points) for points in dense.curves])
    behind = (best - mean([max(p.precision for p in points) for points in ours.curves])) * POINTS
    theirs, mine = dense.seconds_to(0.9 * best), ours.seconds_to(0.9 * best)
    on_two = [
        one.steps_to(0.9 * best) * step_seconds(one.recipe, sets.train, 2, contest.seconds) for one in (dense, ours)
    ]
    words = f"{contest.name}: dense's time to 90 % of its best / uniform's"
    return [
        _last(contest, dense),
        at_least(words, _ratio(theirs, mine), "", contest.speedup),
        at_least(f"{words}, two threads", _ratio(*on_two), "", contest.speedup),
        at_most(f"{contest.name}: uniform behind dense in the end", behind, "points", 0.3),
    ]


def _ratio(theirs: float, mine: float) -> float:
    return min(theirs / max(mine, 1e-9), 1e6) if mine < math.inf else 0.0


def against_uniform(contest: Contest, found: list[Trained]) -> list[Figure]:
    """The best other sampler, and the one that `sampler: auto` would keep, beside uniform, at equal time."""
    uniform, *others = (mean([points[-1].precision for points in one.curves]) * POINTS for one in found)
    kept = best([one.trial for one in found]).sampler
    (by_auto,) = (end for end, one in zip((uniform, *others), found, strict=True) if one.recipe.name == kept)
    what, ahead = f"{contest.name}: best other sampler ahead of uniform at equal time", max(others) - uniform
    return [
        Figure(what, ahead, "points") if contest.margin is None else at_least(what, ahead, "points", contest.margin),
        at_least(
            f"{contest.name}: what auto keeps ({kept}) ahead of uniform at equal time",
            by_auto - uniform,
            "points",
            -0.2,
        ),
    ]


def _last(contest: Contest, one: Trained) -> Figure:
    ends = [points[-1].precision * POINTS for points in one.curves]
    after = one.curves[0][-1].seconds
    return Figure(f"{contest.name}: {one.recipe.name} after {after:.3g} s", mean(ends), "P@1", samples=ends)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Compete on every set and report."""
    made = parser(__doc__)
    made.add_argument("--only", help="sets whose name holds this")
    options = made.parse_args(argv)
    plan = TINY if options.tiny else PLAN
    contests = [contest for contest in plan.contests if (options.only or "") in contest.name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = {contest.name: compete(contest, plan, options.tiny) for contest in contests}
    torch.set_num_threads(threads)
    curves = {
        name: [
            {"recipe": asdict(one.recipe), "curves": [[asdict(p) for p in points] for points in one.curves]}
            for one in found
        ]
        for name, (_, found) in told.items()
    }
    name = f"wide_labels, {contests[0].name}" if options.only else "wide_labels"
    return report(name, options, [figure for figures, _ in told.values() for figure in figures], curves=curves)


if __name__ == "__main__":
    main()
