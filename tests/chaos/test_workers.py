"""Workers that are killed, warned, stopped or added, at any moment and any number of times."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from idletrain.export import load_run

from . import buffered_network, residual_network, spectral_network
from .helpers import Cluster, Control, Event, Run, await_end, train_alone, until


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)


def marked(run: Run) -> set[str]:
    """The workers that hold a lease of which a checkpoint is stored."""
    marks = {event["attempt"] for event in run.events("progress_saved")}
    return {worker for worker, lease in run.busy().items() if lease["attempt"] in marks}


def test_twenty_kills(make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]) -> None:
    """In turn whoever is there, joining, idle or busy, and one that is known to be in the middle of a subnet."""
    run = make_run(rounds=6, subnets=4, nodes=4)
    control.pace(0.05)  # a subnet takes a second or more, a checkpoint holds two steps
    head = run.launch()
    dice = random.Random(0)
    killed: list[psutil.Process] = []

    def targets() -> list[psutil.Process]:
        assert head.running, head.text
        chosen = marked(run) if len(killed) % 2 else None
        return [p for at, p in run.workers().items() if p not in killed and (chosen is None or at in chosen)]

    while len(killed) < 20:
        victim = dice.choice(until("a worker to kill", targets))
        kill(victim)
        killed.append(victim)
        time.sleep(dice.uniform(0, 1))
        if len(run.records("commit")) >= 5:  # the last round takes until all are killed
            control.pace(1)
    await_end(killed, 10)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=4))
    left = [event for event in run.events("worker_left") if event["cause"] == "kill"]
    assert len({event["name"] for event in left}) >= 20
    lost = run.events("lost")
    assert {event["cause"] for event in lost} <= {"kill", "lease", "overtaken"}  # the last: by a backup attempt
    assert [event for event in lost if event["kept_steps"]], "no kill hit a marked subnet"
    assert [event for event in run.events("leased") if event["step"]], "no subnet went on from a checkpoint"
    assert not head.survivors()


def test_workers_killed_while_neurons_have_two_copies(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=3, subnets=3, nodes=3, training={"copies": 2})
    control.pace(0.05)
    head = run.launch()
    for n in range(1, 4):
        victims = until("a marked subnet", lambda: marked(run) & run.workers().keys())
        kill(run.workers()[min(victims)])
        run.wait("its leaving", "worker_left", lambda event: event["cause"] == "kill", count=n)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert [event for event in run.events("lost") if event["kept_steps"]], "no kill hit a marked subnet"


@pytest.mark.parametrize("split", ["blocks", "both"])
def test_workers_killed_while_subnets_lack_blocks(split: str, make_run: Callable[..., Run], control: Control) -> None:
    model = {"factory": f"{residual_network.__name__}:build", "args": {}, "split": split}
    run = make_run(rounds=3, subnets=3, nodes=3, training={"copies": 2}, model=model)
    control.pace(0.05)
    head = run.launch()
    for n in range(1, 4):
        victims = until("a marked subnet", lambda: marked(run) & run.workers().keys())
        kill(run.workers()[min(victims)])
        run.wait("its leaving", "worker_left", lambda event: event["cause"] == "kill", count=n)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert [event for event in run.events("lost") if event["kept_steps"]], "no kill hit a marked subnet"


def test_notices(make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]) -> None:
    run = make_run(rounds=3, subnets=3, nodes=3, preemption={"progress_every": "1h"})
    control.pace(0.1)
    head = run.launch()
    dice = random.Random(1)
    warned: list[psutil.Process] = []
    while len(warned) < 6:
        busy = until("a busy worker", lambda: run.busy().keys() & run.workers().keys())
        victim = run.workers()[dice.choice(sorted(busy))]
        if victim in warned:
            continue
        time.sleep(dice.uniform(0.2, 1.2))
        victim.send_signal(signal.SIGTERM)
        warned.append(victim)
        if len(run.records("commit")) >= 2:
            control.pace(0.5)
    await_end(warned, 10)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed(subnets=3))
    notices = {event["worker"] for event in run.events("worker_notice")}
    left = {e["worker"] for e in run.events("worker_left") if e["cause"] == "notice"}
    assert len(notices) >= 6
    assert notices >= left
    lost = run.events("lost")
    assert {event["cause"] for event in lost} == {"notice"}
    assert max(event["lost_steps"] for event in lost) <= 1
    reported_steps = {
        (e["subnet"], e["round"], e["attempt"]): e["steps"] for e in run.events("attempt_ended") if "steps" in e
    }
    drained = [event for event in lost if event["kept_steps"]]
    assert drained, "no notice came in the middle of a subnet"
    leases = run.events("leased")
    for event in drained:
        subnet = event["round"], event["subnet"]
        following = next(e for e in leases if (e["round"], e["subnet"]) == subnet and e["attempt"] > event["attempt"])
        assert following["step"] == reported_steps[event["subnet"], event["round"], event["attempt"]]


@pytest.mark.parametrize(
    ("pull", "push", "smaller"), [("int8", "int4", 4), ("bf16", "bf16", 1.7), ("int4", "int8", 2.5)], ids=str
)
def test_coded_updates_of_killed_and_warned_workers_have_the_same_bits(
    make_run: Callable[..., Run], control: Control, pull: str, push: str, smaller: float
) -> None:
    """A replacement that goes on from a checkpoint pulls the initial values, to encode its update as a delta."""
    exchange = {"pull": pull, "push": push}
    training = {"exchange": exchange, "optimizer": {"name": "sgd", "lr": 0.05}}
    run = make_run(rounds=2, model={"args": {"widths": [64, 256, 256, 10]}}, training=training)
    control.pace(0.1)
    head = run.launch()
    for take in (kill, lambda process: process.send_signal(signal.SIGTERM)):
        heirs = len([event for event in run.events("leased") if event["step"]])
        worker = until(
            "a worker with a checkpoint", lambda: [p for at, p in run.workers().items() if at in marked(run)]
        )[0]
        take(worker)
        until("a replacement", lambda least=heirs: len([e for e in run.events("leased") if e["step"]]) > least)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert run.causes_of_loss() == {"kill", "notice"}
    updates = [event for event in run.events("attempt_ended") if event["ended"] == "done"]
    whole = 2 * 4 * sum(128 * n for n in (64, 128, 10))  # of a round, fp32
    assert len(updates) == 4
    assert sum(event["push_bytes"] for event in updates) < 2 * whole / smaller


def test_a_warned_worker_ends_well(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    """Its exit code says so, whether it was idle or busy, and the head goes on with those that come after it."""
    run = make_run(rounds=2, nodes=3)
    workers = [cluster.idletrain_worker() for _ in range(3)]
    control.pace(0.1)
    run.launch("--scheduler", cluster.address)
    run.wait("three workers", "worker_joined", count=3)
    run.wait("leases", "leased", count=2)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.exit_code(10) for worker in workers] == [0, 0, 0]
    run.wait("all to be gone", "worker_left", count=3)
    later = cluster.idletrain_worker()
    run.wait("the later worker", "worker_joined", count=4)
    control.pace(0)
    run.wait("the end", "run_ended")
    run.check(undisturbed())
    assert {e["cause"] for e in run.events("worker_left")} <= {"notice", "end"}
    assert later.running


def test_a_notice_before_the_first_round_is_reported_as_one(make_run: Callable[..., Run], cluster: Cluster) -> None:
    run = make_run(rounds=2, nodes=2)
    worker = cluster.idletrain_worker()
    run.launch("--scheduler", cluster.address)
    run.wait("one of two workers", "worker_joined")
    worker.send(signal.SIGTERM)
    assert run.wait("its leaving", "worker_left")["cause"] == "notice"
    assert not run.events("leased")


def test_a_worker_at_risk_sends_its_state_to_the_head_and_goes_on(
    make_run: Callable[..., Run], control: Control
) -> None:
    run = make_run(rounds=1, local_steps=100, preemption={"progress_every": "1h"})
    control.pace(0.1)
    head = run.launch()
    busy = until("a busy worker", lambda: run.busy().keys() & run.workers().keys())
    warned = min(busy)
    run.workers()[warned].send_signal(signal.SIGUSR1)
    assert run.wait("the warning", "worker_at_risk")["worker"] == warned
    marked = run.wait("its checkpoint", "progress_saved")
    assert run.busy()[warned]["subnet"] == marked["subnet"]
    assert 0 < marked["steps"] < 100
    control.pace(0)
    assert head.exit_code() == 0, head.text
    assert not run.causes_of_loss()
    assert len(run.events("progress_saved")) == 1


def test_no_checkpoint_overtakes_the_update_itself(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=3, local_steps=1)
    control.pace(0.2)  # a checkpoint would be due after every step
    head = run.launch()
    assert head.exit_code() == 0, head.text
    assert [event["reply"] for event in run.events("attempt_ended")] == ["accepted"] * 6


def test_all_at_once(make_run: Callable[..., Run], control: Control, undisturbed: Callable[..., list[str]]) -> None:
    run = make_run(rounds=3)
    control.pace(0.1)
    head = run.launch()
    run.wait("checkpoints in the second round", "progress_saved", lambda e: e["round"] == 1 and e["steps"] > 4, count=2)
    victims = list(run.workers().values())
    assert len(victims) == 2
    for victim in victims:
        kill(victim)
    run.wait("both to be gone", "worker_left", lambda e: e["cause"] == "kill", count=2)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert [event for event in run.events("leased") if event["step"] > 4]


WITHOUT_BEATS = """
import sys
from unittest import mock

