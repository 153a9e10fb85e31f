"""Choose the units to keep, swap and recompute by local search, started from every single technique. Pure.

The search space and the objective are KARMA's (arXiv 2008.11421). The paper solves a mixed-integer program; here a
simulated step takes a fraction of a millisecond, and a few hundred of them reach the optimum or come close.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from idletrain.errors import RunError
from idletrain.nn.outofcore.planning.profile import Profile, Unit, micro_batch
from idletrain.nn.outofcore.planning.segments import Segment
from idletrain.nn.outofcore.planning.simulate import Footprint, SimulatedStep, simulate

RESERVE = (
    0.10  # of the budget kept free for the allocator and code between units; the bench outofcore measures the error
)
EVALUATIONS = 800  # simulated steps per search: 0.2 s for 50 units
ENOUGH = 1.002  # times a step that never waits: closer is below a profile's accuracy, so the search stops
LIKELY = 1.5  # times the plan's predicted seconds; a step took up to 1.75 times what was predicted
CANDIDATES = 3  # single techniques that are worth a trial beside the plan
APART = ("micro-batches", "parameters streamed")  # techniques that are no modes of units alone

UnitModes = tuple[str, ...]


class InfeasibleError(RunError):
    """No plan fits the budget; `least_bytes` is the smallest budget for which there is a plan."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True, slots=True)
class Technique:
    """The best plan of a single technique: predicted seconds and peak, and the bytes by which it exceeds the budget."""

    name: str
    unit_modes: UnitModes
    seconds: float
    peak_bytes: int
    shortfall_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A plan of one step out of core.

    Attributes:
        unit_modes: A mode letter for each unit (see `simulate`).
        micro_batches: Number of equal parts that the batch is cut into.
        streamed: Whether parameters and optimizer state are loaded a segment at a time.
        seconds: Predicted time of the whole step.
        peak_bytes: Predicted peak, resident bytes included.
        budget_bytes: Memory that the step may take; a tenth of it is kept free.
        techniques: The best plan of every single technique, for comparison.
        notes: Techniques that were not considered, and why.
    """

    unit_modes: UnitModes
    micro_batches: int
    streamed: bool
    seconds: float
    peak_bytes: int
    budget_bytes: int
    techniques: tuple[Technique, ...] = ()
    notes: tuple[str, ...] = ()

    def footprint(self, profile: Profile) -> Footprint:
        """Return the plan's segments and limits for the network of `profile`."""
        part = micro_batch(profile, self.micro_batches) if self.micro_batches > 1 else profile
        return Footprint(part.units, self.unit_modes, usable(self.budget_bytes), part.resident_bytes, self.streamed)


def usable(budget_bytes: int) -> int:
    """Return the part of a budget that a plan may use."""
    return int(budget_bytes * (1 - RESERVE))


def make_memory_plan(
    profile: Profile, budget_bytes: int, *, micro_batches: bool = False, stream: bool = True
) -> MemoryPlan:
    """Find the quickest plan that fits a budget.

    Args:
        profile: The network.
        budget_bytes: Memory for a whole step.
        micro_batches: Whether the batch may be cut, which changes the order of sums and so the last bits.
        stream: Whether parameters and optimizer state may be streamed.

    Raises:
        InfeasibleError: no plan fits; names the smallest budget for which there is one.
    """
    search = _Search(profile, budget_bytes, streamed=False)
    techniques = [*search.techniques(), *_in_micro_batches(profile, budget_bytes)]
    best, streamed, count = search.best(), False, 1
    if stream and _streamable(profile):
        streaming = _Search(profile, budget_bytes, streamed=True)
        in_core = streaming.simulated(_uniform(profile.units, "K"))
        techniques.append(_technique("parameters streamed", _uniform(profile.units, "K"), in_core))
        if best.shortfall_bytes or in_core.cost < search.cost(best.unit_modes):
            candidate = streaming.best()
            best, streamed = (candidate, True) if _cost(candidate) < _cost(best) else (best, False)
    notes = [f"micro-batches: {why}" for why in _why_uncut(profile, micro_batches)]
    divided = techniques_named(techniques, "micro-batches")
    if not notes and divided and _cost(divided) < _cost(best):
        best, streamed, count = divided, False, _count_of(divided)
    if best.shortfall_bytes:
        raise _infeasible(profile, budget_bytes, stream)
    return MemoryPlan(
        best.unit_modes,
        count,
        streamed,
        best.seconds,
        best.peak_bytes,
        budget_bytes,
        tuple(replace(t, name=t.name.split(" x")[0]) for t in techniques),
        tuple(notes),
    )


