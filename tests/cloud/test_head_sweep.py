"""A head trains the trials of a sweep with a worker of this machine and a fleet whose machines sleep."""

from __future__ import annotations

import asyncio
import datetime
import json
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
from idletrain.cloud.head_sweep import lead_sweep, outcome
from idletrain.cloud.record import RunRecord, SweepOrder
from idletrain.cluster import certificates, dask_scheduler
from idletrain.cluster.local import LocalFleet
from idletrain.observe import cost
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
def prefix(prefix: S3Prefix) -> S3Prefix:
    """The sweep's, beside which no other test has trials."""
    return S3Prefix.at(f"{prefix.url}sweep", prefix.client)


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
        keeping = asyncio.ensure_future(controller.run())
        try:
            fleet.start(1)
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
    assert done.usd == pytest.approx(cost.accrued(s3_mirror.events(prefix), time.time()).spent_usd, rel=0.5)
    beside = [record.read(prefix.beside(name)) for name in (wide, narrow)]
    assert [(trial.run, trial.fleet, trial.state) for trial in beside] == [
        (n, run.run, "ended") for n in (wide, narrow)
    ]
    assert (beside[0].failure, beside[1].failure) == ("", failed.reason)
    kinds = [event["kind"] for event in s3_mirror.events(prefix.beside(wide))]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_ended")
    assert prefix.beside(wide).get("model.safetensors").content
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
    def has_come(*_: Any) -> str:
        logs = [*Path(".idletrain/runs").glob("eve-*/events.jsonl")]
        return "its budget of $1.00 is used up" if any("round_committed" in log.read_text() for log in logs) else ""

    monkeypatch.setattr(head_run, "LIMIT_POLL_SECONDS", 0.2)
    monkeypatch.setattr(head_run, "why_stop", has_come)
    sweep = order(Varied("training.optimizer.lr", (0.1, 0.2)), rounds=100_000)
    first, second = led_to_its_end(replace(run, sweep=sweep), prefix, account, tmp_path)
    assert (first.state, first.began, second.state) == ("stopped", True, "waiting")
    *_, stopping, ended = (e for e in s3_mirror.events(prefix) if e["kind"] in ("stopping", "run_ended"))
    assert stopping["reason"] == "its budget of $1.00 is used up"
    assert (ended["status"], ended["reason"]) == ("stopped", "2 of 2 trials did not end")
    trial = from_plain(sweep.trials)[0].job.name
    assert s3_mirror.events(prefix.beside(trial))[-1]["status"] == "stopped"
    assert record.read(prefix.beside(trial)).state == "ended"


def test_a_trial_that_goes_on_has_cost_what_both_heads_took(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path
) -> None:
    sweep = order(Varied("training.optimizer.lr", (0.1, 0.2)))
    names = [trial.job.name for trial in from_plain(sweep.trials)]
    before = [asdict(SweepResult(state="completed", usd=2.0)), asdict(SweepResult(state="stopped", usd=1.0))]
    prefix.put(s3_mirror.SWEEP_RESULTS, json.dumps(dict(zip(names, before, strict=True))).encode())
    first, second = led_to_its_end(replace(run, sweep=sweep, spent_usd=3.5), prefix, account, tmp_path)
    assert (first.usd, first.values) == (2.0, [])  # it had ended
    assert second.state == "completed"
    assert second.usd == pytest.approx(1.5, abs=0.1)


def test_a_run_of_the_user_s_is_not_taken_for_a_trial(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path
) -> None:
    sweep = order(Varied("training.optimizer.lr", (0.1,)))
    (name,) = (trial.job.name for trial in from_plain(sweep.trials))
    theirs = replace(run, run=name)
    record.claim(prefix.beside(name), theirs)
    (failed,) = led_to_its_end(replace(run, sweep=sweep), prefix, account, tmp_path)
    assert failed.state == "failed"
    assert "holds a run that is no trial of this sweep; name the sweep with --name" in failed.reason
    assert record.read(prefix.beside(name)) == theirs


def test_where_no_node_comes_a_trial_fails_and_the_others_wait(
    run: RunRecord, prefix: S3Prefix, account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFleet, "start", lambda *_: None)
    tree = {**DIGITS, "nodes": {**DIGITS["nodes"], "idle_duration": "2s"}}
    nodes = {"budget_usd": None, "max_price": None, "idle_duration": 3.5}  # the run itself gives up first
    found = trials(tree, [Varied("training.seed", (1, 2))])
    sweep = replace(order(Varied("training.seed", (1, 2))), trials=as_plain(found))
    first, second = led_to_its_end(replace(run, sweep=sweep, job={"nodes": nodes}), prefix, account, tmp_path)
    assert (first.state, second.state) == ("failed", "waiting")
    assert "no worker" in first.reason
    stopping, ended = (e for e in s3_mirror.events(prefix) if e["kind"] in ("stopping", "run_ended"))
    assert (stopping["reason"], ended["status"]) == (first.reason, "stopped")


def test_a_sweep_that_did_not_end_is_not_called_completed() -> None:
    done = SweepResult("completed", values=[(3, 0.1)])
    assert outcome({"a": done}) == {"status": "completed", "rounds": 3}
    left = outcome({"a": done, "b": SweepResult("stopped", values=[(1, 0.2)]), "c": SweepResult()})
    assert left == {"status": "stopped", "rounds": 4, "reason": "2 of 3 trials did not end"}
