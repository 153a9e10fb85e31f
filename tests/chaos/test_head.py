"""Heads and schedulers that die at any point, and runs that go on after them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from idletrain.cli.runs import local_summary
from idletrain.cluster import access
from idletrain.rounds.durable import write_ahead_log

from . import residual_network
from .helpers import Cluster, Control, Run, await_end, train_alone, until

ORPHAN_SECONDS = 3.0  # the longest that a process may outlive the one that started it
# Named points in the order in which a run comes by them, and which time to die there: every sitting gets on a little.
POINTS = (
    ("snapshot-data-written", 1),
    ("snapshot-written", 1),
    ("epoch-recorded", 1),
    ("update-written", 1),
    ("update-recorded", 1),
    ("commit-recorded", 1),
    ("snapshot-data-written", 1),
    ("snapshot-written", 1),
    ("updates-pruned", 1),
    ("update-recorded", 3),
)


def staged_subnets(run: Run) -> set[tuple[int, int]]:
    return {(r["round"], r["subnet"]) for r in run.records("stage")} if (run.dir / "wal").exists() else set()


def test_the_head_dies_at_every_point(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=8, checkpoint={"every": "1ms"})
    for _ in range(2):
        cluster.idletrain_worker()
    for point, nth in POINTS:
        before, seen = staged_subnets(run), len(run.events())
        resume = (run.dir / "wal").exists()
        head = run.launch_until(point, nth, scheduler=cluster.address, resume=resume)
        assert head.exit_code() == -signal.SIGKILL, f"{point}: {head.text}"
        again = {(e["round"], e["subnet"]) for e in run.events()[seen:] if e["kind"] == "leased"}
        assert not again & before, f"trained again after {point}"
    before, seen = staged_subnets(run), len(run.events())
    run.resume("--scheduler", cluster.address)
    assert not before & {(e["round"], e["subnet"]) for e in run.events()[seen:] if e["kind"] == "leased"}
    run.check(undisturbed())


def test_the_head_dies_at_the_end_of_the_last_round(
    make_run: Callable[..., Run], cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    """All is trained by then; what is left is done by those who come after, however often they die."""
    run = make_run(rounds=2, nodes=1)
    cluster.idletrain_worker()
    seen = 0
    points = [("update-recorded", 4), ("commit-recorded", 1), ("snapshot-written", 1), ("updates-pruned", 1)]
    for point, nth in points:
        head = run.launch_until(point, nth, scheduler=cluster.address, resume=point != points[0][0])
        assert head.exit_code() == -signal.SIGKILL, f"{point}: {head.text}"
        seen = seen or len(run.events())
    assert staged_subnets(run) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    run.resume("--scheduler", cluster.address)
    assert "leased" not in {event["kind"] for event in run.events()[seen:]}
    assert run.check(undisturbed())["rounds"] == 2


def test_nothing_outlives_a_killed_head(
    make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3)
    control.pace(0.05)
    head = run.launch()
    run.wait("checkpoints in the second round", "progress_saved", lambda e: e["round"] == 1)
    control.pace(60)  # from now on each worker is in the middle of a long step
    time.sleep(0.2)
    family = head.survivors()
    assert len(family) >= 4  # the head, the scheduler and two workers
    head.send(signal.SIGKILL)
    await_end(family, ORPHAN_SECONDS)
    control.pace(0)
    run.resume()
    run.check(undisturbed())


@pytest.mark.parametrize("split", ["blocks", "both"])
def test_a_run_by_depth_goes_on_after_its_head_has_died_in_its_second_round(
    split: str, make_run: Callable[..., Run], control: Control
) -> None:
    model = {"factory": f"{residual_network.__name__}:build", "args": {}, "split": split}
    run = make_run(rounds=3, subnets=3, model=model)
    control.pace(0.05)
    head = run.launch()
    until("an update of the second round", lambda: any(round_ == 1 for round_, _ in staged_subnets(run)))
    head.send(signal.SIGKILL)
    head.exit_code()
    control.pace(0)
    run.resume()
    run.check(train_alone(run.job))


@pytest.mark.parametrize("workers", [0, 4], ids=["their parent imports", "they are forks of it"])
def test_the_head_dies_while_its_workers_start(workers: int, make_run: Callable[..., Run]) -> None:
    run = make_run(rounds=1, nodes=4)
    head = run.launch(forked=False)
    until("logs of workers", lambda: (run.dir / "logs").exists() and len(list((run.dir / "logs").iterdir())) == 4)
    until("their processes", lambda: len(head.survivors()) >= 3 + workers)  # with the head, the scheduler, the parent
    family = head.survivors()
    assert not run.events("worker_joined")
    head.send(signal.SIGKILL)
    await_end(family, ORPHAN_SECONDS)


@pytest.mark.parametrize("when", ["training", "starting"])
def test_the_scheduler_dies(
    when: str, make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3)
    control.pace(0.05)
    head = run.launch()
    if when == "training":
        run.wait("a checkpoint in the second round", "progress_saved", lambda e: e["round"] == 1)
    else:
        run.wait("the start", "run_started")
    before = staged_subnets(run)
    os.kill(json.loads((run.dir / "cluster.json").read_text())["pid"], signal.SIGKILL)
    assert head.exit_code() == 1, head.text
    assert "--resume" in head.text.splitlines()[-1]
    assert "Traceback" not in head.text  # of Dask's client, which cannot connect again
    assert not head.survivors()
    control.pace(0)
    seen = len(run.events())
    run.resume()
    assert not before & {(e["round"], e["subnet"]) for e in run.events()[seen:] if e["kind"] == "leased"}
    run.check(undisturbed())


def test_ctrl_c(make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]) -> None:
    run = make_run(rounds=3)
    control.pace(0.05)
    head = run.launch()
    run.wait("both workers", "worker_joined", count=2)
    run.wait("a checkpoint in the second round", "progress_saved", lambda e: e["round"] == 1)
    control.hold()
    second = run.launch("--resume")
    assert second.exit_code() == 1
    assert str(head.pid) in second.text
    workers = list(run.workers().values())
    assert len(workers) == 2
    family = head.survivors()
    control.release()
    head.send(signal.SIGINT)
    assert head.exit_code() == 130, head.text
    assert "stopping: workers end in order; Ctrl-C again ends all at once" in head.text
    assert "--resume" in head.text
    await_end([*workers, *family], 1)
    run.check(None, status="stopped")
    control.pace(0)
    run.resume()
    run.check(undisturbed())


def test_a_second_ctrl_c_ends_all_at_once_and_says_so(
    make_run: Callable[..., Run], undisturbed: Callable[..., list[str]], control: Control
) -> None:
    run = make_run(rounds=3)
    control.pace(0.05)
    head = run.launch()
    run.wait("a checkpoint in the second round", "progress_saved", lambda e: e["round"] == 1)
    workers, family = list(run.workers().values()), head.survivors()
    assert len(workers) == 2
    control.hold()  # else they may have ended in order before the second signal
    head.send(signal.SIGINT)
    run.wait("the first signal's effect", "stopping")
    head.send(signal.SIGINT)
    assert head.exit_code() == 130, head.text
    control.release()
    assert "ended at once; go on from the last committed round with: " in head.text
    await_end([*workers, *family], 3)
    control.pace(0)
    run.resume()
    run.check(undisturbed())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_two_signals_of_another_kind_end_all_at_once_too(
    make_run: Callable[..., Run], control: Control, number: signal.Signals
) -> None:
    run = make_run(rounds=3)
    control.pace(0.05)
    head = run.launch()
    run.wait("a checkpoint", "progress_saved")
    assert access.folder_of(run.dir).is_dir()
    family = head.survivors()
    control.hold()
    head.send(number)
    run.wait("the first signal's effect", "stopping")
    head.send(number)
    assert head.exit_code() == 130, head.text
    control.release()
    assert "ended at once; go on from the last committed round with: " in head.text
    await_end(family, 3)
    assert not access.folder_of(run.dir).exists()


def test_ctrl_c_while_the_run_is_started(make_run: Callable[..., Run], undisturbed: Callable[..., list[str]]) -> None:
    run = make_run(rounds=1)
    head = run.launch()
    until("the run's keys", access.folder_of(run.dir).is_dir)
    head.send(signal.SIGINT)
    assert not run.events("run_started")
    assert head.exit_code() == 130, head.text
    assert not head.survivors()
    assert not access.folder_of(run.dir).exists()
    assert local_summary(run.dir).status == "interrupted"
    run.resume()
    run.check(undisturbed())


def test_ctrl_c_before_the_first_round(make_run: Callable[..., Run], undisturbed: Callable[..., list[str]]) -> None:
    run = make_run(rounds=1)
    head = run.launch()
    run.wait("the start", "run_started")
    head.send(signal.SIGINT)
    assert head.exit_code() == 130, head.text
    assert not head.survivors()
    run.resume()
    run.check(undisturbed())


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_flipped_bits(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=6, nodes=1, checkpoint={"every": "1ms", "keep": 2})
    cluster.idletrain_worker()
    head = run.launch_until("update-recorded", 8, scheduler=cluster.address)  # the third round's are staged
    assert head.exit_code() == -signal.SIGKILL
    older, newest = sorted((run.dir / "snapshots").glob("*/network"))[-2:]
    flip(newest, 1000)
    first = min(run.records("stage")[-2:], key=lambda r: r["offset"])
    flip(run.dir / "updates" / "00000003", first["offset"] + 100)
    seen = len(run.events())
    whole = (run.dir / "wal").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run.dir / "wal").write_bytes(whole + lines[-1][:20])  # a torn last line is cut off
    run.resume("--scheduler", cluster.address)
    assert older.parent.name < newest.parent.name
    leased = [e for e in run.events()[seen:] if e["kind"] == "leased" and e["round"] == 3]
    assert {e["subnet"] for e in leased} == {first["subnet"]}, "the damaged update, and only it, is trained again"
    end = write_ahead_log.read(run.dir / "wal").records[-1]
    assert end["params_sha256"] == undisturbed()[6]
