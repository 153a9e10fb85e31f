"""The reference that all other tests compare with is what a real, undisturbed run gives."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from .helpers import Cluster, Control, Run, train_alone, until

IMPORTED = 150 << 20  # resident bytes of a process that has imported torch


def test_a_run_gives_what_one_process_gives(
    make_run: Callable[..., Run], undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=4)
    head = run.launch()
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())
    assert not run.events("lost", "refused", "paused")
    assert not head.survivors()


def test_local_sgd_survives_a_kill_with_the_bits_of_one_process(make_run: Callable[..., Run], control: Control) -> None:
    run = make_run(rounds=3, training={"method": "local-sgd", "subnets": 2})
    control.pace(0.05)
    head = run.launch()
    run.wait("a checkpoint in the second round", "progress_saved", lambda e: e["round"] == 1)
    next(iter(run.workers().values())).kill()
    run.wait("the kill", "worker_left", lambda e: e["cause"] == "kill")
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    assert {e["subnet"] for e in run.events("leased")} == {0, 1}


def test_a_worker_with_little_memory_gets_a_narrow_subnet(
    make_run: Callable[..., Run], control: Control, cluster: Cluster
) -> None:
    """And one that holds not even the narrowest gets none, which is reported."""
    wide = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 6000, 6000, 10]}}
    run = make_run(rounds=2, local_steps=2, model=wide)
    roomy = psutil.Process(cluster.idletrain_worker("--memory", "4GiB", "--name", "roomy").pid)
    until("the first worker's imports", lambda: roomy.memory_info().rss > IMPORTED and roomy.net_connections())
    own = roomy.memory_info().rss
    cluster.idletrain_worker("--memory", str(own + (96 << 20)), "--name", "small")
    cluster.idletrain_worker("--memory", str(own // 2), "--name", "tiny")
    control.hold()
    head = run.launch("--scheduler", cluster.address)
    refused = run.wait("the refusal", "worker_refused")
    control.release()
    assert head.exit_code() == 0, head.text
    run.check(None)
    wider, narrower = (spec["share"] for spec in run.records("epoch")[0]["subnets"])
    assert 0 < narrower < wider / 2
    names = {e["worker"]: e["name"] for e in run.events("worker_joined")}
    assert {(e["subnet"], names[e["worker"]]) for e in run.events("leased")} == {(0, "roomy"), (1, "small")}
    assert refused["reason"].startswith("tiny: it has 0 MiB free and the narrowest subnet needs ")
