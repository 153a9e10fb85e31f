"""Runs without rounds: whatever happens to workers and heads, their log trained again gives the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from idletrain.nn.prepare import from_settings
from idletrain.nn.rolling import RollingSubnets
from idletrain.replay import train_again
from idletrain.rounds.durable.recovery import load_network

from . import steered
from .helpers import Cluster, Control, Process, Run, until
from .test_workers import marked

STEPS = 20
ROLLING: dict[str, Any] = {"policy": "rolling", "progress_every": "50ms"}


def check(run: Run, head: Process, rounds: int) -> list[dict[str, Any]]:
    """Check that a run is complete and its log gives its bits; return the records of its updates."""
    assert head.exit_code() == 0, head.text
    updates = run.records("rolled")
    assert [record["number"] for record in updates] == list(range(len(updates))), "an update twice, or none"
    end = run.records("end")[-1]
    assert (end["status"], end["rounds"]) == ("completed", rounds)
    again = train_again(run.dir)
    assert again.differs is None
    assert again.params_sha256 == end["params_sha256"]
    assert again.updates == len(updates)
    return updates


def test_killed_and_warned_workers(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=4, subnets=4, nodes=3, preemption=ROLLING)
    control.pace(0.05)
    head = run.launch()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):

        def victims() -> list[psutil.Process]:
            assert head.running, head.text
            return [process for at, process in run.workers().items() if at in marked(run)]

        victim = until("a worker with a checkpoint", victims)[0]
        known = len(run.events("lost"))
        victim.send_signal(number)
        until("its loss", lambda known=known: len(run.events("lost")) > known)
    control.pace(0)
    updates = check(run, head, 4)
    assert run.causes_of_loss() >= {"kill", "notice"}
    partial = [record["steps"] for record in updates if record["steps"] < STEPS]
    assert partial, "no steps of a lost worker were counted"
    assert not [event for event in run.events("leased") if event["step"]], "a lost subnet was trained on"


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("epoch-recorded", 1), ("update-written", 2), ("update-written", 9), ("commit-recorded", 1),
        ("commit-recorded", 7), ("snapshot-data-written", 2), ("snapshot-written", 2), ("updates-pruned", 1),
    ],
)  # fmt: skip
def test_a_head_that_dies_around_a_write_goes_on_from_it(make_run: Callable[..., Run], point: str, nth: int) -> None:
    run = make_run(rounds=4, subnets=3, nodes=2, preemption=ROLLING, checkpoint={"every": "0.1s"})
    dies = run.launch_until(point, nth)
    assert dies.exit_code() == -signal.SIGKILL, dies.text
    before = len(run.records("rolled"))
    updates = check(run, run.launch("--resume"), 4)
    assert len(updates) > before
    assert len(run.records("epoch")) == 2


def test_workers_of_any_speed_wait_for_nobody(make_run: Callable[..., Run], control: Control, cluster: Cluster) -> None:
    """One of three is 20 times slower: the others train all the time, and its neurons do not stay with it."""
    training = {"slack": 1.0, "loss": f"{steered.__name__}:faulty_loss"}
    run = make_run(rounds=12, subnets=4, nodes=3, preemption=ROLLING, training=training)
    for n in range(3):
        cluster.idletrain_worker("--name", f"w{n}")
        (control.path / f"slow-w{n}").write_text("0.6" if n == 0 else "0.03")
    updates = check(run, run.launch("--scheduler", cluster.address), 12)
    slow = next(event["worker"] for event in run.events("worker_joined") if event["name"] == "w0")
    staged, leased = run.events("staged"), run.events("leased")
    quick = [event for event in staged if event["worker"] != slow]
    seconds = staged[-1]["s"] - leased[0]["s"]
    assert sum(event["train_seconds"] for event in quick) > 0.85 * 2 * seconds, "the others waited"
    cut_off = [record["steps"] for record in updates if record["steps"] < STEPS]
    assert cut_off, "the slow worker kept its neurons"
    assert [event["cause"] for event in run.events("lost") if event["worker"] == slow and event["cause"] == "closed"]
    assert replayed(run).pace.min() > 1 / 4


def replayed(run: Run) -> RollingSubnets:
    """Return the places of a run as its updates leave them."""
    prepared = from_settings(run.job.model, run.job.data, run.job.training)
    restored = load_network(run.dir, prepared.program)
    assert restored.rolling
    return restored.rolling
