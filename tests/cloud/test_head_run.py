"""A head trains a run with a worker of this machine and a fleet whose machines sleep."""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rehearsal import RECORD, Sandbox, sleeping

from idletrain.cloud import head_run, record, teardown
from idletrain.cloud.aws.account import Account
from idletrain.cloud.controller import FleetController
from idletrain.cluster import certificates, dask_scheduler
from idletrain.cluster.local import LocalFleet
from idletrain.job_file import parse_job
from idletrain.rounds.coordinator import RunOutcome
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

DIGITS = {
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}},
    "data": {"name": "digits"},
    "training": {"subnets": 1, "rounds": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.05}},
    "nodes": {"count": 1, "memory": "1GiB"},
}


def test_what_a_job_leaves_open_is_chosen_and_a_machine_lost_behind_the_last_round_fails_no_run(
    cloud: Sandbox, account: Account, prefix: S3Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sleeping(account, count=1)
    run = replace(run, job=parse_job({**DIGITS, "name": run.run}).as_tree())
    record.claim(prefix, run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the run adds to

    async def check() -> str:
        async with dask_scheduler.started(tmp_path, identity=identities["head"]) as address:
            controller = FleetController(account, run, address)
            await controller.check()
            (machine,) = account.instances(run.run)
            _lose_at_the_end(monkeypatch, cloud, controller, machine.id)
            fleet = LocalFleet(address, 1 << 30, tmp_path / "logs", options=options)
            try:
                fleet.start(1)
                await head_run.lead_run(run, prefix, controller, identities["head"], address)
            finally:
                await fleet.close()
        return machine.id

    until = datetime.datetime.fromtimestamp(time.time() + 3600, datetime.UTC)
    identities = certificates.issue(run.run, ("head", "worker"), until)
    options = []
    for what, text in asdict(identities["worker"]).items():
        (tmp_path / what).write_text(text)
        options += [{"ca": "--tls-ca-file"}.get(what, f"--tls-{what}"), str(tmp_path / what)]
    lost = asyncio.run(check())

    events = {event["kind"]: event for event in s3_mirror.events(prefix)}
    assert any("local steps" in reason for reason in events["run_started"]["why"])
    assert set(events["round_committed"]["expected"]) == set(events["round_committed"]["measured"])
    assert events["run_ended"]["status"] == "completed"
    assert account.instances(run.run) == []
    teardown.take_down(account, run.run, prefix)
    ends = [e for e in s3_mirror.events(prefix) if e["kind"] == "instance_ended"]
    assert [(e["instance"], e["reason"]) for e in ends] == [(lost, "Server.SpotInstanceTermination")]


def test_results_that_cannot_be_written_fail_no_run_and_are_told(account: Account, prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    job = parse_job({**DIGITS, "name": "no-such-run"})
    head_run._keep_results(job, prefix, RunOutcome("completed", 2, "", None, None))
    told = record.read(prefix).leftover
    assert told.startswith(f"the model of no-such-run could not be written to {prefix.url}; `idletrain export no-such")
    assert record.read(prefix).failure == ""


def _lose_at_the_end(patch: pytest.MonkeyPatch, cloud: Sandbox, controller: FleetController, machine: str) -> None:
    """Take the machine while the results are uploaded after the last round, and have the controller check."""
    upload, loop = head_run._upload_results, asyncio.get_running_loop()

    def late(*arguments: Any) -> None:
        cloud.ask("POST", "take", instance=machine)
        asyncio.run_coroutine_threadsafe(controller.check(), loop).result(30)
        upload(*arguments)

    patch.setattr(head_run, "_upload_results", late)
