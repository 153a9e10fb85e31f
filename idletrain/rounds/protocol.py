"""The events that the state machine takes and the commands that it returns: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from idletrain.exchange.messages import Activity, LeaseId, Reply

# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """Something that happened at `now`, in seconds of the head's monotonic clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(RoundEvent):
    """A worker is ready to train."""

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
    """A worker will be preempted soon."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(RoundEvent):
    """The holder of a lease is alive.

    Attributes:
        steps: Local steps that it has done.
        doing: What it does now.
    """

    lease: LeaseId
    steps: int
    doing: Activity = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(RoundEvent):
    """A payload arrived, an `update` or a progress checkpoint; `fault` says what is wrong with it."""

    lease: LeaseId
    steps: int
    update: bool = True
    fault: Reply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartArrived(RoundEvent):
    """A part of a payload arrived.

    Attributes:
        norm_fraction: Fraction of the update's squared norm that has arrived; 0 if it can only be used whole.
    """

    lease: LeaseId
    steps: int
    norm_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted(RoundEvent):
    """A subnet's update is durable; under `rolling` it is in the network, and another subnet is drawn in its lane.

    Attributes:
        neuron_steps: Under `rolling`, the committed local steps of all neurons together.
    """

    subnet: int
    neuron_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(RoundEvent):
    """An attempt's task on `worker` is over.

    Attributes:
        failed: Whether it ended in an error of its own, not by the loss of its worker.
        out_of_memory: Whether the subnet is too large for the worker after all.
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
    """The round's updates are in the network.

    Attributes:
        needs: Bytes that training each subnet of the next round takes; under `rolling`, where no round begins, empty.
        exclusive: Those of them that are trained out of core.
        snapshot_due: Whether a snapshot is to be written.
        new_local_steps: Local steps of the next round where it begins a phase; None where it is like the last.
    """

    needs: tuple[int, ...]
    exclusive: frozenset[int] = frozenset()
    snapshot_due: bool
    new_local_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(RoundEvent):
    """An Evaluate command is done.

    Attributes:
        accuracy: None without test data.
        measured: Whether the network was evaluated, not only written.
        score: The value that tells the best network; None where it is no number, or nothing tells it.
    """

    accuracy: float | None
    measured: bool = True
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreKept(RoundEvent):
    """A KeepScore command is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(RoundEvent):
    """The user wants the run to stop; it can be resumed."""


# --- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Have `worker` train from local step `step`; as a `backup`, beside the slow worker that has the subnet."""

    lease: LeaseId
    worker: str
    step: int
    backup: bool = False


@dataclass(frozen=True, slots=True)
class Respond:
    """Reply to the push or heartbeat that was the event."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class KeepProgress:
    """Hold the pushed payload as the subnet's progress checkpoint."""

    subnet: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the pushed payload (else the checkpoint) durable as the subnet's update, then report Persisted.

    Attributes:
        norm_fraction: If above 0, store what arrived of an update in flight: this fraction of its squared norm.
    """

    subnet: int
    attempt: int
    steps: int
    norm_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """A lease is over without its update; to be recorded.

    Attributes:
        cause: `notice`, `kill`, `lease` (no sign of life), `hang` (no step), `error`, `refused`, `closed` (the round
            ended without it), `moved` (to a smaller worker) or `overtaken` (by another attempt at the same subnet).
        kept_steps: Steps of this attempt that are in the store.
        lost_steps: Steps that are not, estimated from its heartbeats.
        norm_fraction: If above 0, an update in flight is kept, with this fraction of its squared norm.
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
    """Write the staged updates, `(subnet, steps)` each, into the network, then report Committed.

    Under `rolling` they are in it already: a neuron has had another round's steps on average.
    """

    round: int
    staged: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the committed network and/or write a snapshot of it, then report Evaluated.

    Attributes:
        waits: Whether the next commit waits for the scores, on which it depends how the run goes on. Else Evaluated
            means no more than that the network may change; a copy of it is evaluated, unless one still is.
    """

    evaluate: bool
    snapshot: bool
    waits: bool


@dataclass(frozen=True, slots=True)
class KeepScore:
    """Record the score of the evaluated network and, if it is the `best` so far, keep it; then report ScoreKept."""

    score: float | None
    best: bool


@dataclass(frozen=True, slots=True)
class WorkerSick:
    """A worker is alive and useless; to be recorded, and to be restarted if it hangs.

    Attributes:
        cause: `hang` (no step for `seconds`) or `faults` (it gets no more than what no other worker can hold).
    """

    worker: str
    cause: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run.

    Attributes:
        status: `completed`, `reached`, `stopped-early`, `stopped`, `diverged`, `failed` (by an error of the job's code)
            or `deadly` (a subnet ends the processes that train it).
        subnet: The subnet that ends it, or None.
        workers: The workers on which it failed.
    """

    status: str
    subnet: int | None = None
    workers: tuple[str, ...] = ()


RoundCommand = (
    GrantLease | Respond | KeepProgress | Persist | LeaseLost | Commit | Evaluate | KeepScore | WorkerSick | Finish
)
