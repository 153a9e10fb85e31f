"""Say in one sentence what a fabric does to training, and whether two fabrics differ. Pure.

Two fabrics are compared by the ratio of their medians with a bootstrap interval (Efron & Tibshirani 1993, ch. 13) that
holds for all figures together with 95 % (Bonferroni). Of links the pairs are resampled and not the samples of a pair,
which are not independent.
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
NOISE = 0.05  # relative difference that means nothing: two measurements of the same fabric may differ by as much
SURE = 0.10  # largest relative difference in the interval of two fabrics that count as alike
# On each side: 7 and 7 samples can be split in 3,432 ways; fewer samples, in too few for that many figures at once.
MIN_SAMPLES = 7
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
Figure = tuple[str, str, bool]  # its name, its unit, whether larger is better
Operation = tuple[str, str, int, int]  # a collective's name, backend, number of nodes, and bytes
# Fields of a node's description that must be equal, so that a comparison shows the fabrics' difference alone.
COMPARABLE_FIELDS = ("cpu", "cores", "gpus", "torch", "threads")


@dataclass(frozen=True)
class _SampleSets:
    """The samples of one figure on one side.

    Attributes:
        values: The samples.
        divisors: Samples by whose median the values are divided, if any.
        cost: CPU seconds a byte, where moving bytes takes CPU time.
        busy: Busy processors on average while bytes move (CPU seconds over seconds).
    """

    values: Sequence[float]
    divisors: Sequence[float] = ()
    cost: float = 0.0
    busy: float = 0.0


class ComparisonOutcome(enum.StrEnum):
    """The result of comparing one figure."""

    NO_EFFECT = "no significant effect"
    DIFFERENT = "different"
    NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Difference:
    """One figure of two fabrics.

    Attributes:
        what: The figure's name.
        unit: Its unit: `s`, `B/s` or `x`.
        first: The first fabric's median.
        second: The second fabric's median.
        ratio: The second median over the first.
        low: Lower end of the ratio's interval.
        high: Upper end of the ratio's interval.
        spread: The larger of the two sides' interquartile ranges, over the median.
        cpu: How far processors differ and not the fabric, as a share: in CPU time for a byte, in their pace at the same
            step, or by what other work took of them on either side; of bytes on a link, as far as they are busy with
            them.
        larger_is_better: Whether a larger figure is better.
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
        """Return whether the difference is significant."""
        apart, beyond = _apart(self.first, self.second), self.low > 1 or self.high < 1
        if apart > NOISE and beyond and apart > self.spread + self.cpu:
            return ComparisonOutcome.DIFFERENT
        alike = not beyond or apart <= NOISE
        if alike and max(self.high - 1, 1 - self.low) <= SURE:
            return ComparisonOutcome.NO_EFFECT
        return ComparisonOutcome.NO_VERDICT

    @property
    def sentence(self) -> str:
        """The outcome as a sentence."""
        within = f"{_signed(self.low)} to {_signed(self.high)}"
        if self.outcome is ComparisonOutcome.NO_EFFECT:
            return f"{self.what}: no significant effect ({_signed(self.ratio)}; {within})"
        if self.outcome is ComparisonOutcome.NO_VERDICT and self.cpu > self.spread:
            return (
                f"{self.what}: no verdict, as processors differ by {self.cpu:.0%} (interval {within}) and the two by "
                f"{abs(self.ratio - 1):.0%}; measure again when the machines are idle"
            )
        if self.outcome is ComparisonOutcome.NO_VERDICT:
            return (
                f"{self.what}: no verdict, as samples spread by {self.spread:.0%} (interval {within}) and differ by "
                f"{abs(self.ratio - 1):.0%}; measure with --preset full"
            )
        better = (self.ratio > 1) == self.larger_is_better
        return f"{self.what}: the second is {abs(self.ratio - 1):.0%} {'better' if better else 'worse'} ({within})"


def sentence(fabric: Fabric) -> str:
    """Return a sentence on what a fabric does to training."""
    link = statistics.link_rate(fabric)
    costs = statistics.largest_world(statistics.costs(fabric))
    if link is None and len(fabric.nodes) > 1:
        return "No verdict: no node reaches another one; the faults say why."
    if link is None:
        return "No verdict: there is no second node to talk to; start more workers."
    where = f"Between these {len(fabric.nodes)} nodes, with links of {rate_text(link)},"
    if not costs:
        return f"{where} nothing was trained: what was left out says why."
    efficient = [cost for cost in costs if cost.efficiency >= ddp_cost.EFFICIENT]
    worst = min(costs, key=lambda cost: cost.efficiency)
    summary = f"{len(efficient)} of {len(costs)} trainings compute for at least {ddp_cost.EFFICIENT:.0%} of their steps"
    if len(efficient) == len(costs):
        return f"{where} {summary}: the network has no significant effect; a faster one would change little."
    needs = f"{title(worst)} gives {1 - worst.efficiency:.0%} of its step to the exchange"
    return f"{where} {summary}; {needs} and would need {rate_text(worst.needed)}."


