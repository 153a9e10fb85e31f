"""Runs in phases: workers killed in each of them, and heads that die where one ends, change no bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from .helpers import Cluster, Control, Run, train_alone, until
from .test_shards import wide_job
from .test_workers import kill, marked

__all__ = ["wide_job"]  # a fixture
PHASES: list[dict[str, Any]] = [
    {"rounds": 2, "subnets": 4},
    {"rounds": 1, "subnets": 6, "copies": 2},
    {"rounds": 2, "subnets": 1, "local_steps": 30},
]
ROUNDS = 5
TRAINING = {"phases": PHASES, "outer_optimizer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9}}


@pytest.fixture(scope="module")
def digests() -> Callable[[Run], list[str]]:
    """The digests of an undisturbed run, computed once."""
    known: list[list[str]] = []

    def of(run: Run) -> list[str]:
        if not known:
            known.append(train_alone(run.job))
        return known[0]

    return of


def test_a_worker_killed_in_every_phase(
    make_run: Callable[..., Run], control: Control, digests: Callable[[Run], list[str]]
) -> None:
    run = make_run(rounds=ROUNDS, nodes=2, training=TRAINING)
    control.pace(0.05)
    head = run.launch()
    for first in (0, 2, 3):
        until(f"round {first}", lambda first=first: len(run.records("commit")) >= first)

        def victims() -> list[psutil.Process]:
            assert head.running, head.text
            return [p for at, p in run.workers().items() if at in marked(run)]

        kill(until("a worker with a checkpoint", victims)[0])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    assert run.check(digests(run))["rounds"] == ROUNDS
    assert {event["round"] for event in run.events("lost")} >= {0, 2}
    begun = [(event["round"], event["subnets"], event["local_steps"]) for event in run.events("phase_started")]
    assert begun == [(2, 6, 20), (3, 1, 30)]


def test_heads_that_die_where_a_phase_ends_are_followed_by_one_that_goes_on_to_the_same_bits(
    make_run: Callable[..., Run], cluster: Cluster, digests: Callable[[Run], list[str]]
) -> None:
    run = make_run(rounds=ROUNDS, nodes=2, training=TRAINING)
    for _ in range(2):
        cluster.idletrain_worker()
    for nth, resume in ((2, False), (1, True)):  # the last commit of the first phase, and of the second
        head = run.launch_until("commit-recorded", nth, scheduler=cluster.address, resume=resume)
        assert head.exit_code() == -signal.SIGKILL, head.text
    assert [record["round"] for record in run.records("commit")] == [0, 1, 2]
    run.resume("--scheduler", cluster.address)
    run.check(digests(run))
    started = [(event["resumed_at"], event["subnets"]) for event in run.events("run_started")]
    assert started == [(0, 4), (2, 6), (3, 1)]
    first, *later = [record["phases"] for record in run.records("epoch")]
    assert [len(specs) for specs in first] == [4, 6, 1]
    assert later == [first, first]


def test_members_of_lockstep_killed_in_both_phases_change_no_bit(
    make_run: Callable[..., Run], control: Control, wide_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def job() -> dict[str, Any]:
        tree = wide_job(exclude=["hidden"], rounds=2)
        phases = [{"rounds": 1, "subnets": 3}, {"rounds": 1, "subnets": 2}]
        tree["training"] |= {"mode": "lockstep", "local_steps": 20, "phases": phases}
        return tree

    calm = make_run(to=tmp_path / "calm", **job())
    head = calm.launch()
    assert head.exit_code() == 0, head.text
    run = make_run(**job())
    control.pace(0.1)
    head = run.launch()
    for round_, members in enumerate((3, 2)):

        def all_marked(members: int = members, round_: int = round_) -> list[psutil.Process]:
            assert head.running, head.text
            busy = run.busy()
            held = {worker for worker in marked(run) if worker in busy and busy[worker]["round"] == round_}
            return [p for at, p in run.workers().items() if at in held] if len(held) == members else []

        until(f"round {round_}", lambda round_=round_: len(run.records("commit")) >= round_)
        kill(until("checkpoints of all members", all_marked)[0])
        until("a replacement", lambda round_=round_: [e for e in run.events("lost") if e["round"] == round_])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    ends = [each.events("run_ended")[-1]["params_sha256"] for each in (calm, run)]
    assert ends[0] == ends[1]
    run.check(None)
