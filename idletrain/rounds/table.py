"""The state of a run between two events: its rules, its workers and the open round's subnets. Immutable data.

The table of subnets counts those in each phase and lists those that wait. A round of n subnets is some 5 n events; if
each event went over every subnet, a thousand subnets would cost the head seconds a round.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from idletrain.exchange.messages import Activity
from idletrain.rounds.best import Scores
from idletrain.rounds.persistent import PersistentList, PersistentOrder, Ranked, replace
from idletrain.rounds.worker_table import WorkerState, WorkerTable


class Phase(enum.Enum):
    """A subnet's state within a round."""

    WAITING = "waiting"
    LEASED = "leased"
    STORING = "storing"
    STAGED = "staged"
    ABSENT = "absent"


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One attempt's right to write a subnet.

    Attributes:
        attempt: Its number in the run.
        worker: The worker that trains.
        granted_at: When it was granted, or taken up if it was queued.
        expires: When it is lost without a sign of life.
        base_steps: Local steps that it started from.
        stored_steps: Local steps that it has put into the store.
        reported_steps: Local steps by its last heartbeat, at `reported_at`.
        doing: What it did at its last heartbeat.
        progress_at: When it last made a step, moved data, or began something else.
        paced_at: When it last reported a step, or that it was still moving data; its next step began no sooner.
        step_seconds: Seconds a step by its last two reports of steps, or None.
        queued: Whether its worker first finishes another subnet.
    """

    attempt: int = 0
    worker: str = ""
    granted_at: float = 0.0
    expires: float = 0.0
    base_steps: int = 0
    stored_steps: int = 0
    reported_steps: int = 0
    reported_at: float = 0.0
    doing: Activity = "load"
    progress_at: float = 0.0
    paced_at: float = 0.0
    step_seconds: float | None = None
    queued: bool = False


NO_LEASE = Lease()


@dataclass(frozen=True, kw_only=True)
class SubnetState:
    """One subnet of the open round; under `rolling`, the open one of a lane.

    Attributes:
        round: Its round; under `rolling`, how many subnets its lane had before.
        opened_at: When it was drawn, under `rolling`: what waits longest is leased first. Else 0.
        need_bytes: Memory that training it takes; if `exclusive`, the least memory that is enough.
        exclusive: Whether it is trained out of core in all the memory of its worker, with no other subnet beside it.
        steps: Local steps in the store, in a progress checkpoint or in the final update.
        lease: The lease that holds, or the last that did.
        backup: A second lease beside it, on an idle worker, where the first is slow; the first update wins.
        lost: Whether a lease on it was lost in this round.
        in_flight: Steps of an update that is arriving, and the fraction of its squared norm that has arrived.
        diverged: The worker of each attempt in this round that ended in values that are not finite.
        failed: The worker of each attempt in this round that ended in an error of the code.
        deaths: Each worker that died in it since its last stored step, and the steps it had reported (see `verdicts`).
        witnesses: Workers that could take it at the first of these deaths.
    """

    need_bytes: int
    exclusive: bool = False
    round: int = 0
    opened_at: float = 0.0
    phase: Phase = Phase.WAITING
    steps: int = 0
    lease: Lease = NO_LEASE
    backup: Lease | None = None
    lost: bool = False
    in_flight: tuple[int, float] = (0, 0.0)
    diverged: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    deaths: tuple[tuple[str, int], ...] = ()
    witnesses: tuple[str, ...] = ()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Return the leases that hold: none, one, or one and its backup."""
        if self.phase is not Phase.LEASED:
            return ()
        return (self.lease, self.backup) if self.backup else (self.lease,)

    def lease_of(self, attempt: int) -> Lease | None:
        """Return an attempt's lease if it holds."""
        return next((lease for lease in self.leases if lease.attempt == attempt), None)

    def with_lease(self, lease: Lease) -> SubnetState:
        """Return the subnet with the lease of the same attempt replaced."""
        return replace(self, lease=lease) if lease.attempt == self.lease.attempt else replace(self, backup=lease)