def title(cost: TrainingCost) -> str:
    """Return a training's name: model, batch size and backend."""
    return f"{cost.of.model}, batch {cost.of.batch_size}, {cost.of.backend}"


def compare(first: Fabric, second: Fabric, seed: int = 0) -> list[Difference]:
    """Compare every figure that both fabrics have.

    Raises:
        JobError: The measurements cannot be compared; the message says which fields differ.
    """
    if differ := unlike(first, second):
        raise JobError(
            f"--compare: these cannot be compared, as {', '.join(differ)} differ; measure both with the same preset, "
            "nodes and versions"
        )
    rng = np.random.default_rng(seed)
    operations = _largest_common(first, second)
    ours, theirs = (_compared_samples(fabric, operations) for fabric in (first, second))
    both = [
        figure
        for figure in ours
        if min(len(side[figure].values) if figure in side else 0 for side in (ours, theirs)) >= MIN_SAMPLES
    ]
    cpu = _processors_apart(first, second)
    return [_difference(figure, ours[figure], theirs[figure], CHANCE / len(both), cpu, rng) for figure in both]


def overall(differences: Sequence[Difference]) -> str:
    """Return one sentence for all figures; training steps matter most."""
    by = {outcome: [d for d in differences if d.outcome is outcome] for outcome in ComparisonOutcome}
    if not differences:
        return "No verdict: the two have too few samples of the same figures; measure both with --preset full."
    if by[ComparisonOutcome.DIFFERENT]:
        most = max(by[ComparisonOutcome.DIFFERENT], key=lambda d: (d.what.startswith("step"), abs(np.log(d.ratio))))
        count = len(by[ComparisonOutcome.DIFFERENT])
        return f"The two differ in {count} of {len(differences)} figures, most of all: {most.sentence}."
    if len(by[ComparisonOutcome.NO_EFFECT]) * 2 >= len(differences):
        undecided = len(by[ComparisonOutcome.NO_VERDICT])
        but = f"; {undecided} cannot be decided" if undecided else ""
        return f"No significant effect in {len(by[ComparisonOutcome.NO_EFFECT])} of {len(differences)} figures{but}."
    if sum(d.cpu > d.spread for d in differences) * 2 > len(differences):
        return "No verdict: processors differ more than the two; measure both again when the machines are idle."
    return "No verdict: the samples spread more than the two differ; measure both again with --preset full."


def unlike(first: Fabric, second: Fabric) -> list[str]:
    """Return the properties in which two measurements differ, each with both values."""
    pairs: dict[str, tuple[object, object]] = {
        "preset": (first.about.get("preset"), second.about.get("preset")),
        "idletrain": (first.about.get("version"), second.about.get("version")),
        "number of nodes": (len(first.nodes), len(second.nodes)),
    }
    for field in COMPARABLE_FIELDS:
        pairs[field] = (_values(first.nodes, field), _values(second.nodes, field))
    return [f"{what} ({a} and {b})" for what, (a, b) in pairs.items() if a != b]


def _values(nodes: Sequence[Mapping[str, object]], field: str) -> str:
    return "; ".join(sorted({str(node.get(field)) for node in nodes}))


def _compared_samples(fabric: Fabric, operations: Collection[Operation]) -> dict[Figure, _SampleSets]:
    """Return the samples of every compared figure; of collectives only the given operations."""
    figures: dict[Figure, _SampleSets] = {}
    for training in fabric.training:
        if training.step:
            # Divided by the computation's time, as a processor that is slower today is not the fabric's effect.
            what = (
                f"step over computation, {training.model}, batch {training.batch_size}, {training.nodes} nodes, "
                f"{training.backend}"
            )
            figures[what, "x", False] = _SampleSets(training.step, training.compute)
    for cells in () if _sharing_cores(fabric) else fabric.stencil:
        if cells.nodes > 1:
            how = f"{cells.scaling}, exchange {'first' if cells.blocking else 'hidden'}"
            what = f"stencil step over computation, {how}, {cells.nodes} nodes, {cells.backend}"
            figures[what, "x", False] = _SampleSets(cells.step, cells.compute)
    for what, transport in COMPARED_POINTS:
        if points := statistics.points_of_kind(fabric, what, transport):
            time = what == "round trip"
            figures[f"{what} over {transport}", "s" if time else "B/s", not time] = _link_samples(points)
    for c in fabric.collectives:
        if _operation(c) in operations:
            what = f"{c.operation} of {c.moved_bytes / 1e6:g} MB, {c.nodes} nodes, {c.backend}"
            figures[what, "s", False] = _SampleSets(c.seconds)
    return figures


