"""What happened in a run: one JSON line an event, and their sum. Everything shown to a person is drawn from these.

Every line has `v` (the schema's version), `t` (seconds since the Unix epoch), `s` (seconds since this head started)
and `kind`; the kinds and their fields:

    run_started      run, version, subnets, rounds, policy, target, method, local_steps, parameters, groups, resumed_at,
                     run_dir, dashboard
    worker_joined    worker, name, memory_bytes, device, steps_per_second, cohort, pid
    worker_refused   worker, reason
    worker_at_risk   worker
    worker_notice    worker
    worker_left      worker, name, cause (notice, kill or end)
    leased           round, subnet, attempt, worker, step
    marked           round, subnet, attempt, steps
    lost             round, subnet, attempt, worker, cause, kept_steps, lost_steps, kept_seconds
    staged           round, subnet, attempt, worker, steps, train_seconds
    refused          round, subnet, attempt, reply
    attempt_ended    round, subnet, attempt, worker, ended, pull_seconds, train_seconds, push_seconds
    round_committed  round, steps, seconds, commit_seconds, bytes_down, bytes_up, shares
    evaluated        round, accuracy, loss, seconds
    snapshot         round, seconds
    paused, resumed  reason
    stopping         reason
    instance_launched  instance, role, type, zone, market, usd_per_hour, on_demand_usd_per_hour
    instance_ended   instance, reason
    spot_price       type, zone, usd_per_hour
    waiting          reason
    run_ended        status, rounds, accuracy, loss, params_sha256, run_dir
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
Event = dict[str, Any]
Sink = Callable[[Event], None]


class Recorder:
    """Writes events to a file and hands them to sinks (displays, callbacks).

    Args:
        path: The run's `events.jsonl`; lines are added.
        sinks: Called with every event, in order.
    """

    def __init__(self, path: Path, sinks: Iterable[Sink] = ()) -> None:
        self._file = path.open("a", buffering=1)
        self._sinks = tuple(sinks)
        self._started = time.monotonic()

    def __call__(self, kind: str, **fields: Any) -> None:
        """Record an event. A full disk loses lines here, never the run: the ledger is what counts."""
        event = {"v": SCHEMA, "t": time.time(), "s": time.monotonic() - self._started, "kind": kind, **fields}
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(event) + "\n")
        for sink in self._sinks:
            sink(event)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def read(path: Path) -> Iterator[Event]:
    """The events of a run, also while it is going on (a last line that is half written is left out)."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n") and line.startswith("{"):
                yield json.loads(line)


@dataclass
class WorkerView:
    """A worker as the events tell of it."""

    name: str
    joined: float
    pid: int
    device: str
    left: float | None = None
    noticed: bool = False
    subnet: str = ""


@dataclass
class Summary:
    """The sum of a run's events so far; `add` takes the next one.

    Attributes:
        useful_seconds: Node-seconds whose steps are in the network or on their way there.
        curve: `(round, seconds, accuracy, loss)` of every evaluation.
    """

    run: str = ""
    status: str = "starting"
    total_rounds: int = 0
    subnets: int = 0
    target: float | None = None
    rounds: int = 0
    local_steps: int = 0
    seconds: float = 0.0
    useful_seconds: float = 0.0
    notices: int = 0
    kills: int = 0
    reissues: int = 0
    salvaged_steps: int = 0
    lost_steps: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    round_seconds: float | None = None
    steps_per_second: float = 0.0
    note: str = ""
    params_sha256: str | None = None
    run_dir: str = ""
    parameters: int = 0
    dashboard: str = ""
    accuracy: float | None = None
    loss: float | None = None
    workers: dict[str, WorkerView] = field(default_factory=dict)
    curve: list[tuple[int, float, float | None, float]] = field(default_factory=list)
    preempted: list[tuple[float, str]] = field(default_factory=list)
    _before: float = 0.0
    _lost: set[tuple[int, int]] = field(default_factory=set)

    @property
    def alive_seconds(self) -> float:
        """Node-seconds that workers were there."""
        return sum((w.left if w.left is not None else self.seconds) - w.joined for w in self.workers.values())

    @property
    def goodput(self) -> float | None:
        """Useful node-seconds over node-seconds alive."""
        return min(1.0, self.useful_seconds / self.alive_seconds) if self.alive_seconds > 0 else None

    def add(self, event: Event) -> None:
        """Take the next event."""
        if event["kind"] == "run_started":
            self._before = self.seconds
            for worker in self.workers.values():  # a head that was killed could not say that they left
                worker.left = self.seconds if worker.left is None else worker.left
        self.seconds = self._before + event["s"]
        handler = _ADD.get(event["kind"])
        if handler:
            handler(self, event)

    def as_record(self) -> dict[str, Any]:
        """The run in one JSON object."""
        return {
            "status": self.status,
            "run": self.run,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "accuracy": self.accuracy,
            "loss": self.loss,
            "seconds": round(self.seconds, 3),
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "preemptions": {"notice": self.notices, "kill": self.kills},
            "reissues": self.reissues,
            "salvaged_steps": self.salvaged_steps,
            "lost_steps": self.lost_steps,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "params_sha256": self.params_sha256,
            "run_dir": self.run_dir,
        }