mock.patch("idletrain.worker.transfers.HEARTBEATS_PER_LEASE", 1e-3).start()  # nobody tells it that its lease is over
sys.argv = ["idletrain", "worker", "--name", "sleeper", sys.argv[-1]]
from idletrain.cli.main import main

main()
"""


def test_a_stopped_worker_comes_back_too_late(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=3, subnets=3, nodes=3, preemption={"lease": "3s"})
    script = run.scratch / "sleeper.py"
    script.write_text(WITHOUT_BEATS)
    sleeper = psutil.Process(cluster.script(script).pid)
    for _ in range(2):
        cluster.idletrain_worker()
    control.pace(0.1)
    head = run.launch("--scheduler", cluster.address)
    run.wait("all three", "worker_joined", count=3)
    (at,) = [e["worker"] for e in run.events("worker_joined") if e["name"] == "sleeper"]

    def is_sleepers(event: Event) -> bool:  # its first lease may be over before there is a mark
        return event["attempt"] in {e["attempt"] for e in run.events("leased") if e["worker"] == at}

    attempt = run.wait("a checkpoint of the sleeper", "progress_saved", is_sleepers)["attempt"]
    for each in run.workers().values():  # the others wait, so that the subnet is still open when the push comes
        control.hold(each.pid)
    sleeper.suspend()
    lost = run.wait("the lease's end", "lost", lambda e: e["attempt"] == attempt)
    assert lost["cause"] == "lease"
    control.path.joinpath(f"hold-{sleeper.pid}").unlink()
    control.pace(0)
    sleeper.resume()
    refused = run.wait("the late push", "refused", lambda e: e["attempt"] == attempt)
    assert refused["reply"] == "not-leased"
    run.wait("the sleeper's end", "attempt_ended", lambda e: e["attempt"] == attempt)
    control.release()
    assert head.exit_code() == 0, head.text
    ended = [e for e in run.events("attempt_ended") if e["attempt"] == attempt]
    assert [(e["ended"], e["reply"]) for e in ended] == [("revoked", "not-leased")]
    assert not [e for e in run.events("staged") if e["attempt"] == attempt]
    run.check(undisturbed(subnets=3))


def test_a_joiner_is_used_at_once(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=2, nodes=1)
    cluster.idletrain_worker()
    control.hold()
    head = run.launch("--scheduler", cluster.address)
    run.wait("the only worker's lease", "leased")
    cluster.idletrain_worker()
    joiner = run.wait("the joiner", "worker_joined", count=2)
    lease = run.wait("the joiner's lease", "leased", lambda e: e["worker"] == joiner["worker"])
    assert lease["round"] == 0
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)
    assert [e for e in run.events("staged") if e["worker"] == joiner["worker"]]


OTHER_VERSION = """
import asyncio, importlib.metadata, sys
from unittest import mock