def candidate_plans(plan: MemoryPlan) -> list[MemoryPlan]:
    """Return the single techniques that may be quicker than a plan, as predictions err: the quickest first."""
    if set(plan.unit_modes) == {"K"} and not plan.streamed:
        return []
    found: dict[UnitModes, MemoryPlan] = {}
    for t in sorted(plan.techniques, key=lambda t: t.seconds):
        is_same = t.unit_modes == plan.unit_modes and not plan.streamed
        if t.name in APART or is_same or t.shortfall_bytes or t.seconds > LIKELY * plan.seconds:
            continue
        own = replace(
            plan, unit_modes=t.unit_modes, streamed=False, seconds=t.seconds, peak_bytes=t.peak_bytes, micro_batches=1
        )
        found.setdefault(t.unit_modes, own)
    return list(found.values())[:CANDIDATES]


def _why_uncut(profile: Profile, allowed: bool) -> list[str]:
    if profile.across_batch:
        return [f"not possible, {profile.across_batch}"]
    if allowed:
        return []
    return ["not allowed, as they sum gradients in another order and change the last bits (training.micro_batch)"]


def _streamable(profile: Profile) -> bool:
    return any(unit.parameter_bytes for unit in profile.units)


def _cost(technique: Technique) -> tuple[int, float]:
    return technique.shortfall_bytes, technique.seconds


def techniques_named(techniques: Iterable[Technique], name: str) -> Technique | None:
    """Return the first technique whose name starts with `name`, or None."""
    return next((technique for technique in techniques if technique.name.startswith(name)), None)


def least_bytes(profile: Profile, *, stream: bool = True) -> int:
    """Return the smallest budget in bytes for which there is a plan."""
    variants = {False, stream and _streamable(profile)}
    peaks = [_Search(profile, 0, streamed=streamed).best().peak_bytes for streamed in variants]
    least = int(min(peaks) / (1 - RESERVE)) + 1
    while usable(least) < min(peaks):  # rounding may leave it a byte short
        least += 1
    return least


