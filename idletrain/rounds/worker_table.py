"""The workers of a run between two events, and which of them are idle or have room for another subnet. Immutable data.

Events change one worker at a time; none looks at all of them, of which there may be thousands.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import NamedTuple

from idletrain.rounds.persistent import PersistentMap, Ranked

QUARANTINE_AFTER = 2  # damaged pushes by one worker (DLRover and NVFlare exclude after a few, too)


class HeldSubnet(NamedTuple):
    """A subnet that a worker holds, of the open round or of an earlier one that its attempt has outlived.

    Attributes:
        due: When it is expected to be done, by the pace of its worker's last one.
    """

    number: int
    need_bytes: int
    exclusive: bool
    due: float


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A worker that may be leased subnets.

    Attributes:
        leases: Subnets it can hold at once: while it trains one, it pulls the next and pushes the last.
        cohort: Workers of one cohort compute the same bits.
        attempts: The subnet of each attempt that it holds, in the order in which it trains them.
        unwanted: Since when each of these attempts has no lease any more; it ends with the step that it is in.
        faults: Damaged pushes and failed attempts.
        step_seconds: Seconds a step of its last whole attempt, with what it pulled and pushed, or None.
        hung: Whether it makes no step though it is alive; it gets no lease.
    """

    memory_bytes: int
    leases: int = 1
    cohort: str = ""
    draining: bool = False
    attempts: Mapping[int, HeldSubnet] = field(default_factory=dict)
    unwanted: Mapping[int, float] = field(default_factory=dict)
    faults: int = 0
    step_seconds: float | None = None
    hung: bool = False

    @property
    def stays(self) -> bool:
        """Return whether it may be leased subnets."""
        return not (self.draining or self.hung)

    @property
    def is_sound(self) -> bool:
        """Return whether its word is trusted; else it is in quarantine."""
        return self.faults < QUARANTINE_AFTER

    @property
    def is_idle(self) -> bool:
        """Return whether it may be leased a subnet and holds none."""
        return self.stays and not self.attempts

    @property
    def room_due(self) -> float | None:
        """Return when the first subnet of a busy worker is due, if it may be leased another; of any other, None."""
        has_room = self.stays and 0 < len(self.attempts) < self.leases
        return next(iter(self.attempts.values())).due if has_room else None

    @property
    def queues(self) -> bool:
        """Return whether it holds a subnet behind another, but for those that it is no longer to train."""
        return any(attempt not in self.unwanted for attempt in list(self.attempts)[1:])


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTable(Mapping[str, WorkerState]):
    """The workers by address.

    Attributes:
        workers: All of them.
        idle: Those that are idle.
        roomy: Those that have room, the one first that is done first.
        queueing: Those that hold a subnet which they are to train behind another.
    """

    workers: PersistentMap[WorkerState] = field(default_factory=PersistentMap)
    idle: PersistentMap[None] = field(default_factory=PersistentMap)
    roomy: Ranked[str] = field(default_factory=Ranked)
    queueing: PersistentMap[None] = field(default_factory=PersistentMap)

    @classmethod
    def of(cls, workers: Mapping[str, WorkerState]) -> WorkerTable:
        """Return the table of these workers."""
        table = cls()
        for name, worker in workers.items():
            table = table.put(name, worker)
        return table

    def put(self, name: str, worker: WorkerState) -> WorkerTable:
        """Return the table with a worker added or replaced."""
        return WorkerTable(
            self.workers.put(name, worker),
            _marked(self.idle, name, worker.is_idle),
            self._ranked(name, worker),
            _marked(self.queueing, name, worker.queues),
        )

    def drop(self, name: str) -> WorkerTable:
        """Return the table without a worker."""
        return WorkerTable(
            self.workers.drop(name), self.idle.drop(name), self._ranked(name, None), self.queueing.drop(name)
        )

    def _ranked(self, name: str, worker: WorkerState | None) -> Ranked[str]:
        """Return those that have room with one worker changed, or gone."""
        old, order = self.workers.get(name), self.roomy.order
        before, after = (one.room_due if one else None for one in (old, worker))
        if before == after:
            return self.roomy
        order = order if before is None else order.remove((before, name))
        return Ranked(order if after is None else order.add((after, name)))

    def values(self) -> ValuesView[WorkerState]:
        """Return a view of the workers' states."""
        return self.workers.values()

    def items(self) -> ItemsView[str, WorkerState]:
        """Return a view of the workers' addresses and states."""
        return self.workers.items()

    def __getitem__(self, name: str) -> WorkerState:
        return self.workers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]


def _marked(names: PersistentMap[None], name: str, marked: bool) -> PersistentMap[None]:
    """Return the names with one among them or not."""
    if marked == (name in names):
        return names
    return names.put(name, None) if marked else names.drop(name)
