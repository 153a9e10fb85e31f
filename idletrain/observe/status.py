"""Build a run's view: its present state as plain JSON, from which the dashboard page, metrics and reports are made.

    run, status, note, waits_for, method, policy, run_dir, seconds, updated (Unix), heard_seconds (since then),
    allow_control
    rounds, total_rounds, subnets, local_steps, local_steps_each, steps_per_second,
    samples_per_second, epochs, lr, round_seconds, eta_seconds
    accuracy, loss, target, curve [[round, seconds, accuracy, loss]], preempted [[seconds, round, cause, name]]
    metrics {name: value}, metric_curves {name: {better ("higher", "lower" or ""), points [[round, seconds, value]]}}
    goodput, preemptions {notice, kill}, reissues, backups, salvaged_steps, lost_steps, lost_by_cause {cause: steps}
    bytes_down, bytes_up, bytes_per_second, link_bytes_per_second (the fastest transfer so far), puts {reply: count}
    cost {spent_usd, usd_per_hour, on_demand_usd, saving, budget_usd, left_usd} or null without priced machines
    grid [{round, cells [{state, worker, steps, losses}]}], newest last
    workers [{address, name, state, device, memory_bytes, pace, slow, link_bytes_per_second, age_seconds,
              usd_per_hour, subnet, steps}], states {joining, training, draining, gone: count}

Pure. Numbers that are not finite are null; times are in seconds.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from idletrain.observe import cost
from idletrain.observe.run_totals import Preemption, WorkerView
from idletrain.observe.summary import Summary

T = TypeVar("T")
View = dict[str, Any]
CELLS = 240  # most cells of the grid, in whole rounds, but at least two rounds
CURVE_POINTS = 200  # most points of a curve: one for every other pixel of a chart
PREEMPTION_MARKS = 120  # most marks on a time axis; preemptions closer together share one
VIEW_STATES = ("joining", "training", "draining", "gone")
SLOW_PACE = 0.5  # of the others' median, below which a worker is named as slow
GONE_SHOWN = 8  # workers that left last, shown next to those that are alive
VIEW_SILENCE_SECONDS = 60.0  # without an event, after which the view's clock stops


def view_of(summary: Summary, now: float, *, allow_control: bool = False) -> View:
    """Return the view at `now`, in Unix seconds."""
    silent = max(0.0, now - summary.updated) if summary.updated else 0.0
    live = summary.status == "running"
    seconds = summary.seconds + (min(silent, VIEW_SILENCE_SECONDS) if live else 0.0)
    departed = [worker for worker in summary.all_workers if worker.left is not None]
    rows = _workers(summary, seconds, departed)
    traffic = ("bytes_down", "bytes_up", "bytes_per_second")
    left_rounds = max(0, summary.total_rounds - summary.rounds)
    return {
        **{key: getattr(summary, key) for key in ("run", "status", "note", "method", "policy", "run_dir")},
        "waits_for": waits_for(summary),
        "seconds": seconds,
        "updated": summary.updated,
        "heard_seconds": silent if live else 0.0,
        "allow_control": allow_control,
        **{key: getattr(summary, key) for key in ("rounds", "total_rounds", "subnets", "local_steps")},
        "local_steps_each": summary.local_steps_each,
        "steps_per_second": summary.steps_per_second,
        "samples_per_second": summary.samples_per_second,
        "epochs": summary.epochs,
        "lr": summary.lr,
        "round_seconds": summary.round_seconds,
        "eta_seconds": left_rounds * summary.round_seconds if live and summary.round_seconds else None,
        "accuracy": _finite(summary.accuracy),
        "loss": _finite(summary.loss),
        "calibration_error": _finite(summary.calibration_error),
        "temperature": _finite(summary.temperature),
        "train_loss": _finite(summary.train_loss),
        "warnings": list(summary.warnings),
        "target": summary.target,
        "curve": [
            [e.round, e.seconds, _finite(e.accuracy), _finite(e.loss)] for e in thinned(summary.curve, CURVE_POINTS)
        ],
        "metrics": {name: _finite(value) for name, value in summary.metrics.items()},
        "metric_curves": _metric_curves(summary),
        "preempted": _preemption_marks(summary),
        "goodput": summary.goodput,
        "preemptions": {"notice": summary.notices, "kill": summary.kills},
        **{key: getattr(summary, key) for key in ("reissues", "backups", "salvaged_steps", "lost_steps")},
        "lost_by_cause": dict(summary.lost_by_cause),
        **{key: getattr(summary, key) for key in traffic},
        "link_bytes_per_second": summary.link_bytes_per_second,
        "puts": dict(summary.puts),
        "cost": cost_of(summary, now),
        "grid": _grid(summary),
        "workers": rows,
        "states": {state: sum(row["state"] == state for row in rows) for state in VIEW_STATES}
        | {"gone": len(departed)},
    }


def cost_of(summary: Summary, now: float) -> dict[str, float | None] | None:
    """Return the totals of the bill at `now`, or None for a run without priced machines."""
    bill = cost.accrued(summary.machines, now)
    if not bill.items:
        return None
    budget = summary.settings.get("job", {}).get("nodes", {}).get("budget_usd")
    return {
        "spent_usd": bill.spent_usd,
        "usd_per_hour": bill.usd_per_hour,
        "on_demand_usd": bill.on_demand_usd,
        "saving": bill.saving,
        "budget_usd": budget,
        "left_usd": None if budget is None else budget - bill.spent_usd,
    }


def waits_for(summary: Summary) -> str:
    """Return what the present round waits for, such as `subnet 3 on node-1 (60 of 120 steps)`; "" if all train."""
    cells = summary.grid.get(summary.rounds, [])
    if summary.status != "running" or summary.policy == "rolling" or not cells:
        return ""
    open_ = [(number, cell) for number, cell in enumerate(cells) if cell.state not in ("staged", "accepted")]
    if len(open_) == len(cells):
        return ""
    if len(open_) != 1:
        return f"{len(open_)} of {len(cells)} subnets" if open_ else "its commit"
    number, cell = open_[0]
    worker = summary.workers.get(cell.worker)
    if worker is None or worker.left is not None or cell.state in ("waiting", "lost"):
        return f"a worker for subnet {number}"
    return f"subnet {number} on {worker.name} ({cell.steps} of {summary.local_steps_each} steps)"


def slowness(summary: Summary) -> Callable[[WorkerView], bool]:
    """Return what tells whether a worker takes less than half as many steps a second as the median of the others."""
    paces = sorted(w.pace for w in summary.workers.values() if w.left is None and w.pace is not None)

    def is_slow(worker: WorkerView) -> bool:
        if worker.left is not None or worker.pace is None or len(paces) < 2:
            return False
        own, middle = bisect.bisect_left(paces, worker.pace), (len(paces) - 1) // 2
        others = [paces[at + (at >= own)] for at in ((middle,) if len(paces) % 2 == 0 else (middle - 1, middle))]
        return worker.pace < SLOW_PACE * statistics.mean(others)

    return is_slow


def thinned(items: Sequence[T], limit: int) -> list[T]:
    """Return about `limit` of the items at most, evenly spaced, always with the last one."""
    stride = -(-len(items) // limit) or 1
    return [*items[: len(items) - 1 : stride], *items[-1:]]


def _metric_curves(summary: Summary) -> dict[str, dict[str, Any]]:
    """Return the curves of the job's metrics, in its order, and of others that evaluations had."""
    evaluations = thinned(summary.curve, CURVE_POINTS)
    names = dict.fromkeys([*summary.better, *(name for one in evaluations for name in one.metrics)])
    return {
        name: {
            "better": summary.better.get(name, ""),
            "points": [[e.round, e.seconds, _finite(e.metrics[name])] for e in evaluations if name in e.metrics],
        }
        for name in names
    }