def summarise(path: Path) -> Summary:
    """The sum of a run's events.

    Raises:
        OSError: there is no such file.
    """
    return summary_of(read(path))


def summary_of(events: Iterable[Event]) -> Summary:
    """The sum of events."""
    summary = Summary()
    for event in events:
        summary.add(event)
    return summary


def _started(summary: Summary, event: Event) -> None:
    summary.status = "running"
    for field_ in ("run", "subnets", "target", "parameters", "run_dir", "dashboard"):
        setattr(summary, field_, event[field_])
    summary.total_rounds, summary.rounds = event["rounds"], event["resumed_at"]


def _joined(summary: Summary, event: Event) -> None:
    summary.workers[event["worker"]] = WorkerView(event["name"], summary.seconds, event["pid"], event["device"])
    summary.note = ""


def _noticed(summary: Summary, event: Event) -> None:
    if event["worker"] in summary.workers:
        summary.workers[event["worker"]].noticed = True


def _left(summary: Summary, event: Event) -> None:
    worker = summary.workers.get(event["worker"])
    if worker is None:
        return
    worker.left, worker.subnet = summary.seconds, ""
    if event["cause"] == "end":
        return
    summary.preempted.append((summary.seconds, event["cause"]))
    if event["cause"] == "notice":
        summary.notices += 1
    else:
        summary.kills += 1


def _leased(summary: Summary, event: Event) -> None:
    if event["worker"] in summary.workers:
        summary.workers[event["worker"]].subnet = f"{event['round']}/{event['subnet']}"
    summary.reissues += (event["round"], event["subnet"]) in summary._lost
    summary._lost.discard((event["round"], event["subnet"]))


def _lost(summary: Summary, event: Event) -> None:
    summary._lost.add((event["round"], event["subnet"]))
    summary.salvaged_steps += event["kept_steps"]
    summary.lost_steps += event["lost_steps"]
    summary.useful_seconds += event["kept_seconds"]


def _staged(summary: Summary, event: Event) -> None:
    summary.useful_seconds += event["train_seconds"]


def _ended_attempt(summary: Summary, event: Event) -> None:
    worker = summary.workers.get(event["worker"])
    if worker and worker.subnet == f"{event['round']}/{event['subnet']}":  # else it has its next lease already
        worker.subnet = ""


def _committed(summary: Summary, event: Event) -> None:
    summary.rounds = event["round"] + 1
    summary.local_steps += event["steps"]
    summary.bytes_down += event["bytes_down"]
    summary.bytes_up += event["bytes_up"]
    summary.steps_per_second = event["steps"] / max(event["seconds"], 1e-9)
    old = summary.round_seconds
    summary.round_seconds = event["seconds"] if old is None else 0.8 * old + 0.2 * event["seconds"]


def _evaluated(summary: Summary, event: Event) -> None:
    summary.accuracy, summary.loss = event["accuracy"], event["loss"]
    summary.curve.append((event["round"], summary.seconds, event["accuracy"], event["loss"]))


def _noted(summary: Summary, event: Event) -> None:
    summary.note = event["reason"] if event["kind"] != "resumed" else ""


def _ended(summary: Summary, event: Event) -> None:
    for field_ in ("status", "rounds", "accuracy", "loss", "params_sha256", "run_dir"):
        setattr(summary, field_, event[field_])


_ADD: dict[str, Callable[[Summary, Event], None]] = {
    "run_started": _started,
    "worker_joined": _joined,
    "worker_notice": _noticed,
    "worker_left": _left,
    "leased": _leased,
    "lost": _lost,
    "staged": _staged,
    "attempt_ended": _ended_attempt,
    "round_committed": _committed,
    "evaluated": _evaluated,
    "paused": _noted,
    "resumed": _noted,
    "waiting": _noted,
    "stopping": _noted,
    "run_ended": _ended,
}
