"""Define `training.phases` of a job: how its rounds divide the network, in narrow subnets first and in wide ones later.

Imports nothing of torch, like `job`, which reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from idletrain.strict_settings import Count, StrictSettings


class PhaseSettings(StrictSettings):
    """Some rounds of training, one after the other, that divide the network in the same way."""

    rounds: Count
    """Rounds of the phase."""
    subnets: Count | None = None
    """Subnets in each of them; `training.subnets` when null."""
    copies: Count | None = None
    """Subnets that every neuron is in; `training.copies` when null."""
    local_steps: Count | None = None
    """Steps of each subnet between two exchanges; `training.local_steps` when null."""


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """A phase with nothing left out, and its place in the run.

    Attributes:
        number: Its number, from 1.
        first_round: Its first round.
        rounds: Number of its rounds.
        subnets: Subnets in each of them.
        copies: Subnets that every neuron is in.
        local_steps: Steps of each subnet in each of them.
        first_step: Steps that each subnet takes in the phases before.
        first_batch: Batches that all subnets together take in the phases before.
    """

    number: int
    first_round: int
    rounds: int
    subnets: int
    copies: int
    local_steps: int
    first_step: int = 0
    first_batch: int = 0

    @property
    def equal_shares(self) -> tuple[float, ...]:
        """Each subnet's share of every neuron group where all are equally wide."""
        return (min(1.0, self.copies / self.subnets),) * self.subnets

    @property
    def averages_whole_networks(self) -> bool:
        """Whether every one of several subnets is the whole network, as in local SGD."""
        return 1 < self.copies == self.subnets

    def steps_before(self, round_: int) -> int:
        """Return the steps that each subnet takes from the start of the run to one of the phase's rounds."""
        return self.first_step + (round_ - self.first_round) * self.local_steps


def finishing_whole(rounds: int, last: int, subnets: int) -> tuple[PhaseSettings, ...]:
    """Return the phases of rounds of which the last ones (or all) train the whole network in every subnet."""
    before = (PhaseSettings(rounds=rounds - last),) if last < rounds else ()
    return *before, PhaseSettings(rounds=last, copies=subnets)


def in_order(given: Sequence[PhaseSettings], subnets: int, copies: int, local_steps: int) -> Iterator[TrainingPhase]:
    """Yield the phases, with the job's own numbers where a phase leaves one out."""
    round_ = step = batch = 0
    for number, own in enumerate(given, start=1):
        phase = TrainingPhase(
            number,
            round_,
            own.rounds,
            own.subnets or subnets,
            own.copies or copies,
            own.local_steps or local_steps,
            step,
            batch,
        )
        yield phase
        round_ += phase.rounds
        step += phase.rounds * phase.local_steps
        batch += phase.rounds * phase.local_steps * phase.subnets


def batch_number(phases: Sequence[TrainingPhase], subnet: int, step: int) -> int:
    """Return the number of the batch, counted through the run and all subnets, that a subnet takes at a step.

    Subnets take batches in turn. Steps count from the start of the run; those after the last phase belong to it.
    """
    phase = next((phase for phase in reversed(phases) if phase.first_step <= step), phases[0])
    return phase.first_batch + (step - phase.first_step) * phase.subnets + subnet


def spelled_out(training: Any) -> Any:
    """Return the section `training` of a job with the rounds that its phases add up to.

    A range of subnets, `{start: 8, end: 2}`, becomes phases of 8, 4 and 2 subnets, which share the rounds equally. What
    is no such section is returned unchanged.
    """
    if not isinstance(training, dict):
        return training
    training = _with_range_as_phases(training)
    given = training.get("phases")
    if "rounds" in training or not isinstance(given, list | tuple) or not given:
        return training
    counts = [phase.get("rounds") if isinstance(phase, dict) else getattr(phase, "rounds", None) for phase in given]
    whole = all(isinstance(count, int) and count > 0 for count in counts)
    return {**training, "rounds": sum(counts)} if whole else training


def _with_range_as_phases(training: dict[str, Any]) -> dict[str, Any]:
    subnets, rounds = training.get("subnets"), training.get("rounds", 120)
    if not isinstance(subnets, dict) or "phases" in training or not isinstance(rounds, int):
        return training
    if subnets.keys() != {"start", "end"} or not all(isinstance(n, int) and n > 0 for n in subnets.values()):
        return training
    start, end = subnets["start"], subnets["end"]
    counts = [start]
    while counts[-1] > end and counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    if counts[-1] != end or rounds < len(counts):
        return training
    parts = [rounds * (k + 1) // len(counts) - rounds * k // len(counts) for k in range(len(counts))]
    phases = [{"rounds": part, "subnets": count} for part, count in zip(parts, counts, strict=True)]
    return {**training, "subnets": start, "phases": phases}