real = importlib.metadata.version
mock.patch("importlib.metadata.version", lambda name: "0.0.9" if name == "idletrain" else real(name)).start()
sys.argv = sys.argv[:1] + {arguments} + sys.argv[1:]
{start}
"""
STOCK = """
from distributed import Worker

async def work():
    async with Worker(sys.argv[-1], nthreads=1, dashboard=False) as worker:
        await worker.finished()

asyncio.run(work())
"""
OURS = """
from idletrain.cli.main import main

main()
"""


def test_another_version_is_refused(make_run: Callable[..., Run], control: Control, cluster: Cluster) -> None:
    import importlib.metadata

    ours = importlib.metadata.version("idletrain")
    run = make_run(rounds=2, nodes=1)
    stock, own = run.scratch / "stock.py", run.scratch / "own.py"
    stock.write_text(OTHER_VERSION.format(arguments=[], start=STOCK))
    own.write_text(OTHER_VERSION.format(arguments=["worker"], start=OURS))
    cluster.script(stock)
    control.hold()
    head = run.launch("--scheduler", cluster.address)
    refused = run.wait("the refusal", "worker_refused")
    assert ours in refused["reason"]
    assert "0.0.9" in refused["reason"]
    turned_away = cluster.script(own)
    assert turned_away.exit_code() == 1
    assert "0.0.9" in turned_away.text
    assert ours in turned_away.text
    cluster.idletrain_worker()
    control.release()
    assert head.exit_code() == 0, head.text
    assert refused["worker"] not in {e["worker"] for e in run.events("leased")}
    run.check(None)


def test_a_stock_cluster(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    """Default Dask settings, workers without and with a nanny, one killed in the middle of its subnet."""
    run = make_run(rounds=4)
    cluster.dask_worker("--no-nanny")
    cluster.dask_worker("--nanny")
    control.pace(0.05)
    head = run.launch("--scheduler", cluster.address)
    busy = run.wait("a checkpoint", "progress_saved")
    victim = run.workers()[next(e["worker"] for e in run.events("leased") if e["attempt"] == busy["attempt"])]
    kill(victim)
    lost = run.wait("the loss", "lost")
    assert lost["cause"] == "kill"
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    # The same name in another directory, on the same workers: they must not take it for the first.
    other = make_run(rounds=1, local_steps=10, nodes=1, to=run.scratch / "others")
    head = other.launch("--scheduler", cluster.address)
    assert head.exit_code() == 0, head.text
    other.check(undisturbed(local_steps=10))
    maps = psutil.Process(cluster.scheduler.pid).memory_maps()
    assert not [m.path for m in maps if "torch" in m.path], "the scheduler had to import torch"


def test_two_runs_share_a_cluster(
    make_run: Callable[..., Run], control: Control, cluster: Cluster, undisturbed: Callable[..., list[str]]
) -> None:
    runs = [make_run(rounds=3, nodes=1, local_steps=n, to=control.path.parent / str(n)) for n in (20, 10)]
    for _ in range(2):
        cluster.idletrain_worker()
    heads = [run.launch("--scheduler", cluster.address) for run in runs]
    for run, head, steps in zip(runs, heads, (20, 10), strict=True):
        assert head.exit_code() == 0, head.text
        run.check(undisturbed(local_steps=steps))


def test_salvage(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=4, preemption={"policy": "salvage"})
    control.pace(0.05)
    head = run.launch()
    for round_ in (1, 2):
        run.wait("a checkpoint", "progress_saved", lambda e, r=round_: e["round"] == r and e["steps"] > 2)
        worker = until("a busy worker", lambda: run.busy().keys() & run.workers().keys())
        process = run.workers()[min(worker)]
        process.send_signal(signal.SIGKILL if round_ == 1 else signal.SIGTERM)
    assert head.exit_code() == 0, head.text
    run.check(None)
    assert {e["cause"] for e in run.events("worker_left")} >= {"kill", "notice"}
    partial = [steps for commit in run.records("commit") for _, steps in commit["staged"] if steps < 20]
    assert partial, "no partial update was counted"
    assert all(steps > 0 for steps in partial)


def test_salvage_without_anything_to_salvage(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=1, preemption={"policy": "salvage", "progress_every": "1h"})
    control.hold()
    head = run.launch()
    run.wait("leases", "leased", count=2)
    for worker in run.workers().values():
        kill(worker)
    run.wait("both to be gone", "worker_left", lambda e: e["cause"] == "kill", count=2)
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)


def test_no_worker_outlives_its_scheduler(cluster: Cluster) -> None:
    """Whatever a worker was doing as it started: it ends."""
    workers = []
    for _ in range(4):
        workers.append(cluster.idletrain_worker())
        time.sleep(0.7)
    cluster.scheduler.send(signal.SIGKILL)
    for worker in workers:
        worker.exit_code(60)


def complete_with_a_kill_after_a_checkpoint(run: Run, control: Control) -> None:
    """Run to the end; a worker is killed, another one goes on from its checkpoint, and the bits are the same."""
    control.pace(0.1)
    head = run.launch()
    worker = until("a worker with a checkpoint", lambda: [p for at, p in run.workers().items() if at in marked(run)])[0]
    kill(worker)
    until("an heir", lambda: [event for event in run.events("leased") if event["step"]])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert run.causes_of_loss() == {"kill"}


def test_a_killed_worker_s_buffers_go_on_from_its_checkpoint_with_the_same_bits(
    make_run: Callable[..., Run], control: Control
) -> None:
    run = make_run(rounds=3, model={"factory": f"{buffered_network.__name__}:BufferedNetwork", "args": {}})
    complete_with_a_kill_after_a_checkpoint(run, control)
    module: Any = load_run(run.job.run_dir).module()
    assert int(module.steps) == 3 * 2 * 20  # every step of both subnets in every round, once
    assert float(module.shift[0]) > 0.009
    assert float(module.mean.abs().max()) > 0


def test_a_network_with_spectral_norm_is_trained_with_the_same_bits_though_a_worker_is_killed(
    make_run: Callable[..., Run], control: Control
) -> None:
    run = make_run(rounds=8, model={"factory": f"{spectral_network.__name__}:SpectralNetwork", "args": {}})
    complete_with_a_kill_after_a_checkpoint(run, control)
    assert [group for group in run.events("run_started")[0]["groups"] if "first" in group], "no neurons were cut"
    module: Any = load_run(run.job.run_dir).module()
    assert float(torch.linalg.matrix_norm(module.middle.weight, 2).detach()) == pytest.approx(1, abs=0.1)
    accuracies = [event["accuracy"] for event in run.events("evaluated")]
    assert accuracies[-1] > 0.8
