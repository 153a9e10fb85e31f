"""Compare a sampled softmax over very many labels with the dense one, and retrieval with uniform labels.

One network (a bag of embeddings, hidden 128, one row a label), one optimizer (row-wise Adagrad), the same data, one
thread; every recipe's learning rate is chosen on validation rows with seed 0, and with it three seeds are trained
against the clock and scored on test rows. For the time to a P@1 it is the rate that gets there first, dense's likewise.
The score of step 0 (label rows started from the data) is part of every curve. For two threads, steps are timed first
and the ratio is computed from how many steps each needed. Data: the centre-word set of workflows/build_centre_word.py,
its 30,000 most frequent words and all there are, and labels in groups of 20 that differ in three words of thirteen,
from random rows. The whole takes one and a half hours; `--only` takes one set, whose result is one of its own, and sets
can be measured side by side, each on a core.

    python -m benchmarks.wide_labels [--tiny] [--only confusable] [--json FILE]

What `sampler: auto` keeps is what the product keeps on the training rows in two minutes.

Targets: 10 times less time to 90 % of dense's best P@1 at 30,000 labels, 50 times at all of them, and as good in the
end (0.3 points); the best retrieval 3 points better at equal time on confusable labels than the best of what looks at
no rows (uniform, log-uniform), what auto keeps never 0.2 points worse.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import Figure, at_least, at_most, parser, report
from benchmarks.wide_exchange import files_of
from benchmarks.wide_training import (
    ALWAYS,
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
from idletrain.autotune.sampler_trial import SamplerTrial, choose_sampler
from idletrain.job_file import parse_job
from idletrain.nn.data.extreme import SparseSamples

DENSE = Recipe("dense", "all")
UNIFORM = Recipe("uniform 1k", {"name": "uniform", "negatives": 1000})
BLIND = (
    UNIFORM,
    Recipe("uniform 4k", {"name": "uniform", "negatives": 4000}),
    Recipe("log-uniform 1k", {"name": "log-uniform", "negatives": 1000}),
    Recipe("log-uniform 256", {"name": "log-uniform", "negatives": 256}),
)
RETRIEVING = (
    Recipe("SimHash", {"name": "simhash", "negatives": 256}),
    Recipe("DWTA", {"name": "dwta", "negatives": 256}),
    Recipe("inverted file", {"name": "inverted-file", "negatives": 64, "keep": 1}),
)


@dataclass(frozen=True)
class Race:
    """One data set, the recipes trained on it, and for how long.

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
class Preset:
    """The races and their lengths."""

    races: tuple[Race, ...]
    held: int = 10_000
    seeds: tuple[int, ...] = (0, 1, 2)
    trial_seconds: float = 120.0


RATES = 0.005, 0.015, 0.05, 0.15
FULL = Preset(
    (
        Race("centre words, 30,000", 30_000, 1_000_000, (), 20, RATES, dense_seconds=160, speedup=10),
        Race(
            "confusable, from random rows",
            100_000,
            600_000,
            RETRIEVING,
            40,
            (0.01, 0.03, 0.1, 0.3),
            "random",
            margin=3.0,
        ),
        Race("centre words, all", 250_000, 1_000_000, RETRIEVING, 20, RATES[1:], dense_seconds=300, speedup=50),
    )
)
SMALL_RECIPES = (
    Recipe(
        "inverted file", {"name": "inverted-file", "lists": 16, "negatives": 30}, hidden=16, batch=32, rebuild_every=20
    ),
)
TINY = Preset(
    (
        Race("confusable, small", 200, 1200, SMALL_RECIPES, 0.4, (0.05,), dense_seconds=0.8, speedup=10),
        Race("confusable, siblings", 200, 1200, SMALL_RECIPES, 0.4, (0.05,), margin=3.0),
    ),
    held=100,
    seeds=(0, 1),
    trial_seconds=1.0,
)


@dataclass(frozen=True)
class Trained:
    """A recipe with its best learning rate: how it did on validation rows, and a seed each a curve on test rows, and
    which of these it has right in the end; and the first seed's curves at all rates.
    """

    recipe: Recipe
    trial: SamplerTrial
    curves: list[list[Point]]
    right: list[NDArray[np.bool_]]
    at_rates: list[tuple[Recipe, list[Point]]]

    def ahead_of(self, other: Trained) -> tuple[float, float]:
        """Return the lead in points of P@1 in the end, and its standard error, row by row."""
        by_row = np.mean([a.astype(float) - b for a, b in zip(self.right, other.right, strict=True)], axis=0)
        return float(by_row.mean()) * POINTS, float(by_row.std() / len(by_row) ** 0.5) * POINTS


