"""Log which machines a run had, from when to when, each start and end once: all that a bill (`observe.cost`) needs.

Pure. The head node logs its machines while it leads; teardown adds what the head could no longer log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from idletrain.cloud.machines import ENDED_STATES, Instance, Pool
from idletrain.cloud.record import RunRecord
from idletrain.observe.cost import CostEvent, bounds

MACHINE_LOG_SCHEMA = 2  # schema of `observe.records`, which this layer cannot import
UNSEEN_CLOSES_SECONDS = 60.0  # from a head's last event to the assumed end of machines that nobody saw end


def new_records(
    reported: Iterable[CostEvent],
    instances: Iterable[Instance],
    run: RunRecord,
    prices: Mapping[Pool, float],
    now: float,
) -> list[dict[str, Any]]:
    """Return an event for each machine that started or ended and is not yet reported so.

    Args:
        reported: The run's events so far.
        instances: Its machines as the cloud lists them, ended ones included.
        run: The run's record.
        prices: USD an hour by pool.
        now: Unix seconds.
    """
    launched, ended = bounds(reported)
    entries: list[dict[str, Any]] = []
    for instance in instances:
        if instance.head_session != run.head_session:
            continue
        if instance.id not in launched:
            entries.append(_launched(instance, run, prices))
        if instance.state in ENDED_STATES and instance.id not in ended:
            entries.append({"kind": "instance_ended", "t": now, "instance": instance.id, "reason": instance.reason})
    return entries


def closing_records(
    reported: Sequence[CostEvent], alive: Collection[str], now: float, new: Sequence[CostEvent] = ()
) -> list[dict[str, Any]]:
    """Return an end event for each machine without one, once all machines are gone.

    Args:
        reported: The run's events so far.
        alive: Ids of machines that existed until now.
        now: Unix seconds.
        new: Machine events that are logged only now: they do not show that the head node was alive.
    """
    launched, ended = bounds([*reported, *new])
    ends = [
        {"kind": "instance_ended", "t": now, "instance": instance, "reason": ""}
        for instance in launched.keys() - ended.keys()
    ]
    return ended_unseen(ends, reported, alive, now)


def ended_unseen(
    new: Iterable[Mapping[str, Any]], reported: Iterable[CostEvent], alive: Collection[str], now: float
) -> list[dict[str, Any]]:
    """Return new records in which machines that ended before `now` end soon after the head's last event.

    Args:
        new: Machine events that are logged only now.
        reported: The run's events so far.
        alive: Ids of machines that existed until now.
        now: Unix seconds.
    """
    until = min(now, max((event["t"] for event in reported), default=now) + UNSEEN_CLOSES_SECONDS)
    launched = {event["instance"]: event["t"] for event in new if event["kind"] == "instance_launched"}
    return [
        {**event, "t": max(until, launched.get(event["instance"], until))}
        if event["kind"] == "instance_ended" and event["instance"] not in alive
        else dict(event)
        for event in new
    ]


def as_recorded(reported: Sequence[CostEvent], new: Iterable[CostEvent]) -> list[dict[str, Any]]:
    """Complete events as records that follow those of a head node that is gone, with seconds on its clock."""
    last = max(reported, key=lambda event: event["t"], default={"t": 0.0, "s": 0.0})
    return [
        {"v": MACHINE_LOG_SCHEMA, "s": last["s"] + max(0.0, event["t"] - last["t"]) if reported else 0.0, **event}
        for event in new
    ]


def _launched(instance: Instance, run: RunRecord, prices: Mapping[Pool, float]) -> dict[str, Any]:
    pool = instance.pool
    return {
        "kind": "instance_launched",
        "t": instance.launched_at,
        "instance": instance.id,
        "role": instance.role,
        "type": pool.type,
        "zone": pool.zone,
        "market": pool.market,
        "usd_per_hour": prices.get(pool),
        "on_demand_usd_per_hour": run.on_demand.get(pool.type),
    }
