"""Sum up a run's events, for the display, the dashboard page, metrics and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from idletrain.observe.records import Record, read_records
from idletrain.observe.run_totals import Cell, Evaluation, OpenAttempt, Preemption, RoundEnd, RunTotals, WorkerView

GRID_ROUNDS = 6  # latest rounds with every subnet's state: enough to see the effect of preemptions


class Summary(RunTotals):
    """The sum of a run's events so far; `add` takes the next one."""

    def add(self, event: Record) -> None:
        """Add the next event."""
        if event["kind"] == "run_started":
            self.seconds_before = self.seconds
            self.head_sessions += 1
            self.joining.clear()
            for address, worker in self.workers.items():  # a killed head did not record that they left
                if worker.left is None:
                    worker.left, worker.cause, worker.subnet = self.seconds, "end", ""
                _end_leases(self, address)
        self.seconds = self.seconds_before + event["s"]
        self.updated = event.get("t", self.updated)
        handler = _ADD.get(event["kind"])
        if handler:
            handler(self, event)

    def round_record(self, event: Record) -> dict[str, Any]:
        """Return a committed round, which the summary already holds, as one JSON object."""
        record = self.as_record()
        keys = (
            "rounds",
            "local_steps",
            "epochs",
            "evaluated_rounds",
            "accuracy",
            "loss",
            "train_loss",
            "seconds",
            "goodput",
            "preemptions",
        )
        own = {"round_seconds": event["seconds"], "lr": self.lr}
        return own | {key: record[key] for key in keys}

    def as_record(self) -> dict[str, Any]:
        """Return the run as one JSON object."""
        return {
            "status": self.status,
            "run": self.run,
            "method": self.method,
            "subnets": self.subnets,
            "rounds": self.rounds,
            "local_steps": self.local_steps,
            "epochs": None if self.epochs is None else round(self.epochs, 4),
            "evaluated_rounds": self.curve[-1].round if self.curve else None,  # after which the scores were measured
            "accuracy": self.accuracy,
            "loss": self.loss,
            "calibration_error": self.calibration_error,
            "temperature": self.temperature,
            "constant_loss": self.constant_loss,
            "train_loss": self.train_loss,
            "least_trained": self.least_trained,
            "metrics": dict(self.metrics),
            "best": self.best,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "preemptions": {"notice": self.notices, "kill": self.kills},
            "reissues": self.reissues,
            "backups": self.backups,
            "salvaged_steps": self.salvaged_steps,
            "lost_steps": self.lost_steps,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "params_sha256": self.params_sha256,
            "run_dir": self.run_dir,
        }


def summarise(path: Path) -> Summary:
    """Sum up the events of a run's file.

    Raises:
        OSError: There is no such file.
    """
    return summary_of(read_records(path))


def summary_of(events: Iterable[Record]) -> Summary:
    """Sum up events."""
    summary = Summary()
    for event in events:
        summary.add(event)
    return summary


def _started(summary: RunTotals, event: Record) -> None:
    summary.status, summary.note = "running", ""
    for field_ in ("run", "subnets", "target", "parameters", "run_dir", "dashboard"):
        setattr(summary, field_, event[field_])
    summary.policy, summary.method = event.get("policy", ""), event.get("method", "")
    summary.local_steps_each = event.get("local_steps", 0)
    summary.samples, summary.samples_a_step = event.get("samples"), event.get("samples_a_step", 0.0)
    summary.total_rounds, summary.rounds = event["rounds"], event["resumed_at"]
    summary.began, summary.better = summary.began or event.get("t", 0.0), event.get("better", {})
    summary.settings = {
        key: event[key] for key in ("version", "command", "job", "versions", "hardware") if key in event
    }
    for cell in summary.grid.get(summary.rounds, ()):  # of the present round only staged updates are left
        cell.state = cell.state if cell.state == "staged" else "waiting"


def _phase_started(summary: RunTotals, event: Record) -> None:
    summary.subnets, summary.local_steps_each = event["subnets"], event["local_steps"]


def _joining(summary: RunTotals, event: Record) -> None:
    summary.joining.setdefault(event["worker"], summary.seconds)