@dataclass(frozen=True)
class Sprint:
    """A recipe at the rate that reaches a P@1 first with the first seed, and a curve each seed."""

    recipe: Recipe
    curves: list[list[Point]]

    def seconds_to(self, precision: float) -> float:
        """Return the mean seconds to a P@1 over seeds; infinite if one does not get there."""
        return mean([time_to(points, precision) for points in self.curves])

    def steps_to(self, precision: float) -> float:
        """Return the mean steps to a P@1 over seeds."""
        by_steps = [[replace(p, seconds=float(p.steps)) for p in points] for points in self.curves]
        return mean([time_to(points, precision) for points in by_steps])


def sprint(one: Trained, precision: float, seeds: Sequence[int], sets: Sets, moments: Sequence[float]) -> Sprint:
    """Train the other seeds at the rate that reaches a P@1 first, which differs from the best in the end."""
    recipe, points = min(one.at_rates, key=lambda tried: time_to(tried[1], precision))
    if recipe == one.recipe:
        return Sprint(recipe, one.curves)
    return Sprint(recipe, [points, *(curve(recipe, sets.train, sets.test, moments, s).points for s in seeds[1:])])


def rows_of(race: Race) -> SparseSamples:
    """Return the race's data."""
    if race.name.startswith("confusable"):
        return confusable(race.labels, rows_a_label=race.rows // race.labels)
    return centre_words(race.labels, race.rows)


def compete(race: Race, preset: Preset, tiny: bool) -> tuple[list[Figure], list[Trained]]:
    """Tune, train and compare."""
    sets = split(rows_of(race), preset.held, seed=0)
    settings: dict[str, Any] = {"start": race.start, **({"hidden": 16, "batch": 32} if tiny else {})}
    small_uniform = {"name": "uniform", "negatives": 30}
    guesses = BLIND if race.others and not tiny else (UNIFORM,)
    blind = [replace(one, sampler=small_uniform if tiny else one.sampler, **settings) for one in guesses]
    dense_recipe = replace(DENSE, **settings)
    on_two = {}
    if race.speedup:  # before all else: from here on sets can share a machine
        on_two = step_seconds((dense_recipe, blind[0]), sets.train, 2, race.seconds)
        print(f"{race.name}: seconds a step on two threads: {on_two}", flush=True)
    others = [replace(recipe, start=race.start) for recipe in race.others]
    moments = doubling(min(1.25, race.seconds / 8), race.seconds) if race.speedup else [0.0, race.seconds]
    trained = [train(blind[0], race.rates, preset.seeds, sets, moments)]
    trained += [train(recipe, race.rates, preset.seeds, sets, moments[-1:]) for recipe in (*blind[1:], *others)]
    figures = [
        Figure(f"{race.name}: labels", sets.train.census.labels, ""),
        Figure(f"{race.name}: step 0", mean([c[0].precision for c in trained[0].curves]) * POINTS, "P@1"),
    ]
    figures += [_last(race, one) for one in trained]
    if race.speedup:
        dense_moments = doubling(race.dense_seconds / 64, race.dense_seconds)
        dense = train(dense_recipe, race.rates, preset.seeds, sets, dense_moments)
        level = level_of(dense, trained[0])
        sprints = [
            sprint(one, level, preset.seeds, sets, when)
            for one, when in ((dense, dense_moments), (trained[0], moments))
        ]
        figures += against_dense(race, dense, trained[0], len(sets.train))
        figures += soon(race, level, sprints, on_two)
    if race.others:
        unseeing = max(trained[: len(blind)], key=lambda one: one.trial.precision)
        names = tuple(dict.fromkeys(_name(one) for one in trained))
        automatic = auto_sampler(unseeing.recipe, sets, names, preset.trial_seconds)
        (by_auto, *_) = (one for one in trained if _name(one) == automatic)
        figures += against_blind(race, unseeing, trained[len(blind) :], by_auto)
    return figures, [*trained, dense] if race.speedup else trained


def train(
    recipe: Recipe, rates: Sequence[float], seeds: Sequence[int], sets: Sets, moments: Sequence[float]
) -> Trained:
    """Choose the learning rate with the first seed, then train the others with it."""
    first, *others = seeds
    chosen, trial, result, at_rates = tuned(recipe, rates, sets, moments, first)
    curves, right = [result.points], [result.right]
    for seed in others:
        result = curve(chosen, sets.train, sets.test, moments, seed)
        curves.append(result.points)
        right.append(result.right)
    return Trained(chosen, trial, curves, right, at_rates)


def best_of(one: Trained) -> float:
    """Return the best P@1 that a recipe reached, mean over seeds."""
    return mean([max(p.precision for p in points) for points in one.curves])


def level_of(dense: Trained, ours: Trained) -> float:
    """Return 90 % of dense's best P@1; where the start is as good as that, 90 % of the distance to it."""
    best, start = best_of(dense), mean([points[0].precision for points in (*dense.curves, *ours.curves)])
    return 0.9 * best if start < 0.9 * best else start + 0.9 * (best - start)


def against_dense(race: Race, dense: Trained, ours: Trained, rows: int) -> list[Figure]:
    """Return the figures that compare a sampled recipe with dense training at the end."""
    epochs = mean([points[-1].steps for points in dense.curves]) * dense.recipe.batch / rows
    rising = mean([points[-1].precision - points[-2].precision for points in dense.curves]) * POINTS
    behind = (best_of(dense) - best_of(ours)) * POINTS
    return [
        _last(race, dense),
        Figure(f"{race.name}: dense's passes over the data", epochs, ""),
        Figure(f"{race.name}: dense still gains in the second half of its time", rising, "points"),
        at_most(f"{race.name}: uniform behind dense in the end", behind, "points", 0.3),
    ]


def soon(race: Race, level: float, sprints: Sequence[Sprint], on_two: dict[str, float]) -> list[Figure]:
    """Return dense's time over uniform's, on one thread and on two (by the seconds that a step takes there)."""
    label = f"{race.name}: dense's time to P@1 {level * POINTS:.2f} / uniform's"
    theirs, own = (one.seconds_to(level) for one in sprints)
    theirs_on_two, own_on_two = (one.steps_to(level) * on_two[one.recipe.name] for one in sprints)
    return [
        *(Figure(f"{race.name}: {one.recipe.name}'s rate for that", one.recipe.lr, "") for one in sprints),
        at_least(label, _ratio(theirs, own), "", race.speedup),
        at_least(f"{label}, two threads", _ratio(theirs_on_two, own_on_two), "", race.speedup),
    ]


def _ratio(theirs: float, own: float) -> float:
    return min(theirs / max(own, 1e-9), 1e6) if own < math.inf else 0.0


def auto_sampler(recipe: Recipe, sets: Sets, names: Sequence[str], seconds: float) -> str:
    """Return the sampler of these that a job with `sampler: auto` keeps on these rows."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        args = {"features": sets.train.census.features, "hidden": recipe.hidden, "labels": sets.train.census.labels}
        optimizer = {"name": "row-adagrad", "lr": recipe.lr, "start": {"output.weight": ALWAYS[0]}}
        training = {"loss": "sampled_softmax", "batch_size": recipe.batch, "local_steps": 500, "optimizer": optimizer}
        job = parse_job(
            {
                "name": "bench",
                "model": {"factory": "idletrain.nn.wide.models:wide", "args": {**args, "start": recipe.start}},
                "data": files_of(sets, Path(folder)),
                "training": {**training, "subnets": 1},
            }
        )
        sampler, _ = choose_sampler(job.model, job.data, job.training, seconds=seconds, candidates=names)
    return str(sampler)


def against_blind(race: Race, unseeing: Trained, others: Sequence[Trained], by_auto: Trained) -> list[Figure]:
    """Compare the best retrieving sampler, and the one that `sampler: auto` keeps, with the best that
    looks at no rows, at equal time.
    """
    best = max(others, key=lambda one: one.ahead_of(unseeing)[0])
    figures = []
    for what, one, least in (("best retrieval", best, race.margin), ("what auto keeps", by_auto, -0.2)):
        lead, error = one.ahead_of(unseeing)
        label = f"{race.name}: {what} ({one.recipe.name}) ahead of {unseeing.recipe.name} at equal time"
        figure = Figure(label, lead, "points") if least is None else at_least(label, lead, "points", least)
        figures += [figure, Figure(f"{race.name}: {what}: standard error of that", error, "points")]
    return figures


def _name(one: Trained) -> str:
    sampler = one.recipe.sampler
    return sampler if isinstance(sampler, str) else str(sampler["name"])


def _last(race: Race, one: Trained) -> Figure:
    ends = [points[-1].precision * POINTS for points in one.curves]
    after = one.curves[0][-1].seconds
    return Figure(f"{race.name}: {one.recipe.name} after {after:.3g} s", mean(ends), "P@1", samples=ends)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Compete on every set and report."""
    command = parser(__doc__)
    command.add_argument("--only", help="sets whose name holds this")
    options = command.parse_args(argv)
    preset = TINY if options.tiny else FULL
    races = [race for race in preset.races if (options.only or "") in race.name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {race.name: compete(race, preset, options.tiny) for race in races}
    torch.set_num_threads(threads)
    curves = {
        name: [
            {"recipe": asdict(one.recipe), "curves": [[asdict(p) for p in points] for points in one.curves]}
            for one in trained
        ]
        for name, (_, trained) in results.items()
    }
    name = f"wide_labels, {races[0].name}" if options.only else "wide_labels"
    return report(name, options, [figure for figures, _ in results.values() for figure in figures], curves=curves)


if __name__ == "__main__":
    main()
