"""What a fabric does to training in one sentence, and whether two fabrics differ. Pure.

Two fabrics are compared by the ratio of their medians with a bootstrap interval (Efron & Tibshirani 1993, ch. 13) that
holds for all figures together with 95 % (Bonferroni). What was sampled once is resampled: samples of a pair are no
independent looks at a fabric, pairs are.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from idletrain.errors import JobError
from idletrain.fabric.analysis import ddp_cost, statistics
from idletrain.fabric.analysis.samples import CollectiveSample, Fabric, Point
from idletrain.fabric.analysis.statistics import TrainingCost, median

RESAMPLES = 2000
CHANCE = 0.05  # that any interval of a comparison misses
# What two measurements of the same fabric may differ by without meaning anything, as a rate may be off by as much; also
# how sure one has to be to call two fabrics alike.
NOISE, SURE = 0.05, 0.10
# Of each side: seven and seven can be dealt in 3,432 ways, fewer in too few to be sure of that many figures at once.
LEAST_SAMPLES = 7
GBIT = 1e9 / 8
COMPARED_POINTS = (
    ("round trip", "socket"),
    ("one way", "socket"),
    ("both ways", "socket"),
    ("one way", "dask"),
    ("one way", "dask tls"),
    ("one way", "pull"),
    ("one way", "push"),
)
Figure = tuple[str, str, bool]  # what it is of, its unit, whether more is better
Operation = tuple[str, str, int, int]  # which, over what, of how many nodes, and its size
# Of a node's description, what must be the same for a comparison to be of fabrics and nothing else.
ALIKE = ("cpu", "cores", "gpus", "torch", "threads")


@dataclass(frozen=True)
class _SampleSets:
    """Of a figure.

    Attributes:
        each: What was seen.
        by: By the median of what it counts, if any.
        cpu: How much of the time processors worked, of what costs that.
    """

    each: Sequence[float]
    by: Sequence[float] = ()
    cpu: float = 0.0


class ComparisonOutcome(enum.StrEnum):
    """What a comparison of one figure comes to."""

    NO_EFFECT = "no significant effect"
    DIFFERENT = "different"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Difference:
    """One figure of two fabrics.

    Attributes:
        ratio: The second's median over the first's.
        low: Of the ratio's interval.
        high: Likewise.
        spread: Between the middle halves of either's samples, the larger, as a share of the median.
        cpu: How much more of the time processors took on one side: the same work, so they were slower, not the fabric.
        larger_is_better: Of the figure.
    """

    what: str
    unit: str
    first: float
    second: float
    ratio: float
    low: float
    high: float
    spread: float
    cpu: float
    larger_is_better: bool

    @property
    def outcome(self) -> ComparisonOutcome:
        """Whether there is a difference that means something."""
        apart, beyond = abs(self.ratio - 1), self.low > 1 or self.high < 1
        if apart > NOISE and beyond and apart > max(self.spread, self.cpu):
            return ComparisonOutcome.DIFFERENT
        alike = not beyond or apart <= NOISE
        if alike and max(self.high - 1, 1 - self.low) <= SURE:
            return ComparisonOutcome.NO_EFFECT
        return ComparisonOutcome.NO_VERDICT

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        within = f"{_signed(self.low)} to {_signed(self.high)}"
        if self.outcome is ComparisonOutcome.NO_EFFECT:
            return f"{self.what}: no significant effect ({_signed(self.ratio)}; {within})"
        if self.outcome is ComparisonOutcome.NO_VERDICT and self.cpu > self.spread:
            return (
                f"{self.what}: no verdict, as processors differ by {self.cpu:.0%} of the time (interval {within}) and "
                f"the two by {abs(self.ratio - 1):.0%}; measure again when the machines are idle"
            )
        if self.outcome is ComparisonOutcome.NO_VERDICT:
            return (
                f"{self.what}: no verdict, as samples spread by {self.spread:.0%} (interval {within}) and differ by "
                f"{abs(self.ratio - 1):.0%}; measure with --preset full"
            )
        better = (self.ratio > 1) == self.larger_is_better
        return f"{self.what}: the second is {abs(self.ratio - 1):.0%} {'better' if better else 'worse'} ({within})"


def sentence(fabric: Fabric) -> str:
    """What a fabric does to training."""
    link = statistics.link_rate(fabric)
    costs = statistics.largest_world(statistics.costs(fabric))
    if link is None and len(fabric.nodes) > 1:
        return "No verdict: no node reaches another one; the faults say why."
    if link is None:
        return "No verdict: there is no second node to talk to; start more workers."
    here = f"Between these {len(fabric.nodes)} nodes, with links of {rate_text(link)},"
    if not costs:
        return f"{here} nothing was trained: what was left out says why."
    best = [cost for cost in costs if cost.efficiency >= ddp_cost.EFFICIENT]
    worst = min(costs, key=lambda cost: cost.efficiency)
    told = f"{len(best)} of {len(costs)} trainings keep {ddp_cost.EFFICIENT:.0%} of their steps for arithmetic"
    if len(best) == len(costs):
        return f"{here} {told}: the network has no significant effect; a faster one would change little."
    needs = f"{title(worst)} gives {1 - worst.efficiency:.0%} of its step to the exchange"
    return f"{here} {told}; {needs} and would need {rate_text(worst.needed)}."


def title(cost: TrainingCost) -> str:
    """A training's name."""
    return f"{cost.of.model}, batch {cost.of.batch_size}, {cost.of.backend}"


