"""What the store is told by workers that are wrong, late or broken; and what goes through the scheduler."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from distributed import Client
from torch import Tensor

from idletrain.exchange.client import StoreClient
from idletrain.exchange.messages import LeaseId, PushHeader, Reply, checksum

from .helpers import Cluster, Control, Run, ask_store, until

LARGEST_MESSAGE = 64 << 10


def header(lease: LeaseId, flat: Tensor, steps: int) -> PushHeader:
    return PushHeader(lease, steps, 1.0, checksum([flat.numpy().data.cast("B")]))


def test_wrong_pushes_are_refused_by_name(
    make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    """Each costs its lease; the subnet is leased again, and the parameters are as if nothing had been."""
    run = make_run(rounds=2, nodes=4)
    control.hold()
    head = run.launch()

    def push(change: Callable[[PushHeader, Tensor], tuple[PushHeader, Tensor]], steps: int = 20) -> Reply:
        leased = until("an open lease", lambda: [e for e in run.busy().values() if current(run, e)])[0]

        async def ask(client: StoreClient) -> Reply:
            lease = run.lease_id(leased)
            _, flat = await client.pull(lease)
            return (await client.push(*change(header(lease, flat, steps), flat))).reply

        reply = ask_store(run.store(head), ask)
        if reply is not Reply.ACCEPTED:
            refused = run.wait("the refusal", "refused", lambda e: e["attempt"] == leased["attempt"])
            assert refused["reply"] == reply
        return reply

    def flipped(head_: PushHeader, flat: Tensor) -> tuple[PushHeader, Tensor]:
        bits = flat.numpy().view(np.uint8)
        bits[100] ^= 1
        return head_, flat

    def cut(head_: PushHeader, flat: Tensor) -> tuple[PushHeader, Tensor]:
        return header(head_.lease, flat[:-1].clone(), head_.steps), flat[:-1].clone()

    def not_finite(head_: PushHeader, flat: Tensor) -> tuple[PushHeader, Tensor]:
        flat[7] = torch.nan
        return header(head_.lease, flat, head_.steps), flat

    def as_it_is(head_: PushHeader, flat: Tensor) -> tuple[PushHeader, Tensor]:
        return head_, flat

    run.wait("leases", "leased", count=2)
    until("four workers", lambda: len(run.workers()) == 4)
    assert push(flipped) is Reply.CORRUPT
    assert push(cut) is Reply.WRONG_SHAPE
    run.wait("new leases", "leased", count=4)
    control.release()  # attempts whose lease is over end at their next beat
    control.pace(0.1)
    assert push(not_finite) is Reply.NOT_FINITE
    control.pace(0)
    assert head.exit_code() == 0, head.text
    refused = run.events("refused")
    assert {e["reply"] for e in refused} >= {"corrupt", "wrong-shape", "not-finite"}
    attempts = {e["attempt"] for e in refused}
    causes = {attempt: {e["cause"] for e in run.events("lost") if e["attempt"] == attempt} for attempt in attempts}
    assert set().union(*causes.values()) - {"overtaken"} == {"refused"}, causes  # by a backup, of a slow worker
    others = {e["cause"] for e in run.events("lost") if e["attempt"] not in attempts}
    assert others <= {"overtaken"}
    run.check(undisturbed())


def current(run: Run, leased: dict[str, Any]) -> bool:
    """Whether a lease has not been taken back."""
    return not [e for e in run.events("lost", "staged") if e["attempt"] == leased["attempt"]]


def test_late_and_repeated_pushes(
    make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3)
    head = run.launch()
    control.pace(0.05)
    old = run.wait("a staged subnet", "staged")
    control.pace(0.5)
    newest = run.wait("leases of the second round", "leased", lambda e: e["round"] == 1)
    this = run.lease_id(newest)

    async def ask(client: StoreClient) -> list[Reply]:
        _, flat = await client.pull(this)
        flat += 1.0  # would change the result

        async def push(lease: LeaseId, steps: int = 20) -> Reply:
            return (await client.push(header(lease, flat, steps), flat)).reply

        return [
            await push(dataclasses.replace(this, round=0, subnet=old["subnet"], attempt=old["attempt"])),
            await push(dataclasses.replace(this, attempt=this.attempt + 100)),
            await push(dataclasses.replace(this, epoch=this.epoch - 1)),
            await push(dataclasses.replace(this, run="another")),
            await push(dataclasses.replace(this, subnet=99)),
            await push(dataclasses.replace(this, subnet=-1)),
        ]

    replies = ask_store(run.store(head), ask)
    assert replies[:4] == [Reply.STALE_ROUND, Reply.NOT_LEASED, Reply.STALE_EPOCH, Reply.STALE_EPOCH]
    assert set(replies[4:]) <= {Reply.STALE_ROUND, Reply.NOT_LEASED}
    assert len(run.events("refused")) >= 6  # a mark of the first round may have come late, too
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())


def test_a_duplicate_is_called_so(make_run: Callable[..., Run], control: Control, cluster: Cluster) -> None:
    """One worker and two subnets: the first is staged while the second trains, and so can be sent again."""
    run = make_run(rounds=1, nodes=1)
    cluster.idletrain_worker()
    control.pace(0.02)
    head = run.launch("--scheduler", cluster.address)
    first = run.wait("a staged subnet", "staged")
    control.hold()
    again = LeaseId(run.job.name, 1, 0, first["subnet"], first["attempt"])
    second = run.wait("the other's lease", "leased", lambda e: e["subnet"] != first["subnet"])

    async def ask(client: StoreClient) -> list[Reply]:
        _, flat = await client.pull(run.lease_id(second))
        return [
            (await client.push(header(again, flat, 20), flat)).reply,
            (await client.push(header(run.lease_id(second), flat, 21), flat)).reply,
        ]

    assert ask_store(run.store(head), ask) == [Reply.DUPLICATE, Reply.WRONG_SHAPE]
    assert run.wait("the refusal", "refused")["reply"] == "wrong-shape"
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)


def test_nothing_large_goes_through_the_scheduler(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    """Counts every task argument and result, and the scheduler's memory, while 50 MB go to and fro."""
    run = make_run(rounds=12, nodes=1, model={"args": {"widths": [64, 1024, 1024, 10]}}, training={"local_steps": 1})
    cluster.idletrain_worker()

    async def watch() -> tuple[int, int]:
        async with Client(cluster.address, asynchronous=True, set_as_default=False) as client:
            await client.run_on_scheduler(install_gauge)
            process = psutil.Process(cluster.scheduler.pid)
            head = run.launch("--scheduler", cluster.address)
            while not run.events("round_committed"):
                await asyncio.sleep(0.1)
            before = process.memory_info().rss
            while head.running:
                await asyncio.sleep(0.1)
            assert head.exit_code() == 0, head.text
            sizes = await client.run_on_scheduler(read_gauge)
            assert sizes["tasks"] >= 25, "the gauge saw no tasks"
            return max(sizes["argument"], sizes["result"]), process.memory_info().rss - before

    largest, growth = asyncio.run(watch())
    assert sum(e["bytes_up"] + e["bytes_down"] for e in run.events("round_committed")) > 50e6
    assert 0 < largest <= LARGEST_MESSAGE
    assert growth < 20 << 20
    run.check(None)


def install_gauge(dask_scheduler: Any) -> None:
    from distributed.diagnostics.plugin import SchedulerPlugin

    class Gauge(SchedulerPlugin):
        name = "gauge"

        def __init__(self) -> None:
            self.sizes = {"argument": 0, "result": 0, "tasks": 0}

        def transition(self, key: Any, _start: str, finish: str, *_args: Any, **_kwargs: Any) -> None:
            task = dask_scheduler.tasks.get(key)
            if task is None:
                return
            if finish == "processing":
                self.sizes["tasks"] += 1
                self.sizes["argument"] = max(self.sizes["argument"], len(pickle.dumps(task.run_spec)))
            if finish == "memory":
                self.sizes["result"] = max(self.sizes["result"], task.nbytes)

    dask_scheduler.add_plugin(Gauge())


def read_gauge(dask_scheduler: Any) -> dict[str, int]:
    return dict(dask_scheduler.plugins["gauge"].sizes)