def _not_joining(summary: RunTotals, event: Record) -> None:
    summary.joining.pop(event["worker"], None)


def _joined(summary: RunTotals, event: Record) -> None:
    if event["worker"] in summary.workers:
        summary.former.append(summary.workers.pop(event["worker"]))
    summary.workers[event["worker"]] = WorkerView(
        event["name"], summary.seconds, event["pid"], event["device"], event.get("memory_bytes", 0)
    )
    summary.joining.pop(event["worker"], None)
    summary.note = ""


def _noticed(summary: RunTotals, event: Record) -> None:
    if event["worker"] in summary.workers:
        summary.workers[event["worker"]].noticed = True


def _left(summary: RunTotals, event: Record) -> None:
    worker = summary.workers.get(event["worker"])
    if worker is None:
        return
    worker.left, worker.subnet, worker.cause = summary.seconds, "", event["cause"]
    _end_leases(summary, event["worker"])
    if event["cause"] == "end":
        return
    summary.preempted.append(Preemption(summary.seconds, event["cause"], summary.rounds, worker.name))
    if event["cause"] == "notice":
        summary.notices += 1
    else:
        summary.kills += 1


def _leased(summary: RunTotals, event: Record) -> None:
    worker = summary.workers.get(event["worker"])
    if worker is not None:
        worker.subnet = f"{event['round']}/{event['subnet']}"
        summary.open_attempts[event["attempt"]] = OpenAttempt(event["worker"], event["step"])
    _set(summary, event, "leased", steps=event["step"], worker=event["worker"])
    summary.backups += event.get("backup", False)
    summary.reissues += (event["round"], event["subnet"]) in summary.lost_subnets
    summary.lost_subnets.discard((event["round"], event["subnet"]))


def _progress_saved(summary: RunTotals, event: Record) -> None:
    summary.puts["accepted"] += 1
    _set(summary, event, "progress_saved", steps=event["steps"])


def _lost(summary: RunTotals, event: Record) -> None:
    summary.lost_steps += event["lost_steps"]
    summary.lost_by_cause[event["cause"]] += event["lost_steps"]
    summary.useful_seconds += event["kept_seconds"]
    if worker := summary.workers.get(event["worker"]):
        worker.lost_steps += event["lost_steps"]
        worker.steps += event["kept_steps"]
    if event["cause"] == "overtaken":  # another attempt's update is here
        return
    summary.lost_subnets.add((event["round"], event["subnet"]))
    summary.salvaged_steps += event["kept_steps"]
    _set(summary, event, "lost").losses += 1


def _staged(summary: RunTotals, event: Record) -> None:
    summary.useful_seconds += event["train_seconds"]
    if worker := summary.workers.get(event["worker"]):
        attempt = summary.open_attempts.get(event["attempt"])
        worker.steps += max(0, event["steps"] - (attempt.step if attempt else 0))
        worker.subnets += 1
    summary.puts["accepted"] += (
        event.get("steps", 0) == summary.local_steps_each
    )  # progress checkpoints are counted by their own event
    state = "accepted" if summary.policy == "rolling" else "staged"
    _set(summary, event, state, steps=event.get("steps", 0))


def _refused(summary: RunTotals, event: Record) -> None:
    summary.puts[event["reply"]] += 1


def _ended_attempt(summary: RunTotals, event: Record) -> None:
    summary.puts["duplicate"] += event.get("reply") == "duplicate"
    worker = summary.workers.get(event["worker"])
    lease = summary.open_attempts.pop(event["attempt"], None)
    if worker and worker.subnet == f"{event['round']}/{event['subnet']}":  # else it already has its next lease
        worker.subnet = ""
    if lease is None:
        return
    pull, train, push = (event.get(f"{part}_seconds", 0.0) for part in ("pull", "train", "push"))
    if worker:
        if train and "steps" in event:
            worker.pace = max(0, event["steps"] - lease.step) / train
        rates = [event.get(f"{p}_bytes", 0) / s for p, s in (("pull", pull), ("push", push)) if s > 0]
        worker.link_bytes_per_second = max(*rates, worker.link_bytes_per_second or 0.0, 0.0) or None
        summary.link_bytes_per_second = (
            max(worker.link_bytes_per_second or 0.0, summary.link_bytes_per_second or 0.0) or None
        )