def compare(first: Fabric, second: Fabric, seed: int = 0) -> list[Difference]:
    """Every figure that both have.

    Raises:
        JobError: they are runs that cannot be compared; says which fields differ.
    """
    if differ := unlike(first, second):
        raise JobError(
            f"--compare: these are unlike runs, as {', '.join(differ)} differ; measure both with the same preset, "
            "nodes and versions"
        )
    chance = np.random.default_rng(seed)
    operations = _largest_common(first, second)
    mine, theirs = (_compared_samples(fabric, operations) for fabric in (first, second))
    both = [
        of for of in mine if min(len(side[of].each) if of in side else 0 for side in (mine, theirs)) >= LEAST_SAMPLES
    ]
    return [_difference(of, mine[of], theirs[of], CHANCE / len(both), chance) for of in both]


def overall(differences: Sequence[Difference]) -> str:
    """One sentence for all figures, those of training first of all."""
    by = {outcome: [d for d in differences if d.outcome is outcome] for outcome in ComparisonOutcome}
    if not differences:
        return "No verdict: the two have too few samples of the same figures; measure both with --preset full."
    if by[ComparisonOutcome.DIFFERENT]:
        most = max(by[ComparisonOutcome.DIFFERENT], key=lambda d: (d.what.startswith("step"), abs(np.log(d.ratio))))
        count = len(by[ComparisonOutcome.DIFFERENT])
        return f"The two differ in {count} of {len(differences)} figures, most of all: {most.sentence}."
    if len(by[ComparisonOutcome.NO_EFFECT]) * 2 >= len(differences):
        undecided = len(by[ComparisonOutcome.NO_VERDICT])
        but = f"; of {undecided} nothing can be said" if undecided else ""
        return f"No significant effect in {len(by[ComparisonOutcome.NO_EFFECT])} of {len(differences)} figures{but}."
    return "No verdict: the samples spread more than the two differ; measure both again with --preset full."


def unlike(first: Fabric, second: Fabric) -> list[str]:
    """What makes two runs unlike, each with both values."""
    pairs: dict[str, tuple[object, object]] = {
        "preset": (first.about.get("preset"), second.about.get("preset")),
        "idletrain": (first.about.get("version"), second.about.get("version")),
        "number of nodes": (len(first.nodes), len(second.nodes)),
    }
    for field in ALIKE:
        pairs[field] = (_values(first.nodes, field), _values(second.nodes, field))
    return [f"{what} ({a} and {b})" for what, (a, b) in pairs.items() if a != b]


def _values(nodes: Sequence[Mapping[str, object]], field: str) -> str:
    return "; ".join(sorted({str(node.get(field)) for node in nodes}))


