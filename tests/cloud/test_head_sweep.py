"""A head trains the trials of a sweep with a worker of this machine and a fleet whose machines sleep."""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rehearsal import sleeping

from idletrain.cloud import head_run, record
from idletrain.cloud.aws.account import Account
from idletrain.cloud.controller import FleetController
from idletrain.cloud.head_run import RunHooks
from idletrain.cloud.head_sweep import HeadTrial, lead_sweep, sibling
from idletrain.cloud.reconcile import NOTICE_LEFT_SECONDS
from idletrain.cloud.record import RunRecord, SweepOrder
from idletrain.cluster import certificates, dask_scheduler
from idletrain.cluster.local import LocalFleet
from idletrain.errors import RunError
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix
from idletrain.sweeps.grid import Varied, as_plain, from_plain, trials
from idletrain.sweeps.trial_results import SweepResult, parse_results

DIGITS: dict[str, Any] = {
    "name": "eve",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}},
    "data": {"name": "digits"},
    "training": {
        "method": "ist", "subnets": 1, "local_steps": 20, "rounds": 2, "batch_size": 32,
        "optimizer": {"name": "sgd", "lr": 0.05},
    },
    "nodes": {"count": 1, "memory": "1GiB"},
}  # fmt: skip


def order(*varied: Varied, prune: bool = False, **training: Any) -> SweepOrder:
    tree = {**DIGITS, "training": {**DIGITS["training"], **training}}
    return SweepOrder(trials=as_plain(trials(tree, varied)), watched="loss", better="lower", prune=prune)


@pytest.fixture
def run(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the head adds to
    run = sleeping(account, count=1)
    return replace(run, job={**run.job, "nodes": {"budget_usd": None, "max_price": None, "idle_duration": 600.0}})


@asynccontextmanager
async def led(run: RunRecord, account: Account, folder: Path) -> AsyncIterator[tuple[FleetController, Any, str]]:
    """A scheduler with a worker, and what a head knows of them."""
    until = datetime.datetime.fromtimestamp(time.time() + 3600, datetime.UTC)
    identities = certificates.issue(run.run, ("head", "worker"), until)
    options = identities["worker"].write(folder / "worker")
    assert set(asdict(identities["worker"])) == {"ca", "cert", "key"}
    async with dask_scheduler.started(folder, identity=identities["head"]) as address:
        controller = FleetController(account, run, address)
        await controller.check()
        fleet = LocalFleet(address, 1 << 30, folder / "logs", options=options)
        try:
            fleet.start(1)
            keeping = asyncio.ensure_future(controller.run())
            yield controller, identities["head"], address
        finally:
            keeping.cancel()
            await fleet.close()


def led_to_its_end(run: RunRecord, prefix: S3Prefix, account: Account, folder: Path) -> list[SweepResult]:
    async def lead() -> None:
        async with led(run, account, folder) as (controller, identity, address):
            await lead_sweep(run, prefix, controller, identity, address)

    record.claim(prefix, run)
    asyncio.run(lead())
    assert run.sweep
    names = [trial.job.name for trial in from_plain(run.sweep.trials)]
    return list(parse_results(prefix.get(s3_mirror.SWEEP_RESULTS).content, names).values())


def test_each_trial_is_a_run_beside_the_sweep_and_one_that_cannot_run_says_why(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path
) -> None:
    sweep = order(Varied("model.args.widths", ([64, 16, 10], [7, 16, 10])))
    wide, narrow = (trial.job.name for trial in from_plain(sweep.trials))
    done, failed = led_to_its_end(replace(run, sweep=sweep), prefix, account, tmp_path)
    assert (done.state, failed.state) == ("completed", "failed")
    assert "64" in failed.reason
    assert done.usd > 0
    beside = [record.read(sibling(prefix, name)) for name in (wide, narrow)]
    assert [(trial.run, trial.fleet, trial.state) for trial in beside] == [
        (n, run.run, "ended") for n in (wide, narrow)
    ]
    assert (beside[0].failure, beside[1].failure) == ("", failed.reason)
    kinds = [event["kind"] for event in s3_mirror.events(sibling(prefix, wide))]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")
    assert sibling(prefix, wide).get("model.safetensors").content
    own = s3_mirror.events(prefix)
    assert [event["kind"] for event in own if event["kind"].startswith("instance_")] == ["instance_launched"]
    assert (own[-1]["status"], own[-1]["reason"]) == ("stopped", "1 of 2 trials did not end")


def test_a_trial_that_is_far_behind_is_pruned_on_the_head(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path
) -> None:
    sweep = order(Varied("training.optimizer.lr", (0.1, 1e-6)), prune=True, rounds=60, evaluate_every=1)
    good, bad = led_to_its_end(replace(run, sweep=sweep), prefix, account, tmp_path)
    assert (good.state, bad.state) == ("completed", "pruned")
    assert bad.values[-1][0] < 60
    assert s3_mirror.events(prefix)[-1]["status"] == "completed"


def test_a_limit_stops_the_trial_that_trains_and_begins_no_other(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_run, "LIMIT_POLL_SECONDS", 0.2)
    sweep = order(Varied("training.optimizer.lr", (0.1, 0.2)), rounds=100_000)
    limited = replace(run, sweep=sweep, deadline=time.time() + NOTICE_LEFT_SECONDS + 6)
    first, second = led_to_its_end(limited, prefix, account, tmp_path)
    assert (first.state, first.began, second.state) == ("stopped", True, "waiting")
    *_, stopping, ended = (e for e in s3_mirror.events(prefix) if e["kind"] in ("stopping", "run_ended"))
    assert stopping["reason"] == "its deadline is near, by nodes.max_duration or the budget"
    assert (ended["status"], ended["reason"]) == ("stopped", "2 of 2 trials did not end")


class Trained:
    """What trains a trial in the tests below."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.hooks, self.stopped = error, RunHooks(), asyncio.Event()

    async def __call__(self, hooks: RunHooks) -> None:
        self.hooks = hooks
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        await self.stopped.wait()


@pytest.mark.parametrize(
    ("error", "why"),
    [(RunError("no room"), "no room"), (ValueError("x"), "the head met a bug, not your fault: ValueError('x')")],
)
def test_why_a_trial_failed_is_a_sentence(error: Exception, why: str, controller: FleetController) -> None:
    async def check() -> tuple[list[Any], str]:
        trial = HeadTrial(Trained(error), controller)
        return [entry async for entry in trial.records()], await trial.wait()

    assert asyncio.run(check()) == ([], why)


def test_a_trial_is_stopped_in_order_once_it_trains_and_at_once_before(controller: FleetController) -> None:
    async def check() -> list[str]:
        early = HeadTrial(Trained(), controller)
        early.interrupt()
        whys = [await early.wait()]
        trained = Trained()
        late = HeadTrial(trained, controller)
        await asyncio.sleep(0)
        trained.hooks.on_start(trained.stopped.set, print)
        late.interrupt()
        whys.append(await late.wait())
        left = HeadTrial(Trained(), controller)
        await left.end()
        return [*whys, await left.wait()]

    before = "it was stopped before it began"
    assert asyncio.run(check()) == [before, "", before]


@pytest.fixture
def controller(account: Account, run: RunRecord) -> FleetController:
    return FleetController(account, run, "tls://127.0.0.1:1")
