"""Which units to keep, swap and recompute: local search over letters, from every single technique on. Pure.

The search space and the aim are KARMA's (arXiv 2008.11421); the paper solves it as a mixed-integer program, here a
simulated step takes a fraction of a millisecond, and a few hundred of them end at or next to the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from idletrain.errors import RunError
from idletrain.nn.outofcore.planning.profile import Profile, Unit, micro_batch
from idletrain.nn.outofcore.planning.simulate import Footprint, Segment, SimulatedStep, simulate

RESERVE = 0.10  # of the budget, for the allocator and what runs between units; RESULTS tells how far peaks were off
EVALUATIONS = 800  # simulated steps of one search: half a second for 50 units
ENOUGH = 1.002  # times a step that never waits: what could still be won is less than a profile knows

UnitModes = tuple[str, ...]


class InfeasibleError(RunError):
    """No plan fits; `least_bytes` is the smallest budget that one fits."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True, slots=True)
class Technique:
    """A single technique: its best plan, predicted seconds and peak, and by how much it exceeds the budget."""

    name: str
    unit_modes: UnitModes
    seconds: float
    peak_bytes: int
    shortfall_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How one step is to be run.

    Attributes:
        letters: One per unit (see `simulate`).
        micro_batches: Equal parts that the batch is cut into.
        streamed: Whether parameters and optimizer state are brought in a segment at a time.
        seconds: Predicted, of the whole step.
        peak_bytes: Predicted, resident bytes included.
        budget_bytes: What the step may take; a tenth of it is left free.
        techniques: Every single technique beside it.
        notes: What was not considered, and why.
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
        """Its segments and limits, for the network of `profile`."""
        part = micro_batch(profile, self.micro_batches) if self.micro_batches > 1 else profile
        return Footprint(part.units, self.unit_modes, usable(self.budget_bytes), part.resident_bytes, self.streamed)


def usable(budget_bytes: int) -> int:
    """What a plan may count with."""
    return int(budget_bytes * (1 - RESERVE))


def make_memory_plan(
    profile: Profile, budget_bytes: int, *, micro_batches: bool = False, stream: bool = True
) -> MemoryPlan:
    """The quickest plan that fits.

    Args:
        profile: The network.
        budget_bytes: For all that a step takes.
        micro_batches: Whether the batch may be cut, which changes the order of sums and so the last bits.
        stream: Whether parameters and optimizer state may be streamed.

    Raises:
        InfeasibleError: nothing fits; says the smallest budget that does.
    """
    search = _Search(profile, budget_bytes, streamed=False)
    techniques = [*search.techniques(), *_cut(profile, budget_bytes)]
    best, streamed, count = search.best(), False, 1
    if stream and _streamable(profile):
        streaming = _Search(profile, budget_bytes, streamed=True)
        kept = streaming.simulated(_uniform(profile.units, "K"))
        techniques.append(_technique("parameters streamed", _uniform(profile.units, "K"), kept))
        if best.shortfall_bytes or kept.cost < search.cost(best.unit_modes):
            other = streaming.best()
            best, streamed = (other, True) if _cost(other) < _cost(best) else (best, False)
    notes = [f"micro-batches: {why}" for why in _why_whole(profile, micro_batches)]
    cut = techniques_named(techniques, "micro-batches")
    if not notes and cut and _cost(cut) < _cost(best):
        best, streamed, count = cut, False, _count_of(cut)
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


def _why_whole(profile: Profile, allowed: bool) -> list[str]:
    if profile.across_batch:
        return [f"not possible, {profile.across_batch}"]
    return [] if allowed else ["not allowed, they add gradients up in another order and change the last bits"]


def _streamable(profile: Profile) -> bool:
    return any(unit.parameter_bytes for unit in profile.units)


def _cost(technique: Technique) -> tuple[int, float]:
    return technique.shortfall_bytes, technique.seconds


def techniques_named(techniques: Iterable[Technique], name: str) -> Technique | None:
    """The first technique whose name starts so."""
    return next((technique for technique in techniques if technique.name.startswith(name)), None)


def least_bytes(profile: Profile, *, stream: bool = True) -> int:
    """The smallest budget that some plan fits."""
    ways = {False, stream and _streamable(profile)}
    peaks = [_Search(profile, 0, streamed=streamed).best().peak_bytes for streamed in ways]
    least = int(min(peaks) / (1 - RESERVE)) + 1
    while usable(least) < min(peaks):  # the last unit of rounding
        least += 1
    return least