def _end_leases(summary: RunTotals, address: str) -> None:
    for attempt in [attempt for attempt, lease in summary.open_attempts.items() if lease.worker == address]:
        del summary.open_attempts[attempt]


def _committed(summary: RunTotals, event: Record) -> None:
    summary.rounds = event["round"] + 1
    summary.local_steps += event["steps"]
    summary.train_loss, summary.lr = event.get("loss", summary.train_loss), event.get("lr", summary.lr)
    summary.least_trained = event.get("least_trained", summary.least_trained)
    summary.bytes_down += event["bytes_down"]
    summary.bytes_up += event["bytes_up"]
    seconds = max(event["seconds"], 1e-9)
    summary.steps_per_second = event["steps"] / seconds
    summary.bytes_per_second = (event["bytes_down"] + event["bytes_up"]) / seconds
    old = summary.round_seconds
    summary.round_seconds = event["seconds"] if old is None else 0.8 * old + 0.2 * event["seconds"]
    summary.round_ends.append(RoundEnd(event["round"], summary.seconds, event["seconds"], event["steps"]))
    for cell in summary.grid.get(event["round"], ()) if summary.policy != "rolling" else ():
        cell.state = "accepted" if cell.state == "staged" else "lost"


def _evaluated(summary: RunTotals, event: Record) -> None:
    summary.accuracy, summary.loss = event["accuracy"], event["loss"]
    summary.calibration_error, summary.temperature = event.get("calibration_error"), event.get("temperature")
    summary.constant_loss, summary.metrics = event.get("constant_loss"), event.get("metrics", {})
    scores = event["accuracy"], event["loss"], summary.metrics
    summary.curve.append(Evaluation(event["round"], summary.seconds, *scores, event.get("samples")))


def _best(summary: RunTotals, event: Record) -> None:
    summary.best = {name: event[name] for name in ("round", "metric", "value")}


def _warned(summary: RunTotals, event: Record) -> None:
    summary.warnings.append(event["reason"])


def _noted(summary: RunTotals, event: Record) -> None:
    summary.note = event["reason"] if event["kind"] != "resumed" else ""


def _trained(summary: RunTotals, event: Record) -> None:
    summary.status, summary.note = "running", event["text"]


def _machine(summary: RunTotals, event: Record) -> None:
    summary.machines.append(event)


def _ended(summary: RunTotals, event: Record) -> None:
    for field_ in ("status", "rounds", "params_sha256", "run_dir"):
        setattr(summary, field_, event[field_])
    summary.note = event.get("reason", summary.note if event["status"] == "stopped" else "")
    summary.machines.append(event)


def _set(summary: RunTotals, event: Record, state: str, **known: Any) -> Cell:
    """Set the state of a round's subnet in the grid and drop rounds that are too old; return its cell."""
    number = event["round"]
    if number not in summary.grid:
        summary.grid[number] = [Cell() for _ in range(summary.subnets)]
        for old in sorted(summary.grid)[:-GRID_ROUNDS]:
            del summary.grid[old]
    cells = summary.grid.get(number, [])
    cell = cells[event["subnet"]] if event["subnet"] < len(cells) else Cell()
    cell.state = state
    for name, value in known.items():
        setattr(cell, name, value)
    return cell


_ADD: dict[str, Callable[[RunTotals, Record], None]] = {
    "run_started": _started,
    "phase_started": _phase_started,
    "worker_joining": _joining,
    "joining_failed": _not_joining,
    "worker_refused": _not_joining,
    "worker_joined": _joined,
    "worker_notice": _noticed,
    "worker_left": _left,
    "leased": _leased,
    "progress_saved": _progress_saved,
    "lost": _lost,
    "staged": _staged,
    "refused": _refused,
    "attempt_ended": _ended_attempt,
    "round_committed": _committed,
    "evaluated": _evaluated,
    "best": _best,
    "warning": _warned,
    "paused": _noted,
    "resumed": _noted,
    "waiting": _noted,
    "trial": _trained,
    "stopping": _noted,
    "instance_launched": _machine,
    "instance_ended": _machine,
    "run_ended": _ended,
}
