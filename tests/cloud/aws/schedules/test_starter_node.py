"""What EventBridge would start, booted by the rehearsal cloud: a machine that starts a run's head, and ends.

EventBridge itself starts nothing there: the test sends EC2 what it would send.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nightly import a_schedule
from rehearsal import Sandbox, eventually

from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.schedules import resources
from idletrain.job_file import parse_job
from idletrain.schedules.cron import Schedule

SECONDS = 120.0  # a machine's boot is three imports of torch, one behind the other, on whatever else this machine does
NIGHTLY = a_schedule(tz="UTC")
JOB = parse_job(
    {
        "name": "digits",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
        "data": {"name": "digits"},
        "training": {"rounds": 100000, "subnets": 2},
        "nodes": {"count": 1, "memory": "1GiB"},
        "cloud": {"image": "idletrain"},
    }
)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """A rehearsal cloud that is this process' cloud."""
    cloud = Sandbox(tmp_path / "logs", "--notice", "5s")
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    yield cloud
    cloud.close()


def fire(account: Account, schedule: Schedule, time: str) -> str:
    """Do what EventBridge does at a time; returns the instance."""
    target_input = account.client("scheduler").get_schedule(Name=f"idletrain-{schedule.name}")["Target"]["Input"]
    started = account.ec2.run_instances(**json.loads(target_input.replace("<aws.scheduler.scheduled-time>", time)))
    id_: str = started["Instances"][0]["InstanceId"]
    return id_


def notes(account: Account, name: str) -> list[tuple[str, str]]:
    return [(e.run, e.note) for e, _ in resources.history(account, name, JOB, 5)]


def test_a_starter_starts_a_head_and_ends_and_the_next_one_sees_that_it_still_runs(sandbox: Sandbox) -> None:
    account = Account(sandbox.region)
    weekly = replace(NIGHTLY, name="weekly")
    for schedule in (NIGHTLY, weekly):
        resources.install(account, schedule, JOB, None, "1.0")
    resources.prefix_of(account, "weekly", JOB).delete([resources.JOB])

    first = fire(account, NIGHTLY, "2026-03-02T02:00:00Z")
    assert fire(account, NIGHTLY, "2026-03-02T02:00:00Z") == first  # its answer was lost, so it was sent again
    broken = fire(account, weekly, "2026-03-02T02:00:00Z")

    def heads() -> list[Any]:
        return [m for m in account.instances(states=("pending", "running")) if m.role == "head"]

    (head,) = eventually(heads, SECONDS)
    assert head.run == "nightly-20260302-0200"
    eventually(lambda: notes(account, "nightly") == [("nightly-20260302-0200", "")], SECONDS)
    eventually(lambda: sandbox.state(first)["State"]["Name"] == "terminated", SECONDS)
    eventually(lambda: sandbox.state(broken)["State"]["Name"] == "terminated", SECONDS)
    ((_, why),) = notes(account, "weekly")
    assert why.startswith("not started: ")
    assert why.endswith("holds no job; remove the schedule and add it again")

    fire(account, NIGHTLY, "2026-03-03T02:00:00Z")
    skipped = ("nightly-20260303-0200", "skipped: still running")
    eventually(lambda: notes(account, "nightly")[1:] == [skipped], SECONDS)
    assert [m.id for m in heads()] == [head.id]
    assert [on for _, on in resources.history(account, "nightly", JOB, 5)] == [True, False]
