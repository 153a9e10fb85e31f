"""Every method's settings that are tried, case by case; the best of each is kept.

All methods choose from the same learning rates with and without momentum; those that synchronise now and then, from
several intervals. What did worse in a first, coarser look is left out here and named in RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.contest import Entry

PROBE = 20  # steps over a link of what would take too long there

# case -> local optimizers; of each method one of them
LR = {"a": 0.2, "b": 0.2, "c": 0.2, "d": 1e-3, "tiny": 0.2}


def candidates(case: str, link: str) -> tuple[Entry, ...]:
    """What runs when nothing else is asked for."""
    if case == "tiny":
        return tuple(_tiny())
    return tuple(_entries(case, link))


def _tiny() -> Iterator[Entry]:
    rates: dict[str, Any] = {"lr": 0.2}
    yield Entry(method="ist", settings={**rates, "local_steps": 20}, steps=120, snapshot_every=20)
    yield Entry(method="ddp", settings=rates, steps=40, snapshot_every=20)
    yield Entry(method="post-local-sgd", settings={**rates, "sync_every": 10}, steps=40, snapshot_every=20)
    yield Entry(method="torchft-diloco", settings={**rates, "sync_every": 10}, steps=40, snapshot_every=20)
    yield Entry(method="hivemind", settings={**rates, "sync_every": 10, "local": True}, steps=40, snapshot_every=20)


def _entries(case: str, link: str) -> Iterator[Entry]:
    """The comparison's entries: the sweep of intervals for each method."""
    base: dict[str, Any] = {"lr": LR[case]} | ({"name": "adamw"} if case == "d" else {})
    whole = {"steps": 320, "snapshot_every": 20}
    for local_steps in (25, 50, 100):
        yield Entry(method="ist", settings={**base, "local_steps": local_steps}, steps=3000, snapshot_every=1)
    for local_steps in (10, 25):
        yield Entry(method="local-sgd", settings={**base, "local_steps": local_steps}, steps=400, snapshot_every=1)
    for sync_every in (10, 25, 50):
        each: dict[str, Any] = {**base, "sync_every": sync_every}
        yield Entry(method="post-local-sgd", settings={**each, "warmup": 0}, **whole)
        yield Entry(method="torchft-local-sgd", settings=each, **whole)
        yield Entry(method="torchft-diloco", settings=each, **whole)
        yield Entry(method="hivemind", settings={**each, "local": True}, **whole)
    probe = whole if link == "none" else {"steps": PROBE, "snapshot_every": 0}
    yield Entry(method="ddp", settings=base, **probe)
    yield Entry(method="ddp-fp16", settings=base, **probe)
    for rank in (1, 4):
        yield Entry(method="ddp-powersgd", settings={**base, "rank": rank, "start_iter": 2}, **probe)
