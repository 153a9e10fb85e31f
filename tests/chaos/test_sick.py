"""Workers that are alive and of no use: they compute NaN, hang, dawdle, fail or end; and work that ends its workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil
import pytest

from . import steered
from .helpers import Cluster, Control, Process, Run, runs, until

LOSS = f"{steered.__name__}:faulty_loss"
TRAINING = {"loss": LOSS}


@pytest.fixture
def three(make_run: Callable[..., Run], cluster: Cluster) -> Callable[..., tuple[Run, list[Process]]]:
    """Make a run on three workers named w0, w1 and w2, of which w0 is the one that a test makes sick."""

    def make(**changes: object) -> tuple[Run, list[Process]]:
        run = make_run(subnets=3, nodes=3, training={**TRAINING, **changes.pop("training", {})}, **changes)
        return run, [cluster.idletrain_worker("--name", f"w{n}") for n in range(3)]

    return make


def address_of(run: Run, name: str) -> str:
    return next(e["worker"] for e in run.events("worker_joined") if e["name"] == name)


def sick_of(run: Run) -> list[tuple[str, str]]:
    return [(e["name"], e["cause"]) for e in run.events("worker_sick")]


@pytest.mark.parametrize("how", ["nan", "raise"])
def test_one_worker_that_computes_nan_or_fails_does_not_end_the_run(
    how: str,
    three: Callable[..., tuple[Run, list[Process]]],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    run, _ = three(rounds=4)
    (control.path / f"{how}-w0").touch()
    head = run.launch("--scheduler", cluster.address)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=3))
    at = address_of(run, "w0")
    assert not [e for e in run.events("staged") if e["worker"] == at]
    faults = [e for e in run.events("lost") if e["worker"] == at and e["cause"] in ("refused", "error")]
    assert len(faults) == 2, "the sick worker was tried twice, no more"
    assert sick_of(run) == [("w0", "faults")]


@pytest.mark.parametrize("nanny", [True, False], ids=["restarted", "gone"])
def test_one_worker_that_ends_in_its_subnets_does_not_end_the_run(
    nanny: bool, make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    """A nanny brings it back, under another address, to end again."""
    run = make_run(subnets=3, nodes=3, rounds=6, training=TRAINING)
    if nanny:
        cluster.dask_worker("--name", "w0", "--nanny")
    else:
        cluster.idletrain_worker("--name", "w0")
    for n in (1, 2):
        cluster.idletrain_worker("--name", f"w{n}")
    (control.path / "exit-w0").touch()
    (control.path / "slow-all").write_text("0.5")  # the others are busy whenever it is back
    head = run.launch("--scheduler", cluster.address)
    run.wait("its ends", "worker_left", lambda e: e["cause"] == "kill", count=4 if nanny else 1)
    (control.path / "slow-all").unlink()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=3))
    left = [e["name"] for e in run.events("worker_left") if e["cause"] == "kill"]
    assert set(left) == {"w0"}
    lost = {e["worker"] for e in run.events("lost") if e["cause"] == "kill"}
    sick = {e["worker"] for e in run.events("worker_joined") if e["name"] == "w0"}
    assert lost == sick & lost
    assert lost, "it never held a subnet"
    assert not [e for e in run.events("staged") if e["worker"] in sick]


def test_a_network_that_diverges_ends_the_run_after_a_second_opinion(
    three: Callable[..., tuple[Run, list[Process]]], control: Control, cluster: Cluster
) -> None:
    run, _ = three(rounds=4)
    for n in range(3):
        (control.path / f"nan-w{n}").touch()
    head = run.launch("--scheduler", cluster.address)
    assert head.exit_code() == 1
    assert "the training diverges" in head.text
    refused: dict[int, set[str]] = {}
    for event in run.events("lost"):
        refused.setdefault(event["subnet"], set()).add(event["worker"])
    assert run.events("run_ended")[-1]["status"] == "diverged"
    diverged = [event for event in run.events("refused") if event["reply"] == "not-finite"]
    assert len(diverged) <= 4, "a subnet goes to another worker at once: with three, the fourth is a second opinion"


def test_the_run_goes_on_without_a_worker_that_hangs_in_a_step(
    three: Callable[..., tuple[Run, list[Process]]],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    run, _ = three(rounds=8, preemption={"lease": "3s"})
    (control.path / "slow-all").write_text("0.01")  # else all rounds may be done before one hangs
    head = run.launch("--scheduler", cluster.address)
    run.wait("a round", "round_committed", count=2)
    (control.path / "hang-w0").touch()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=3))
    at = address_of(run, "w0")
    overtaken = [e for e in run.events("lost") if e["worker"] == at and e["cause"] in ("overtaken", "hang")]
    assert overtaken, "w0 held no subnet when it hung"
    seconds = [e["seconds"] for e in run.events("round_committed")]
    assert max(seconds[2:]) < 30


def test_a_local_worker_that_hangs_in_a_step_is_ended_and_replaced(
    make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3, nodes=1, training=TRAINING, preemption={"lease": "3s", "progress_every": "50ms"})
    (control.path / "slow-all").write_text("0.1")
    head = run.launch()
    run.wait("progress", "progress_saved", count=2)
    (name,) = [e["name"] for e in run.events("worker_joined")]
    ((_, hung),) = run.workers().items()
    (control.path / f"hang-{name}").touch()
    run.wait("the verdict", "worker_sick", lambda e: (e["name"], e["cause"]) == (name, "hang"))
    until("its end", lambda: not runs(hung), 10)
    for file in (f"hang-{name}", "slow-all"):
        (control.path / file).unlink()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert len(run.events("worker_joined")) == 2


def test_the_only_worker_that_hangs_is_ended_and_another_goes_on(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3, nodes=1, training=TRAINING, preemption={"lease": "3s", "progress_every": "50ms"})
    worker = cluster.idletrain_worker("--name", "w0")
    (control.path / "slow-w0").write_text("0.1")
    head = run.launch("--scheduler", cluster.address)
    run.wait("progress", "progress_saved", count=2)
    (control.path / "hang-w0").touch()
    hung = run.wait("the verdict", "worker_sick")
    assert (hung["name"], hung["cause"]) == ("w0", "hang")
    assert "it is ended, to be started again" in hung["reason"]
    assert worker.exit_code(10) == 75
    assert "got no step from this worker" in worker.text
    for name in ("hang-w0", "slow-w0"):
        (control.path / name).unlink()
    cluster.idletrain_worker("--name", "w1")
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert [e["cause"] for e in run.events("worker_left") if e["name"] == "w0"] == ["hang"]


def test_a_stock_worker_that_hangs_is_named_and_left_alone(
    make_run: Callable[..., Run], control: Control, cluster: Cluster
) -> None:
    run = make_run(rounds=3, nodes=1, training=TRAINING, preemption={"lease": "3s", "progress_every": "50ms"})
    worker = cluster.dask_worker("--name", "w0", "--no-nanny")
    (control.path / "slow-w0").write_text("0.1")
    head = run.launch("--scheduler", cluster.address)
    run.wait("progress", "progress_saved", count=2)
    (control.path / "hang-w0").touch()
    hung = run.wait("the verdict", "worker_sick")
    assert "end it by hand" in hung["reason"]
    time.sleep(2)
    assert worker.running
    assert head.running


def test_a_local_worker_that_is_frozen_is_ended_and_replaced(
    make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3, nodes=1)
    control.hold()  # else the run may have ended before its worker is frozen
    head = run.launch()
    run.wait("a lease", "leased")
    ((address, frozen),) = run.workers().items()
    frozen.suspend()
    control.release()
    try:
        sick = run.wait("the verdict", "worker_sick", where=lambda e: e["cause"] == "frozen", count=1)
        assert (sick["worker"], sick["name"]) == (address, run.events("worker_joined")[0]["name"])
        until("its end", lambda: not runs(frozen), 10)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            frozen.kill()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert len(run.events("worker_joined")) == 2


def test_a_round_with_a_worker_twenty_times_slower_takes_little_longer(
    three: Callable[..., tuple[Run, list[Process]]],
    control: Control,
    cluster: Cluster,
    undisturbed: Callable[..., list[str]],
) -> None:
    run, _ = three(rounds=12)
    for n in range(3):
        (control.path / f"slow-w{n}").write_text("0.05")
    head = run.launch("--scheduler", cluster.address)
    run.wait("rounds of equal workers", "round_committed", count=5)
    (control.path / "slow-w0").write_text("1.0")
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=3))
    seconds = [e["seconds"] for e in run.events("round_committed")]
    overtaken = [e for e in run.events("lost") if e["cause"] == "overtaken"]
    assert {e["worker"] for e in overtaken} == {address_of(run, "w0")}
    before, after = sorted(seconds[1:5]), sorted(seconds[7:])
    assert after[len(after) // 2] < 2.5 * before[2], (before, after)  # a second turn after the first, and its start


def test_a_module_that_ends_its_process_stops_the_run_with_the_worker_s_last_words(
    make_run: Callable[..., Run], control: Control
) -> None:
    run = make_run(model={"factory": f"{steered.__name__}:Deadly", "args": {}}, training=TRAINING)
    head = run.launch()
    assert head.exit_code() == 1
    assert "ended the process of every worker that trained it" in head.text
    assert "about to die of step 3" in head.text
    assert len(run.events("worker_left")) <= 8
    end = run.events("run_ended")[-1]
    assert end["status"] == "failed"
    assert "about to die of step 3" in end["reason"]
