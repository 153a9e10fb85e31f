"""The settings to try with every method, case by case; the best of each counts.

The local optimizer is the same for all: SGD with momentum, or AdamW for the transformer, with a cosine schedule over
the steps that the method is given (`horizon`). Those that synchronise now and then try several intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.methods import Entry

PROBE = 20  # steps over a link of what would take too long there
COSINE_SGD = {"lr": 0.1, "momentum": 0.9, "schedule": "cosine"}
COSINE_ADAMW = {"name": "adamw", "lr": 2e-3, "schedule": "cosine"}
OPTIMIZERS: dict[str, dict[str, Any]] = {"a": COSINE_SGD, "b": COSINE_SGD, "c": COSINE_SGD, "d": COSINE_ADAMW}
# Subnets of an eighth of the network learn best at a higher rate (results/learning_rates.json): 0.004 and 0.008 tried.
NARROW: dict[str, dict[str, Any]] = {"d": {"lr": 8e-3}}
# Steps of every node that bring a method to about the target: data parallel, local SGD, IST.
CASE_STEPS = {"a": (160, 200, 1000), "b": (160, 175, 1600), "c": (160, 200, 800), "d": (200, 250, 1000)}
SYNC_INTERVALS = (10, 25, 50)
IST_INTERVALS = (25, 50, 100)


def candidates(case: str, link: str) -> tuple[Entry, ...]:
    """Return the entries that run by default."""
    return tuple(_tiny() if case == "tiny" else _entries(case, link))


def _tiny() -> Iterator[Entry]:
    rates: dict[str, Any] = {"lr": 0.2}
    yield Entry(method="ist", settings={**rates, "local_steps": 20}, steps=120, snapshot_every=20)
    yield Entry(method="ddp", settings=rates, steps=40, snapshot_every=20)
    settings = {**rates, "rank": 2, "start_iter": 3}
    yield Entry(method="ddp-powersgd", settings=settings, steps=20, snapshot_every=20, budget_seconds=30.0)
    for method in ("post-local-sgd", "torchft-diloco"):
        yield Entry(method=method, settings={**rates, "sync_every": 10}, steps=40, snapshot_every=20)
    yield Entry(method="hivemind", settings={**rates, "sync_every": 10, "timeout": 5.0}, steps=20, snapshot_every=1)


def _entries(case: str, link: str) -> Iterator[Entry]:
    """Return the sweep of intervals for each method; what synchronises at every step is only timed over a slow link."""
    rates, (whole, local, ist) = OPTIMIZERS[case], CASE_STEPS[case]
    ours = {**rates, "state": "reset"}  # a momentum that travels doubles the bytes
    for every in IST_INTERVALS:
        yield Entry(
            method="ist",
            settings={**ours, **NARROW.get(case, {}), "local_steps": every},
            steps=ist,
            snapshot_every=every,
        )
    for every in SYNC_INTERVALS:
        each: dict[str, Any] = {**rates, "horizon": local, "sync_every": every}
        goes: dict[str, Any] = {"steps": local, "snapshot_every": every}
        yield Entry(method="local-sgd", settings={**ours, "local_steps": every}, **goes)
        yield Entry(method="post-local-sgd", settings={**each, "warmup": 0}, **goes)
        yield Entry(method="torchft-local-sgd", settings=each, **goes)
        yield Entry(method="torchft-diloco", settings=each, **goes)
        for delay in (True, False):  # nodes meet when they together have done so many steps, so at any of their own
            yield Entry(method="hivemind", settings={**each, "delay": delay}, steps=local, snapshot_every=1)
    steps: dict[str, Any] = {"steps": whole, "snapshot_every": 20}
    if link != "none":
        steps = {"steps": PROBE, "snapshot_every": 0}
    parallel = {**rates, "horizon": whole}
    yield Entry(method="ddp", settings=parallel, **steps)
    yield Entry(method="ddp-fp16", settings=parallel, **steps)
    for rank in (1, 4):
        settings = {**parallel, "rank": rank, "start_iter": 10}
        yield Entry(method="ddp-powersgd", settings=settings, steps=whole, snapshot_every=20)
