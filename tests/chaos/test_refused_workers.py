"""Workers that a run cannot use: they stay in the waiting line with the reason, and do not keep the run alive."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from .helpers import Cluster, Control, Run, until
from .test_workers import OTHER_VERSION, STOCK

IDLE_SECONDS = 15
LACKING = """
import asyncio, sys


class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{module}":
            raise ModuleNotFoundError(f"No module named {{name!r}}")


sys.meta_path.insert(0, Lacking())
"""


def lacking(module: str) -> Callable[[Run, Cluster], None]:
    def start(run: Run, cluster: Cluster) -> None:
        script = run.scratch / "lacking.py"
        script.write_text(LACKING.format(module=module) + STOCK)
        cluster.script(script)

    return start


def of_another_version(run: Run, cluster: Cluster) -> None:
    script = run.scratch / "stock.py"
    script.write_text(OTHER_VERSION.format(arguments=[], start=STOCK))
    cluster.script(script)


def too_small(run: Run, cluster: Cluster) -> None:
    cluster.idletrain_worker("--name", "tiny", "--memory", "64MiB")  # its own process takes more


@pytest.mark.parametrize(
    ("start", "reasons"),
    [
        (of_another_version, ("refused: 127.0.0.1: it runs idletrain 0.0.9 and the head ",)),
        (lacking("idletrain"), ("refused: 127.0.0.1: it lacks a module (", "'idletrain'", "; install ")),
        (lacking("torch"), ("refused: 127.0.0.1: it lacks a module (", "torch", "; install ")),
        (too_small, ("refused: tiny: it has 0 MiB free and the narrowest subnet needs ",)),
    ],
    ids=["other version", "no idletrain", "no torch", "little memory"],
)
def test_a_worker_of_no_use_is_named_with_the_reason_and_the_run_ends_when_idle(
    start: Callable[[Run, Cluster], None], reasons: tuple[str, ...], make_run: Callable[..., Run], cluster: Cluster
) -> None:
    run = make_run(idle_seconds=IDLE_SECONDS)
    start(run, cluster)
    head = run.launch("--scheduler", cluster.address)
    run.wait("the refusal", "worker_refused")
    line = run.wait("the waiting line", "waiting", lambda e: "refused: " in e["reason"])["reason"]
    assert line.startswith("for workers: 0 of 2 are here; 1 ")
    assert all(reason in line for reason in reasons), line
    assert head.exit_code(60) == 1
    assert f"no worker could be used for {IDLE_SECONDS} s" in head.text
    end = until("the end's record", lambda: run.events("run_ended"))[-1]
    assert end["status"] == "failed"
    assert all(reason in end["reason"] for reason in reasons)
    assert len(run.events("worker_refused")) == 1


def test_a_worker_that_its_nanny_restarts_again_and_again_is_named_once_and_counted(
    make_run: Callable[..., Run], cluster: Cluster
) -> None:
    """Each time it has another address; importing torch takes more than its nanny allows."""
    run = make_run(idle_seconds=2 * IDLE_SECONDS)
    cluster.dask_worker("--nanny", "--name", "nursed", "--memory-limit", "200MiB")
    head = run.launch("--scheduler", cluster.address)
    many = re.compile(r"1 refused: nursed \((\d+) times\): it ended while it joined; its log says why")
    run.wait("restarts", "waiting", lambda e: bool(many.search(e["reason"])))
    assert head.exit_code() == 1
    counted = many.search(run.events("run_ended")[-1]["reason"])
    assert counted
    assert int(counted[1]) >= 3
    (refused,) = run.events("worker_refused")
    assert refused["reason"] == "nursed: it ended while it joined; its log says why"
    assert len(run.events("worker_joining")) == len(run.events("joining_failed")) == 1


def test_a_worker_that_a_refused_one_s_owner_mends_is_used(
    make_run: Callable[..., Run], cluster: Cluster, control: Control, undisturbed: Callable[..., list[str]]
) -> None:
    run = make_run(rounds=2, nodes=1)
    tiny = cluster.idletrain_worker("--name", "tiny", "--memory", "64MiB")
    head = run.launch("--scheduler", cluster.address)
    run.wait("the refusal", "worker_refused", lambda e: e["reason"].startswith("tiny: it has 0 MiB"))
    tiny.destroy()
    cluster.idletrain_worker("--name", "tiny")
    assert head.exit_code() == 0, head.text
    run.check(undisturbed())


def test_a_worker_that_can_hold_none_of_a_run_s_subnets_does_not_keep_it_alive(
    make_run: Callable[..., Run], cluster: Cluster, control: Control
) -> None:
    """It could hold a narrower subnet, but those of the run are as they are."""
    wide = {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 6000, 6000, 10]}}
    memory = {"out_of_core": "never"}
    run = make_run(rounds=2, model=wide, memory=memory, nodes=1, idle_seconds=IDLE_SECONDS)
    roomy = cluster.idletrain_worker("--name", "roomy", "--memory", "4GiB")
    control.hold()
    head = run.launch("--scheduler", cluster.address)
    own = run.wait("the worker", "worker_joined")
    run.wait("its lease", "leased")
    used = (4 << 30) - own["memory_bytes"]
    cluster.idletrain_worker("--name", "narrow", "--memory", str(used + (96 << 20)))
    run.wait("the narrow worker", "worker_joined", lambda e: e["name"] == "narrow")
    roomy.destroy()
    assert head.exit_code() == 1
    end = run.events("run_ended")[-1]
    assert f"no worker could be used for {IDLE_SECONDS} s" in end["reason"]
    assert "needs" in end["reason"]
    assert "the largest worker has" in end["reason"]