def _infeasible(profile: Profile, budget_bytes: int, stream: bool) -> InfeasibleError:
    least = least_bytes(profile, stream=stream)
    widest = max(profile.units, key=lambda unit: max(unit.saving_bytes, unit.backward_bytes) + unit.input_bytes)
    return InfeasibleError(
        f"no plan fits {_mib(budget_bytes)}: the smallest budget that one fits is {-(-least // 2**20)} MiB "
        f"(unit {widest.name} alone works on {_mib(max(widest.saving_bytes, widest.backward_bytes))}); "
        "give more memory, a smaller batch or smaller units (memory.units)",
        least,
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class _Search:
    """Local search for one profile and budget."""

    def __init__(self, profile: Profile, budget_bytes: int, *, streamed: bool) -> None:
        self._profile, self._units, self._budget, self._streamed = profile, profile.units, budget_bytes, streamed
        self._seen: dict[UnitModes, SimulatedStep] = {}
        self._known: dict[object, Segment] = {}
        self._bound = (0, ENOUGH * profile.compute_seconds)

    def simulated(self, unit_modes: UnitModes) -> SimulatedStep:
        found = self._seen.get(unit_modes)
        if found is None:
            budget, resident = usable(self._budget), self._profile.resident_bytes
            footprint = Footprint(self._units, unit_modes, budget, resident, self._streamed, self._known)
            found = self._seen[unit_modes] = simulate(footprint, self._profile.link)
        return found

    def cost(self, unit_modes: UnitModes) -> tuple[int, float]:
        return self.simulated(unit_modes).cost

    def techniques(self) -> list[Technique]:
        """The best of every single technique."""
        return [
            _technique(name, *min(((c, self.simulated(c)) for c in choices), key=lambda pair: pair[1].cost))
            for name, choices in singles(self._units).items()
        ]

    def best(self) -> Technique:
        """The best that is found from every single technique on, the most promising first."""
        seeds = sorted((c for choices in singles(self._units).values() for c in choices), key=self.cost)
        until, found = len(self._seen) + EVALUATIONS, seeds[0]
        for start in dict.fromkeys(seeds):
            found = min(found, self._climb(start, until), key=self.cost)
            if len(self._seen) >= until or self.cost(found) <= self._bound:
                break
        if self._budget and self.cost(found)[0]:  # where little fits, the way there leads past what fits least of all
            lean = _Search(self._profile, 0, streamed=self._streamed).best().unit_modes
            found = min(found, self._climb(lean, len(self._seen) + EVALUATIONS), key=self.cost)
        return _technique("joint", found, self.simulated(found))

    def _climb(self, unit_modes: UnitModes, until: int) -> UnitModes:
        """Take every move that helps, in turn, until none of them does."""
        moves = list(_moves(len(unit_modes)))
        best, idle = self.cost(unit_modes), 0
        for move in itertools.cycle(moves):
            if idle == len(moves) or len(self._seen) >= until or best <= self._bound:
                break
            candidate = legal(self._units, _moved(unit_modes, move))
            idle += 1
            if (cost := self.cost(candidate)) < best:
                unit_modes, best, idle = candidate, cost, 0
        return unit_modes


def singles(units: Sequence[Unit]) -> dict[str, list[UnitModes]]:
    """Every single technique as the plans it has to choose from."""
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
    """`mode` in segments of `length` up to unit `until`, then keep."""
    return legal(units, ["K" if i >= until else "m" if i % length else mode for i in range(len(units))])


def legal(units: Sequence[Unit], unit_modes: Sequence[str]) -> UnitModes:
    """The letters with those that a unit does not allow replaced."""
    made: list[str] = []
    for unit, letter in zip(units, unit_modes, strict=True):
        if letter == "m":
            joins = made and unit.follows and made[-1] in "RQm" and "R" in unit.modes
            letter = "m" if joins else "R"  # noqa: PLW2901 (the letter that stands for it)
        made.append(letter if letter == "m" or letter in unit.modes else "K")
    return tuple(made)


LetterChange = tuple[tuple[int, str | int], ...]  # where, and what goes there: a letter, or that of another place


def _moves(n: int) -> Iterator[LetterChange]:
    """What is tried: another letter, another adjacent pair, two letters that change places."""
    for i, letter in itertools.product(range(n), "KSRQm"):
        yield ((i, letter),)
    for i, (one, other) in itertools.product(range(n - 1), itertools.product("KSRQm", repeat=2)):
        yield (i, one), (i + 1, other)
    for i, j in itertools.combinations(range(n), 2):
        yield (i, j), (j, i)


def _moved(unit_modes: UnitModes, move: LetterChange) -> list[str]:
    made = list(unit_modes)
    for i, what in move:
        made[i] = unit_modes[what] if isinstance(what, int) else what
    return made


def _cut(profile: Profile, budget_bytes: int) -> list[Technique]:
    """Micro-batches with all kept: the fewest that fit, or the most there are."""
    found: list[Technique] = []
    letters, count = _uniform(profile.units, "K"), 2
    while not profile.across_batch and count <= profile.batch_size:
        outcome = _Search(micro_batch(profile, count), budget_bytes, streamed=False).simulated(letters)
        found = [replace(_technique(f"micro-batches x{count}", letters, outcome), seconds=count * outcome.seconds)]
        if not outcome.shortfall_bytes:
            break
        count *= 2
    return found


def _count_of(technique: Technique) -> int:
    return int(technique.name.rpartition("x")[2])


def _technique(name: str, unit_modes: UnitModes, outcome: SimulatedStep) -> Technique:
    return Technique(name, unit_modes, outcome.seconds, outcome.peak_bytes, outcome.shortfall_bytes)