def _infeasible(profile: Profile, budget_bytes: int, stream: bool) -> InfeasibleError:
    least = least_bytes(profile, stream=stream)
    widest = max(profile.units, key=lambda unit: max(unit.saving_bytes, unit.backward_bytes) + unit.input_bytes)
    return InfeasibleError(
        f"no plan fits {_mib(budget_bytes)}: the smallest budget that one fits is {-(-least // 2**20)} MiB "
        f"(unit {widest.name} alone needs {_mib(max(widest.saving_bytes, widest.backward_bytes))}); "
        "give more memory, a smaller batch or smaller units (memory.units)",
        least,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class _Search:
    """Searches plans for one profile and budget."""

    def __init__(self, profile: Profile, budget_bytes: int, *, streamed: bool) -> None:
        self._profile, self._units, self._budget, self._streamed = profile, profile.units, budget_bytes, streamed
        self._simulated: dict[UnitModes, SimulatedStep] = {}
        self._segments: dict[object, Segment] = {}
        self._good_enough = (0, ENOUGH * profile.compute_seconds)

    def simulated(self, unit_modes: UnitModes) -> SimulatedStep:
        step = self._simulated.get(unit_modes)
        if step is None:
            budget, resident = usable(self._budget), self._profile.resident_bytes
            footprint = Footprint(self._units, unit_modes, budget, resident, self._streamed, self._segments)
            step = self._simulated[unit_modes] = simulate(footprint, self._profile.link)
        return step

    def cost(self, unit_modes: UnitModes) -> tuple[int, float]:
        return self.simulated(unit_modes).cost

    def techniques(self) -> list[Technique]:
        """Return the best plan of every single technique."""
        return [
            _technique(name, *min(((c, self.simulated(c)) for c in choices), key=lambda pair: pair[1].cost))
            for name, choices in singles(self._units).items()
        ]

    def best(self) -> Technique:
        """Climb from every single technique, the most promising first, and return the best plan."""
        seeds = sorted((c for choices in singles(self._units).values() for c in choices), key=self.cost)
        until, best = len(self._simulated) + EVALUATIONS, seeds[0]
        for start in dict.fromkeys(seeds):
            best = min(best, self._climb(start, until), key=self.cost)
            if len(self._simulated) >= until or self.cost(best) <= self._good_enough:
                break
        if self._budget and self.cost(best)[0]:  # in a tight budget, also climb from the plan of the lowest peak
            lean = _Search(self._profile, 0, streamed=self._streamed).best().unit_modes
            best = min(best, self._climb(lean, len(self._simulated) + EVALUATIONS), key=self.cost)
        return _technique("joint", best, self.simulated(best))

    def _climb(self, unit_modes: UnitModes, until: int) -> UnitModes:
        """Try all moves in turn, taking each that lowers the cost, until none does."""
        moves = list(_moves(len(unit_modes)))
        best, idle = self.cost(unit_modes), 0
        for move in itertools.cycle(moves):
            if idle == len(moves) or len(self._simulated) >= until or best <= self._good_enough:
                break
            candidate = legal(self._units, _moved(unit_modes, move))
            idle += 1
            if (cost := self.cost(candidate)) < best:
                unit_modes, best, idle = candidate, cost, 0
        return unit_modes


def singles(units: Sequence[Unit]) -> dict[str, list[UnitModes]]:
    """Return the candidate plans of every single technique, by its name."""
    n = len(units)
    tails = range(1, n)
    return {
        "in-core": [_uniform(units, "K")],
        "swap all": [_uniform(units, "S")],
        "recompute all": [_uniform(units, "R")],
        "recompute segments": [_runs(units, "R", length, n) for length in range(2, n + 1)] or [_uniform(units, "R")],
        "recompute all, inputs swapped": [_runs(units, "Q", length, n) for length in range(1, n + 1)],
        "swap, keep the tail": [_runs(units, "S", 1, k) for k in tails] or [_uniform(units, "S")],
        "recompute, keep the tail": [_runs(units, "R", 1, k) for k in tails] or [_uniform(units, "R")],
    }


def _uniform(units: Sequence[Unit], mode: str) -> UnitModes:
    return _runs(units, mode, 1, len(units))


def _runs(units: Sequence[Unit], mode: str, length: int, until: int) -> UnitModes:
    """Use `mode` in segments of `length` up to unit `until`, then keep."""
    return legal(units, ["K" if i >= until else "m" if i % length else mode for i in range(len(units))])


def legal(units: Sequence[Unit], unit_modes: Sequence[str]) -> UnitModes:
    """Replace the modes that a unit does not allow."""
    result: list[str] = []
    for unit, letter in zip(units, unit_modes, strict=True):
        if letter == "m":
            joins = result and unit.follows and result[-1] in "RQm" and "R" in unit.modes
            letter = "m" if joins else "R"  # noqa: PLW2901 (replaced by an allowed mode)
        result.append(letter if letter == "m" or letter in unit.modes else "K")
    return tuple(result)


ModeChange = tuple[tuple[int, str | int], ...]  # (unit, its new mode, or the unit whose mode it takes)


def _moves(n: int) -> Iterator[ModeChange]:
    """Yield the moves of the search: change one mode, change two adjacent ones, or exchange two."""
    for i, letter in itertools.product(range(n), "KSRQm"):
        yield ((i, letter),)
    for i, (first, second) in itertools.product(range(n - 1), itertools.product("KSRQm", repeat=2)):
        yield (i, first), (i + 1, second)
    for i, j in itertools.combinations(range(n), 2):
        yield (i, j), (j, i)


def _moved(unit_modes: UnitModes, move: ModeChange) -> list[str]:
    result = list(unit_modes)
    for i, mode in move:
        result[i] = unit_modes[mode] if isinstance(mode, int) else mode
    return result


def _in_micro_batches(profile: Profile, budget_bytes: int) -> list[Technique]:
    """Return the plan that keeps everything in the fewest micro-batches that fit, or in the most there can be."""
    techniques: list[Technique] = []
    unit_modes, count = _uniform(profile.units, "K"), 2
    while not profile.across_batch and count <= profile.batch_size:
        outcome = _Search(micro_batch(profile, count), budget_bytes, streamed=False).simulated(unit_modes)
        technique = _technique(f"micro-batches x{count}", unit_modes, outcome)
        techniques = [replace(technique, seconds=count * outcome.seconds)]
        if not outcome.shortfall_bytes:
            break
        count *= 2
    return techniques


def _count_of(technique: Technique) -> int:
    return int(technique.name.rpartition("x")[2])


def _technique(name: str, unit_modes: UnitModes, outcome: SimulatedStep) -> Technique:
    return Technique(name, unit_modes, outcome.seconds, outcome.peak_bytes, outcome.shortfall_bytes)
