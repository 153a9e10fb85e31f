"""The totals, curves and workers of a run, as its events sum up to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from idletrain.observe.records import Record


class Evaluation(NamedTuple):
    """An evaluation: a point of the curves of accuracy, loss and the job's metrics."""

    round: int
    seconds: float
    accuracy: float | None
    loss: float
    metrics: Mapping[str, float | None] = MappingProxyType({})
    samples: int | None = None  # of the test data, if not all were used


class Preemption(NamedTuple):
    """A worker's preemption, by `notice` or `kill`, when `round` rounds were done."""

    seconds: float
    cause: str
    round: int
    name: str


class RoundEnd(NamedTuple):
    """A committed round."""

    round: int
    seconds: float
    round_seconds: float
    steps: int


@dataclass
class WorkerView:
    """A worker as known from events; times are seconds of the run.

    Attributes:
        subnet: Its present lease as `round/subnet`, or "".
        pace: Local steps a second in its last attempt, or None before there is one.
        link_bytes_per_second: Rate of its fastest transfer.
        cause: Why it left: `notice`, `kill`, `end`, or "" while it is alive.
        steps: Local steps that it took and that are committed or staged.
        subnets: Updates of its that were accepted.
        lost_steps: Local steps that it took in vain.
    """

    name: str
    joined: float
    pid: int = 0
    device: str = ""
    memory_bytes: int = 0
    left: float | None = None
    noticed: bool = False
    subnet: str = ""
    pace: float | None = None
    link_bytes_per_second: float | None = None
    cause: str = ""
    steps: int = 0
    subnets: int = 0
    lost_steps: int = 0


@dataclass
class Cell:
    """A subnet in a round.

    Attributes:
        state: `waiting`, `leased`, `progress_saved`, `staged`, `accepted` (committed with its round) or `lost`.
        worker: Address of the worker with its lease.
        steps: Local steps that the head knows of.
        losses: How often its lease was lost.
    """

    state: str = "waiting"
    worker: str = ""
    steps: int = 0
    losses: int = 0


class OpenAttempt(NamedTuple):
    """An attempt that has not ended: its worker, and its initial step."""

    worker: str
    step: int


@dataclass
class RunTotals:
    """The sum of a run's events so far.

    Attributes:
        updated: Unix time of the last event.
        head_sessions: How often a head started the run.
        samples: Samples of the training data; None if unknown.
        samples_a_step: Samples of a local step.
        lr: Learning rate of the last committed step.
        useful_seconds: Workers' seconds of steps that are committed or staged.
        workers: Workers by address; `former` holds those whose address another worker has now.
        joining: By address, when a worker that is not ready yet was first seen.
        grid: The subnets of the last rounds.
        puts: Number of pushes by the store's reply.
        lost_by_cause: Lost steps by the reason why the lease ended.
        backups: Slow subnets leased a second time to an idle worker.
        machines: Events of cloud instances and of the run's end, for the bill.
        settings: Command, job, versions and hardware from the last `run_started` event.
        seconds_before: Seconds of the earlier head sessions.
        least_trained: Without rounds, the least steps of a neuron over the mean's, as of the last round.
        metrics: The job's metrics at the last evaluation, by name.
        better: Which of two values of a metric is the better one, `higher` or `lower`, by its name.
        best: The best network so far: its `round`, the `metric` that tells it, and the `value`; None if none is kept.
        lost_subnets: The rounds and subnets that were lost and not leased again.
        open_attempts: The attempts that have not ended, by number.
    """

    run: str = ""
    status: str = "starting"
    total_rounds: int = 0
    subnets: int = 0
    local_steps_each: int = 0
    policy: str = ""
    method: str = ""
    target: float | None = None
    rounds: int = 0
    local_steps: int = 0
    seconds: float = 0.0
    updated: float = 0.0
    began: float = 0.0
    head_sessions: int = 0
    samples: int | None = None
    samples_a_step: float = 0.0
    lr: float | None = None
    useful_seconds: float = 0.0
    notices: int = 0
    kills: int = 0
    reissues: int = 0
    backups: int = 0
    salvaged_steps: int = 0
    lost_steps: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    round_seconds: float | None = None
    steps_per_second: float = 0.0
    bytes_per_second: float = 0.0
    link_bytes_per_second: float | None = None
    note: str = ""
    params_sha256: str | None = None
    run_dir: str = ""
    parameters: int = 0
    dashboard: str = ""
    accuracy: float | None = None
    loss: float | None = None
    calibration_error: float | None = None
    temperature: float | None = None
    constant_loss: float | None = None
    train_loss: float | None = None
    least_trained: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    better: dict[str, str] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    workers: dict[str, WorkerView] = field(default_factory=dict)
    former: list[WorkerView] = field(default_factory=list)
    joining: dict[str, float] = field(default_factory=dict)
    curve: list[Evaluation] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    round_ends: list[RoundEnd] = field(default_factory=list)
    grid: dict[int, list[Cell]] = field(default_factory=dict)
    puts: Counter[str] = field(default_factory=Counter)
    lost_by_cause: Counter[str] = field(default_factory=Counter)
    machines: list[Record] = field(default_factory=list)
    settings: Record = field(default_factory=dict)
    seconds_before: float = 0.0
    lost_subnets: set[tuple[int, int]] = field(default_factory=set)
    open_attempts: dict[int, OpenAttempt] = field(default_factory=dict)

    @property
    def all_workers(self) -> list[WorkerView]:
        """Return all workers that ever joined, in order."""
        return sorted([*self.former, *self.workers.values()], key=lambda worker: worker.joined)

    @property
    def epochs(self) -> float | None:
        """How often the committed steps have passed over the training data; None if its length is unknown."""
        return self.local_steps * self.samples_a_step / self.samples if self.samples else None

    @property
    def samples_per_second(self) -> float:
        """Samples of the last round's committed steps over its seconds."""
        return self.steps_per_second * self.samples_a_step

    @property
    def alive_seconds(self) -> float:
        """Seconds that workers were alive, of all together."""
        workers = (*self.former, *self.workers.values())
        return sum((w.left if w.left is not None else self.seconds) - w.joined for w in workers)

    @property
    def goodput(self) -> float | None:
        """Workers' useful seconds over their seconds alive."""
        return min(1.0, self.useful_seconds / self.alive_seconds) if self.alive_seconds > 0 else None
