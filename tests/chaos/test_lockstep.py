"""Shards that train in lockstep on workers that are killed and warned: the bits of an undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .helpers import Cluster, Control, Run, until
from .test_shards import wide_job
from .test_workers import kill, marked

__all__ = ["wide_job"]  # a fixture
MEMBERS = 3
CALM: list[str] = []


def job(sections: Callable[..., dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Three shards of 60 labels, each with tables of its own."""
    tree = sections(exclude=["hidden"], rounds=2)
    tree["training"] |= {"mode": "lockstep", "local_steps": 30}
    return tree | more


@pytest.fixture
def calm_digest(make_run: Callable[..., Run], wide_job: Callable[..., dict[str, Any]], tmp_path: Path) -> str:
    """The parameters' of a run from which nobody is taken; one such run serves all tests."""
    if not CALM:
        run = make_run(to=tmp_path / "calm", **job(wide_job))
        head = run.launch()
        assert head.exit_code() == 0, head.text
        assert not run.events("lost")
        CALM.append(digest(run))
    return CALM[0]


def digest(run: Run) -> str:
    run.check(None)
    assert len(run.records("commit")) == 2
    return str(run.events("run_ended")[-1]["params_sha256"])


def gone_on(run: Run) -> list[int]:
    """Steps of marks that were gone on from."""
    return [event["step"] for event in run.events("leased") if event["step"]]


def test_a_member_that_is_killed_sets_all_back_to_the_last_checkpoint_and_changes_no_bit(
    make_run: Callable[..., Run], control: Control, wide_job: Callable[..., dict[str, Any]], calm_digest: str
) -> None:
    run = make_run(**job(wide_job))
    control.pace(0.1)
    head = run.launch()

    def all_marked() -> list[psutil.Process]:
        assert head.running, head.text
        held = marked(run)
        workers = [process for at, process in run.workers().items() if at in held]
        return workers if len(workers) == MEMBERS else []

    for kills in (1, 2):
        kill(until("checkpoints of all members", all_marked)[0])
        until("a replacement", lambda expected=kills: len(gone_on(run)) >= expected)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    assert [event["cause"] for event in run.events("lost")] == ["kill", "kill"]
    assert digest(run) == calm_digest


def test_a_member_that_is_warned_leaves_a_checkpoint_of_all_and_nothing_is_lost(
    make_run: Callable[..., Run], control: Control, wide_job: Callable[..., dict[str, Any]], calm_digest: str
) -> None:
    run = make_run(**job(wide_job, preemption={"progress_every": "1h"}))
    control.pace(0.3)
    head = run.launch()
    run.wait("all members", "leased", count=MEMBERS)
    time.sleep(4)  # some steps of the first round, which takes nine seconds
    assert not run.records("commit")
    victim = until("a worker", lambda: [p for at, p in run.workers().items() if at in run.busy()])[0]
    victim.send_signal(signal.SIGTERM)
    until("a replacement that goes on", lambda: gone_on(run))
    control.pace(0)
    assert head.exit_code() == 0, head.text
    (lost,) = run.events("lost")
    assert (lost["cause"], lost["lost_steps"]) == ("notice", 0)
    assert digest(run) == calm_digest


def test_heads_that_die_between_two_updates_of_a_round_change_no_bit(
    make_run: Callable[..., Run], wide_job: Callable[..., dict[str, Any]], calm_digest: str
) -> None:
    run = make_run(**job(wide_job))
    head = run.launch_until("update-recorded", nth=2)
    assert head.exit_code() == -signal.SIGKILL, head.text
    successor = run.launch_until("update-recorded", resume=True)
    assert successor.exit_code() == -signal.SIGKILL, successor.text
    run.resume()
    assert [record["drop"] for record in run.records("epoch")] == [False, True, True]
    assert digest(run) == calm_digest


def test_members_that_lack_one_wait_and_the_run_says_so(
    make_run: Callable[..., Run],
    control: Control,
    cluster: Cluster,
    wide_job: Callable[..., dict[str, Any]],
    calm_digest: str,
) -> None:
    run = make_run(**job(wide_job))
    workers = [cluster.idletrain_worker() for _ in range(MEMBERS)]
    control.pace(0.1)
    head = run.launch("--scheduler", cluster.address)
    run.wait("checkpoints", "progress_saved", count=MEMBERS)
    workers[0].send(signal.SIGKILL)
    missing = "3 subnets in lockstep need a worker each, whose machines are alike; 2 workers are here"
    run.wait("the head to miss a worker", "waiting", lambda event: missing in event["reason"])
    workers[1].send(signal.SIGTERM)  # what it has is no mark of all
    assert workers[1].exit_code(30) == 0
    for _ in range(2):
        cluster.idletrain_worker()
    control.pace(0)
    assert head.exit_code() == 0, head.text
    heirs = [event["step"] for event in run.events("leased") if event["round"] == 0][MEMBERS:]
    assert len(heirs) == 2
    assert min(heirs) > 0
    assert digest(run) == calm_digest