def _sharing_cores(fabric: Fabric) -> bool:
    """Return whether nodes share cores: a stencil's short steps then measure the kernel's scheduler, not links."""
    threads: Counter[object] = Counter()
    for node in fabric.nodes:
        threads[node["host"]] += node["threads"]
    return any(threads[node["host"]] > node["cores"] for node in fabric.nodes)


def _link_samples(points: Sequence[Point]) -> _SampleSets:
    """Return one value for each pair where there are enough pairs, else all samples of all pairs."""
    moving = [p for p in points if p.moved_bytes]
    cost = median([p.cpu_seconds / p.moved_bytes for p in moving]) if moving else 0.0
    busy = median([p.cpu_seconds / p.moved_bytes * statistics.rate(p) for p in moving]) if moving else 0.0
    values = [median(p.samples) if p.what == "round trip" else statistics.rate(p) for p in points]
    return _SampleSets(
        values if len(values) >= MIN_SAMPLES else [s for point in points for s in point.samples], cost=cost, busy=busy
    )


def _largest_common(first: Fabric, second: Fabric) -> set[Operation]:
    """Return of every collective operation the largest size that both fabrics have."""
    both = {_operation(c) for c in first.collectives} & {_operation(c) for c in second.collectives}
    return {key for key in both if key[-1] == max(other[-1] for other in both if other[:-1] == key[:-1])}


def _operation(sample: CollectiveSample) -> Operation:
    return sample.operation, sample.backend, sample.nodes, sample.moved_bytes


def _difference(
    figure: Figure, ours: _SampleSets, theirs: _SampleSets, chance: float, cpu: float, rng: np.random.Generator
) -> Difference:
    """Compare one figure, with an interval that misses the true ratio with probability `chance`.

    Args:
        figure: What is compared.
        ours: The first fabric's samples.
        theirs: The second fabric's samples.
        chance: Probability.
        cpu: How far processors differ, as a share.
        rng: Draws the samples.
    """
    ratios = _resampled_medians(theirs, rng) / _resampled_medians(ours, rng)
    low, high = np.quantile(ratios, (chance / 2, 1 - chance / 2))
    a, b = (median(side.values) / (median(side.divisors) if side.divisors else 1.0) for side in (ours, theirs))
    spread = max(
        statistics.spread(samples) for side in (ours, theirs) for samples in (side.values, side.divisors) if samples
    )
    what, unit, better = figure
    if theirs.cost and ours.cost:  # what takes little of the processors does not wait for them either
        cpu = max(cpu, _apart(ours.cost, theirs.cost)) * min(1.0, max(ours.busy, theirs.busy))
    return Difference(what, unit, a, b, b / a, float(low), float(high), spread, cpu, better)


def _processors_apart(first: Fabric, second: Fabric) -> float:
    """Return by how much the processors' speed may have differed between two measurements, as a share of the larger.

    That is what other work took of any node in either measurement, or the difference in the pace of the same steps; 0
    where neither is more than noise.
    """
    nodes = (*first.nodes, *second.nodes)
    others = max((float(node.get("others_share") or 0.0) for node in nodes), default=0.0)
    paces = [
        {
            "pace": [float(node["pace_seconds"]) for node in fabric.nodes if "pace_seconds" in node],
            **{(t.backend, t.model, t.nodes, t.batch_size): t.compute for t in fabric.training},
        }
        for fabric in (first, second)
    ]
    both = [(paces[0][key], paces[1][key]) for key in paces[0].keys() & paces[1].keys()]
    most = max([others, *(_apart(median(a), median(b)) for a, b in both if len(a) and len(b))])
    return most if most > NOISE else 0.0


def _apart(first: float, second: float) -> float:
    """Return the difference of two positive figures over the larger one, the same in whichever order they come."""
    return 1 - min(first, second) / max(first, second)


def _resampled_medians(sets: _SampleSets, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the medians `[RESAMPLES]` of values drawn with replacement, over those of the divisors."""
    drawn = [
        rng.choice(np.asarray(samples), size=(RESAMPLES, len(samples)))
        for samples in (sets.values, sets.divisors)
        if samples
    ]
    medians = [np.asarray(np.median(samples, axis=1), np.float64) for samples in drawn]
    return medians[0] / medians[1] if len(medians) > 1 else medians[0]


def rate_text(bytes_per_second: float) -> str:
    """Format a link's speed in Gbit/s or Mbit/s."""
    gbit = bytes_per_second / GBIT
    return f"{gbit:.3g} Gbit/s" if gbit >= 1 else f"{gbit * 1000:.3g} Mbit/s"


def _signed(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"