def _preemption_marks(summary: Summary) -> list[list[Any]]:
    marks: dict[int, list[Preemption]] = {}
    # The width is a power of two, so that most of the time the marks stay the same and are not drawn again.
    width = 2.0 ** math.ceil(math.log2(max(summary.seconds, 1.0) / PREEMPTION_MARKS))
    for preemption in summary.preempted:
        marks.setdefault(int(preemption.seconds / width), []).append(preemption)
    return [
        [
            close[0].seconds,
            close[0].round,
            "kill" if any(preemption.cause == "kill" for preemption in close) else "notice",
            close[0].name if len(close) == 1 else f"{len(close)} workers",
        ]
        for close in marks.values()
    ]


def _grid(summary: Summary) -> list[dict[str, Any]]:
    names = {address: worker.name for address, worker in summary.workers.items()}
    return [
        {
            "round": number,
            "cells": [
                {"state": c.state, "worker": names.get(c.worker, c.worker), "steps": c.steps, "losses": c.losses}
                for c in summary.grid[number]
            ],
        }
        for number in sorted(summary.grid)[-max(2, CELLS // max(1, summary.subnets)) :]
    ]


def _workers(summary: Summary, seconds: float, departed: Sequence[WorkerView]) -> list[dict[str, Any]]:
    """Return the rows of alive workers, joining ones, and those that left last."""
    prices = {e["instance"]: e["usd_per_hour"] for e in summary.machines if e.get("usd_per_hour") is not None}
    alive = [(address, worker) for address, worker in summary.workers.items() if worker.left is None]
    is_slow = slowness(summary)
    last = sorted(departed, key=lambda worker: -(worker.left or 0.0))[:GONE_SHOWN]
    return [
        *(_worker(summary, address, worker, seconds, prices, slow=is_slow(worker)) for address, worker in alive),
        *(_row(address, address, "joining", seconds - since) for address, since in summary.joining.items()),
        *(_row("", name, "joining", None, usd_per_hour=prices.get(name)) for name in _booting(summary)),
        *(_worker(summary, "", worker, seconds, prices) for worker in last),
    ]


def _booting(summary: Summary) -> list[str]:
    """Return the cloud machines from which no worker has joined yet."""
    ended = {e["instance"] for e in summary.machines if e["kind"] == "instance_ended"}
    ended |= {cloud_machine_of(worker.name) for worker in summary.all_workers}
    nodes = [e["instance"] for e in summary.machines if e["kind"] == "instance_launched" and e["role"] == "worker"]
    return [name for name in nodes if name not in ended] if summary.status == "running" else []


def _worker(
    summary: Summary,
    address: str,
    worker: WorkerView,
    seconds: float,
    prices: dict[str, float],
    *,
    slow: bool = False,
) -> dict[str, Any]:
    round_, _, number = worker.subnet.partition("/")
    cells = summary.grid.get(int(round_), []) if worker.subnet else []
    departed = worker.left is not None
    return _row(
        address,
        worker.name,
        "gone" if departed else "draining" if worker.noticed else "training",
        (worker.left if worker.left is not None else seconds) - worker.joined,
        device=worker.device,
        memory_bytes=worker.memory_bytes,
        pace=worker.pace,
        slow=slow,
        link_bytes_per_second=worker.link_bytes_per_second,
        usd_per_hour=prices.get(cloud_machine_of(worker.name)),
        subnet=worker.subnet,
        steps=cells[int(number)].steps if cells else None,
        cause=worker.cause,
    )


def _row(address: str, name: str, state: str, age_seconds: float | None, **known: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(
        ("device", "memory_bytes", "pace", "slow", "link_bytes_per_second", "usd_per_hour", "steps")
    )
    row = {"address": address, "name": name, "state": state, "age_seconds": age_seconds, "subnet": "", "cause": ""}
    return row | unknown | known


def cloud_machine_of(worker: str) -> str:
    """Return the machine of a worker on a cloud node, which is named `MACHINE-PID-NUMBER`."""
    return worker.rsplit("-", 2)[0]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