def _compared_samples(fabric: Fabric, operations: Collection[Operation]) -> dict[Figure, _SampleSets]:
    """Samples of every figure that counts; of collectives those of the given sizes."""
    found: dict[Figure, _SampleSets] = {}
    for one in fabric.training:
        if one.step:
            # By their arithmetic: a processor that is slower today is not the fabric's doing.
            what = f"step over arithmetic, {one.model}, batch {one.batch_size}, {one.nodes} nodes, {one.backend}"
            found[what, "x", False] = _SampleSets(one.step, one.compute)
    for cells in () if _sharing_cores(fabric) else fabric.stencil:
        if cells.nodes > 1:
            how = f"{cells.scaling}, exchange {'first' if cells.blocking else 'hidden'}"
            what = f"stencil step over arithmetic, {how}, {cells.nodes} nodes, {cells.backend}"
            found[what, "x", False] = _SampleSets(cells.step, cells.compute)
    for what, over in COMPARED_POINTS:
        if points := statistics.points_of_kind(fabric, what, over):
            time = what == "round trip"
            found[f"{what} over {over}", "s" if time else "B/s", not time] = _of_points(points)
    for c in fabric.collectives:
        if _operation(c) in operations:
            what = f"{c.operation} of {c.moved_bytes / 1e6:g} MB, {c.nodes} nodes, {c.backend}"
            found[what, "s", False] = _SampleSets(c.seconds)
    return found


def _sharing_cores(fabric: Fabric) -> bool:
    """Whether nodes wait for one another's cores: a stencil's short steps then tell of the scheduler, not of links."""
    wanted: Counter[object] = Counter()
    for node in fabric.nodes:
        wanted[node["host"]] += node["threads"]
    return any(wanted[node["host"]] > node["cores"] for node in fabric.nodes)


def _of_points(points: Sequence[Point]) -> _SampleSets:
    """A figure for each pair where there are enough pairs, else what those are made of."""
    cpu = median([p.cpu_seconds * statistics.rate(p) / p.moved_bytes if p.moved_bytes else 0.0 for p in points])
    each = [median(p.samples) if p.what == "round trip" else statistics.rate(p) for p in points]
    return _SampleSets(each if len(each) >= LEAST_SAMPLES else [s for point in points for s in point.samples], cpu=cpu)


def _largest_common(first: Fabric, second: Fabric) -> set[Operation]:
    """Of every collective operation the largest size that both have."""
    both = {_operation(c) for c in first.collectives} & {_operation(c) for c in second.collectives}
    return {one for one in both if one[-1] == max(other[-1] for other in both if other[:-1] == one[:-1])}


def _operation(of: CollectiveSample) -> Operation:
    return of.operation, of.backend, of.nodes, of.moved_bytes


def _difference(
    of: Figure, own: _SampleSets, theirs: _SampleSets, missing: float, chance: np.random.Generator
) -> Difference:
    """A figure's, with an interval that misses with that chance."""
    ratios = _resampled(theirs, chance) / _resampled(own, chance)
    low, high = np.quantile(ratios, (missing / 2, 1 - missing / 2))
    a, b = (median(side.each) / (median(side.by) if side.by else 1.0) for side in (own, theirs))
    wide = max(statistics.spread(some) for side in (own, theirs) for some in (side.each, side.by) if some)
    what, unit, better = of
    return Difference(what, unit, a, b, b / a, float(low), float(high), wide, abs(theirs.cpu - own.cpu), better)


def _resampled(samples: _SampleSets, chance: np.random.Generator) -> NDArray[np.float64]:
    """Medians of as many samples, drawn with replacement, by those of what they count by."""
    drawn = [chance.choice(np.asarray(one), size=(RESAMPLES, len(one))) for one in (samples.each, samples.by) if one]
    medians = [np.asarray(np.median(one, axis=1), np.float64) for one in drawn]
    return medians[0] / medians[1] if len(medians) > 1 else medians[0]


def rate_text(bytes_per_second: float) -> str:
    """A link's speed as people say it."""
    gbit = bytes_per_second / GBIT
    return f"{gbit:.3g} Gbit/s" if gbit >= 1 else f"{gbit * 1000:.3g} Mbit/s"


def _signed(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
