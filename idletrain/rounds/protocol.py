"""What can happen to a run, and what then is to be done: plain data, the language of the state machine."""

from __future__ import annotations

from dataclasses import dataclass

from idletrain.exchange.messages import LeaseId, Reply

# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """Something that happened at `now`, in seconds of the head's monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(RoundEvent):
    """A worker is ready."""

    worker: str
    memory_bytes: int
    leases: int = 1
    cohort: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(RoundEvent):
    """A worker is gone."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReceived(RoundEvent):
    """A worker will be gone soon."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(RoundEvent):
    """A lease's holder is alive and has done `steps`."""

    lease: LeaseId
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(RoundEvent):
    """A payload arrived, an `update` or a mark; `fault` says what is wrong with it."""

    lease: LeaseId
    steps: int
    update: bool = True
    fault: Reply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartArrived(RoundEvent):
    """A part of a payload arrived; of an update's squared norm that share is here by now, 0 if it must be whole."""

    lease: LeaseId
    steps: int
    norm_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(RoundEvent):
    """A subnet's update is durable."""

    subnet: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(RoundEvent):
    """An attempt's task on `worker` is over; `failed` if by an error of its own (not by the loss of its worker),
    `unfit` if the subnet is too large for the worker after all.
    """

    lease: LeaseId
    worker: str
    failed: bool = False
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTick(RoundEvent):
    """Time passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(RoundEvent):
    """The round is in the network; the next one's subnets need `needs` bytes each and are to be trained out of core if
    `alone`; a snapshot is or is not due.
    """

    needs: tuple[int, ...]
    exclusive: frozenset[int] = frozenset()
    snapshot_due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(RoundEvent):
    """The committed network was evaluated (accuracy, or None) and written as asked."""

    accuracy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(RoundEvent):
    """The user wants the run to stop; it can be resumed."""


# --- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Have `worker` train from step `step`."""

    lease: LeaseId
    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Respond:
    """The reply to the push or beat that was the event."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class KeepProgress:
    """Hold the pushed payload as the subnet's mark."""

    subnet: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the pushed payload (or the mark, if there is none) durable as the subnet's update, then say Stored.

    Attributes:
        covered: If above 0, it is what has come of a payload that was not finished, with that share of its norm.
    """

    subnet: int
    attempt: int
    steps: int
    norm_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A lease is over without its update; for the record.

    Attributes:
        cause: `notice`, `kill`, `lease`, `error`, `refused`, `closed` (the round ended without it) or `moved` (to a
            smaller worker).
        kept_steps: Steps of this attempt that are safe at home.
        lost_steps: Steps that are not, as far as its beats tell.
        covered: If above 0, what is kept is that share of an update's squared norm.
    """

    subnet: int
    attempt: int
    worker: str
    cause: str
    kept_steps: int
    lost_steps: int
    norm_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the staged updates into the network, `(subnet, steps)` each, then say Committed."""

    round: int
    staged: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the committed network and/or write a snapshot of it, then say Looked."""

    evaluate: bool
    snapshot: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over: `completed`, `reached`, `stopped`, `diverged` or `failed`."""

    status: str


RoundCommand = GrantLease | Respond | KeepProgress | Persist | LeaseLost | Commit | Evaluate | Finish
