"""The open round's subnets as one immutable table, which knows how many are in which phase and which wait.

A round of n subnets is some 5 n events. If each looked at every subnet, a thousand would cost the head seconds a round.
"""

from __future__ import annotations

import bisect
import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload


class Phase(enum.Enum):
    """A subnet's state within a round."""

    WAITING = "waiting"
    LEASED = "leased"
    STORING = "storing"
    STAGED = "staged"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetState:
    """One subnet of the open round.

    Attributes:
        need_bytes: Memory that training it takes; if `alone`, the least that it can do with.
        alone: Whether it is trained out of core in all the memory of its worker, with no other subnet beside it.
        steps: Steps that are safe at home, in a mark or in the final update.
        base_steps: Those that the current lease started from.
        seen_steps: Steps that the last beat told of, at `seen_at`.
        lost: Whether a lease on it was lost in this round.
        ahead: Whether it is leased to a worker that first finishes another subnet.
        coming: Steps of an update that is on its way, and which share of its squared norm is here.
    """

    need_bytes: int
    exclusive: bool = False
    phase: Phase = Phase.WAITING
    attempt: int = 0
    worker: str = ""
    leased_at: float = 0.0
    expires: float = 0.0
    steps: int = 0
    base_steps: int = 0
    reported_steps: int = 0
    reported_at: float = 0.0
    lost: bool = False
    queued: bool = False
    in_flight: tuple[int, float] = (0, 0.0)
    diverged: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class SubnetTable(Sequence[SubnetState]):
    """Subnets by number.

    Attributes:
        phases: How many are in each phase.
        waiting: The numbers of those that wait to be leased, the largest first.
        begun: How many have steps at home.
    """

    subnets: tuple[SubnetState, ...]
    phases: Mapping[Phase, int]
    waiting: tuple[int, ...]
    started: int

    @classmethod
    def of(cls, subnets: Iterable[SubnetState]) -> SubnetTable:
        """The table of these subnets."""
        rows = tuple(subnets)
        waiting = sorted((k for k, s in enumerate(rows) if s.phase is Phase.WAITING), key=lambda k: _rank(rows, k))
        told = Counter(s.phase for s in rows)
        return cls(rows, {phase: told[phase] for phase in Phase}, tuple(waiting), sum(s.steps > 0 for s in rows))

    def put(self, k: int, subnet: SubnetState) -> SubnetTable:
        """The table with another subnet `k`, of the same need."""
        old = self.subnets[k]
        rows = list(self.subnets)
        rows[k] = subnet
        phases, waiting = self.phases, self.waiting
        if subnet.phase is not old.phase:
            phases = {**phases, old.phase: phases[old.phase] - 1, subnet.phase: phases[subnet.phase] + 1}
            at = bisect.bisect_left(waiting, _rank(rows, k), key=lambda other: _rank(rows, other))
            if old.phase is Phase.WAITING:
                waiting = waiting[:at] + waiting[at + 1 :]
            elif subnet.phase is Phase.WAITING:
                waiting = (*waiting[:at], k, *waiting[at:])
        return SubnetTable(tuple(rows), phases, waiting, self.started + (subnet.steps > 0) - (old.steps > 0))

    def count(self, *phases: Phase) -> int:
        """How many are in one of these phases."""
        return sum(self.phases[phase] for phase in phases)

    @overload
    def __getitem__(self, k: int) -> SubnetState: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[SubnetState, ...]: ...
    def __getitem__(self, k: int | slice) -> SubnetState | tuple[SubnetState, ...]:
        return self.subnets[k]

    def __len__(self) -> int:
        return len(self.subnets)

    def __iter__(self) -> Iterator[SubnetState]:
        return iter(self.subnets)


def _rank(rows: Sequence[SubnetState], k: int) -> tuple[int, int]:
    """The order in which subnets are leased."""
    return -rows[k].need_bytes, k