@dataclass(frozen=True, slots=True)
class SubnetTable(Sequence[SubnetState]):
    """The subnets of a round, by number.

    Attributes:
        size: How many there are.
        phases: How many are in each phase.
        waiting: The numbers of those that wait for a lease, in the order in which they are leased.
        started: How many have steps in the store.
    """

    rows: PersistentList[SubnetState]
    size: int
    phases: Mapping[Phase, int]
    waiting: Ranked[int]
    started: int

    @classmethod
    def of(cls, subnets: Iterable[SubnetState]) -> SubnetTable:
        """Return the table of these subnets."""
        rows = tuple(subnets)
        waiting = PersistentOrder.of(_rank(s, k) for k, s in enumerate(rows) if s.phase is Phase.WAITING)
        counts = Counter(s.phase for s in rows)
        phases = {phase: counts[phase] for phase in Phase}
        started = sum(s.steps > 0 for s in rows)
        return cls(PersistentList.of(rows), len(rows), phases, Ranked(waiting), started)

    def put(self, k: int, subnet: SubnetState) -> SubnetTable:
        """Return the table with subnet `k` replaced."""
        old, phases, order = self.rows[k], self.phases, self.waiting.order
        if old.phase is Phase.WAITING:
            order = order.remove(_rank(old, k))
        if subnet.phase is Phase.WAITING:
            order = order.add(_rank(subnet, k))
        if subnet.phase is not old.phase:
            phases = {**phases, old.phase: phases[old.phase] - 1, subnet.phase: phases[subnet.phase] + 1}
        started = self.started + (subnet.steps > 0) - (old.steps > 0)
        return SubnetTable(self.rows.put(k, subnet), self.size, phases, Ranked(order), started)

    def count(self, *phases: Phase) -> int:
        """Count the subnets in these phases."""
        return sum(self.phases[phase] for phase in phases)

    @overload
    def __getitem__(self, k: int) -> SubnetState: ...
    @overload
    def __getitem__(self, k: slice) -> tuple[SubnetState, ...]: ...
    def __getitem__(self, k: int | slice) -> SubnetState | tuple[SubnetState, ...]:
        return tuple(self.rows)[k] if isinstance(k, slice) else self.rows[k]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[SubnetState]:
        return iter(self.rows)


def _rank(subnet: SubnetState, k: int) -> tuple[float, int, int]:
    """Return the sort key by which subnets are leased: the one drawn first, of a round the largest."""
    return subnet.opened_at, -subnet.need_bytes, k


class RunStage(enum.Enum):
    """The stages of a run."""

    TRAINING = "training"
    COMMITTING = "committing"
    LAST_EVALUATION = "last-evaluation"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Watch:
    """The rule that tells the best network.

    Attributes:
        metric: Its name.
        higher: Whether a higher value is better than a lower one.
        patience: Evaluations in a row without a better network after which the run ends, or None.
    """

    metric: str
    higher: bool
    patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """The settings by which rounds are run.

    Attributes:
        salvage: Close a round with the steps that lost subnets have; else every subnet gets all its steps.
        lockstep: Subnets take every step together: each has a worker for itself, and all finish at once.
        local_steps: Local steps of each subnet in a round; those of the open round's phase.
        evaluate_every: Rounds between evaluations; the first and the last round are followed by one besides.
        target: Test accuracy at which the run ends, or None.
        watch: What tells the best network, or None if none is kept.
        lane_neurons: Under `rolling`, the number of neurons of each lane's subnets; else empty.
        open_neurons: Under `rolling`, their sum.
        neurons: Under `rolling`, those of the network.
    """

    salvage: bool
    local_steps: int
    rounds: int
    lease_seconds: float
    evaluate_every: int
    target: float | None = None
    watch: Watch | None = None
    lockstep: bool = False
    lane_neurons: tuple[int, ...] = ()
    open_neurons: int = 0
    neurons: int = 0

    def evaluates_after(self, done: int) -> bool:
        """Return whether an evaluation is due once this number of rounds is committed."""
        return done == 1 or done >= self.rounds or (done > 0 and done % self.evaluate_every == 0)

    @property
    def rolling(self) -> bool:
        """Return whether each subnet is committed by itself, and another drawn in its lane."""
        return bool(self.lane_neurons)

    @property
    def depends_on_scores(self) -> bool:
        """Return whether evaluations decide how the run goes on, which must not depend on how long they take."""
        return self.target is not None or self.watch is not None


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """A run between two events.

    Attributes:
        attempts: Leases granted so far.
        typical_seconds: Seconds of the slowest whole subnet in the last round that had one, or None.
        slowest_seconds: The same of this round so far.
        backups_at: When slow subnets were last looked for; a round of a thousand has thousands of events.
        neuron_steps: Under `rolling`, the committed local steps of all neurons together; by them go the rounds.
        evaluating: Whether the committed network is being evaluated or written; it must not change meanwhile.
        scores: By the number of committed rounds, what tells the best network.
        keeping: The status with which the run ends once the score is kept, or "" if it goes on; None if none is kept.
    """

    rules: RoundRules
    run: str
    epoch: int
    round: int
    subnets: SubnetTable
    workers: WorkerTable = field(default_factory=WorkerTable)
    stage: RunStage = RunStage.TRAINING
    attempts: int = 0
    opened_at: float = 0.0
    typical_seconds: float | None = None
    slowest_seconds: float | None = None
    backups_at: float = -1.0
    neuron_steps: int = 0
    evaluating: bool = False
    scores: Scores = field(default_factory=dict)
    keeping: str | None = None
    stopping: bool = False

    def lease_of(self, subnet: int, attempt: int) -> Lease | None:
        """Return an attempt's lease if it holds; it may be at a subnet of an earlier round, which had more."""
        return self.subnets[subnet].lease_of(attempt) if subnet < len(self.subnets) else None


def with_worker(state: RoundState, name: str, worker: WorkerState) -> RoundState:
    """Return the state with a worker added or replaced."""
    return replace(state, workers=state.workers.put(name, worker))


def with_subnet(state: RoundState, k: int, subnet: SubnetState) -> RoundState:
    """Return the state with subnet `k` replaced."""
    return replace(state, subnets=state.subnets.put(k, subnet))
