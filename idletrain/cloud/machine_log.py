"""A run's books: which machines it had, from when to when, each told once. Bills are made of nothing else
(`observe.cost`).

Pure. A head tells of its machines while it leads; what it could not tell any more is added when the run is taken down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from idletrain.cloud.aws.account import Instance
from idletrain.cloud.aws.requests import Pool
from idletrain.cloud.record import RunRecord
from idletrain.observe.cost import CostEvent, bounds

MACHINE_LOG_SCHEMA = 2  # of `observe.records`, which is beside this layer
ENDED = ("shutting-down", "terminated")
UNSEEN_CLOSES_SECONDS = 60.0  # from a head's last word to the end of machines that nobody saw end


def new_records(
    reported: Iterable[CostEvent],
    instances: Iterable[Instance],
    run: RunRecord,
    prices: Mapping[Pool, float],
    now: float,
) -> list[dict[str, Any]]:
    """Machines that are new and machines that have ended, since what was told.

    Args:
        told: The run's events.
        found: Its machines as the cloud lists them, those that have ended among them.
        run: The run.
        prices: USD an hour of its pools.
        now: Unix seconds.
    """
    launched, ended = bounds(reported)
    entries: list[dict[str, Any]] = []
    for instance in instances:
        if instance.head_session != run.head_session:
            continue
        if instance.id not in launched:
            entries.append(_launched(instance, run, prices))
        if instance.state in ENDED and instance.id not in ended:
            entries.append({"kind": "instance_ended", "t": now, "instance": instance.id, "reason": instance.reason})
    return entries


def closing_records(
    reported: Sequence[CostEvent], alive: Collection[str], now: float, new: Sequence[CostEvent] = ()
) -> list[dict[str, Any]]:
    """The ends of machines that nobody told of, once all are gone.

    Args:
        told: The run's events.
        alive: Machines that were there until now.
        now: Unix seconds.
        news: What is told of its machines only now: no sign of life of its head.
    """
    launched, ended = bounds([*reported, *new])
    last = max((event["t"] for event in reported), default=now)
    return [
        {
            "kind": "instance_ended",
            "t": now if instance in alive else min(now, last + UNSEEN_CLOSES_SECONDS),
            "instance": instance,
            "reason": "",
        }
        for instance in launched.keys() - ended.keys()
    ]


def as_recorded(reported: Sequence[CostEvent], new: Iterable[CostEvent]) -> list[dict[str, Any]]:
    """Entries as lines behind those of a head that is gone, on its clock."""
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
