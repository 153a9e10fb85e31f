"""Measure real worker processes within seconds, and clusters with something wrong."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from idletrain.cluster import certificates, dask_scheduler, dask_settings
from idletrain.cluster.local import LocalFleet
from idletrain.errors import RefusedError, RunError
from idletrain.fabric.analysis import compare, statistics
from idletrain.fabric.analysis.samples import Fabric, from_json
from idletrain.fabric.measuring import measure, nodes, presets, tasks
from idletrain.fabric.measuring.measure import measure_fabric
from idletrain.fabric.measuring.nodes import MeasuredNodes, NodeSilentError, occupied
from idletrain.fabric.measuring.tasks import LinkProbe, ProbeResult

from .test_collective_process import TINY

PRESET = replace(
    TINY, pings=5, pairs_seconds=0.5, stream_seconds=(0.2, 0.2), transfers=2, transfer_seconds=0.01, flows=(2,)
)


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[Client]:
    dask_settings.apply()
    async with (
        LocalCluster(n_workers=count, threads_per_worker=1, asynchronous=True, dashboard_address=":0") as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        yield client


def on(count: int, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with workers(count) as client:
            return await work(client)

    return asyncio.run(go())


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the measurement says meanwhile."""
    return []


@pytest.fixture(scope="module")
def measured(said: list[str]) -> Fabric:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "TELL_SECONDS", 0.05)
        fabric: Fabric = on(3, lambda client: measure_fabric(client, PRESET, said.append))
    return fabric


@pytest.mark.usefixtures("measured")
def test_what_nodes_do_together_is_told_meanwhile(said: list[str]) -> None:
    assert said[:2] == ["3 nodes", "links: 6 pairs, 0.2 s each"]
    together = said[said.index("collectives, training and stencil over gloo") + 1 :]
    assert len(together) >= 2
    assert len(set(together)) == len(together)
    assert any(part.endswith("on 3 nodes") for part in together)


def test_every_pair_every_way_and_every_kind(measured: Fabric) -> None:
    assert measured.faults == []
    assert len(measured.nodes) == 3
    assert all(0 <= node["others_share"] <= 1 for node in measured.nodes)
    pairs = set(presets.pairs(3))
    for what, over in (("round trip", "socket"), ("one way", "socket")):
        assert {(p.source, p.target) for p in statistics.points_of_kind(measured, what, over)} == pairs
    for over in ("dask", "dask tls", "pull", "push"):
        for what in ("one way", "round trip"):
            assert len(statistics.points_of_kind(measured, what, over)) == 2
        assert all(
            0 < statistics.median(p.samples) < 0.1 for p in statistics.points_of_kind(measured, "round trip", over)
        )
    assert len(statistics.points_of_kind(measured, "both ways")) >= 2
    assert [(point.flows, point.target) for point in statistics.points_of_kind(measured, "incast")] == [
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    (flows,) = statistics.points_of_kind(measured, "flows")
    assert flows.flows == 2


def test_collectives_training_and_stencil_come_along(measured: Fabric) -> None:
    assert {one.operation for one in measured.collectives} == set(presets.OPERATIONS)
    assert {one.nodes for one in measured.training} == {1, 2, 3}
    assert {one.nodes for one in measured.stencil} == {1, 2, 3}
    assert statistics.costs(measured)
    assert compare.sentence(measured).startswith("Between these 3 nodes")


def test_what_is_not_there_is_named(measured: Fabric) -> None:
    assert any(missing.startswith("NCCL: not there on all nodes") for missing in measured.missing)
    assert any(missing.startswith("MPI") for missing in measured.missing)


def test_it_survives_its_file(measured: Fabric) -> None:
    assert from_json(measured.as_json(), "a.json") == measured


def test_one_node_is_measured_as_far_as_it_goes() -> None:
    alone = on(1, lambda client: measure_fabric(client, PRESET, lambda _: None))
    assert alone.points == []
    assert any("there is no second node" in missing for missing in alone.missing)
    assert {one.nodes for one in alone.training} == {1}


async def _not_reached(client: Client) -> Fabric:
    return await measure_fabric(client, PRESET, lambda _: None)


def test_a_node_that_cannot_reach_another_is_named_with_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    original_call = MeasuredNodes.call

    async def cut(self: MeasuredNodes, node: int, task: Any, *args: Any, **more: Any) -> Any:
        if task is tasks.probe_link and (args[0].source, args[0].target) == (1, 0):
            return ProbeResult(fault="timed out")
        return await original_call(self, node, task, *args, **more)

    monkeypatch.setattr(MeasuredNodes, "call", cut)
    measured = on(2, _not_reached)
    assert [fault for fault in measured.faults if "cannot reach" in fault] == [
        "1 cannot reach 0 at 127.0.0.1 (timed out); let TCP through between them, all ports"
    ]
    assert measured.collectives == []
    assert any("every node must reach every other one" in missing for missing in measured.missing)


def test_a_lost_node_is_reported_once_and_not_as_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    original_call, visits = MeasuredNodes.call, []

    async def lost_node(self: MeasuredNodes, node: int, task: Any, *args: Any, **more: Any) -> Any:
        if args and isinstance(args[0], LinkProbe):
            visits.append((args[0].source, args[0].target))
            if node == 1:
                raise NodeSilentError("1 did not end 'link' in 60 s; see its log")
        return await original_call(self, node, task, *args, **more)

    monkeypatch.setattr(MeasuredNodes, "call", lost_node)
    measured = on(2, _not_reached)
    assert measured.faults == ["1 did not end 'link' in 60 s; see its log"]
    assert visits[-1] == (1, 0)  # and nothing behind
    assert measured.collectives == []
    assert any("every node must reach every other one" in missing for missing in measured.missing)


def test_a_worker_that_is_killed_among_all_holds_nobody_up() -> None:
    async def go(client: Client) -> tuple[Fabric, float, int]:
        client.cluster.scheduler.allowed_failures = 3  # like an existing scheduler, which waits for it to come back
        processes = await client.run(os.getpid)
        killing: list[asyncio.Task[float]] = []

        async def kill() -> float:
            await asyncio.sleep(2)  # during the collective measurements
            os.kill(processes[max(processes)], signal.SIGKILL)
            return time.monotonic()

        def say(text: str) -> None:
            if text.startswith("collectives"):
                killing.append(asyncio.ensure_future(kill()))

        busy = replace(PRESET, together_seconds=600.0, operation_seconds=60.0, repeats=(1, 1000))
        measured = await measure_fabric(client, busy, say)
        ended = time.monotonic()
        left = await client.run(lambda: len(tasks._parts))
        return measured, ended - await killing[0], sum(left.values())

    measured, seconds, left = on(3, go)
    assert any("was gone before 'take_part' ended" in fault for fault in measured.faults)
    assert any(
        missing.startswith("collectives, training and stencil over gloo: not all") for missing in measured.missing
    )
    assert 0 < seconds < 60, "of 600 that all have together"
    assert left == 0


def test_workers_of_another_version_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    monkeypatch.setattr(nodes, "version", lambda: "1.0" if os.getpid() == here else "0.9")
    with pytest.raises(RefusedError, match=r"not all workers run idletrain 1\.0: 0 runs 0\.9; install the same"):
        on(1, MeasuredNodes.of)


def test_a_cluster_without_workers_is_a_sentence() -> None:
    with pytest.raises(RunError, match="the cluster has no worker; start some"):
        on(0, MeasuredNodes.of)


def test_a_cluster_that_works_is_known_by_its_run() -> None:
    async def busy_with(client: Client) -> tuple[str | None, ...]:
        before = await occupied(client)
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as head:
            await client.set_metadata(["idletrain"], {"version": "1.2", "client": head.id})
            during = await occupied(client)
        return before, during, await occupied(client)  # the head left without cleaning up

    assert on(1, busy_with) == (None, "a run of idletrain 1.2 is using these workers", None)


def test_a_cluster_that_works_is_known_by_its_tasks() -> None:
    async def busy_with(client: Client) -> str | None:
        working = client.submit(time.sleep, 60)
        while not (busy := await occupied(client)):
            await asyncio.sleep(0.05)
        await working.cancel()
        return busy

    assert on(1, busy_with) == "the workers have 1 tasks to do"


def test_nodes_are_in_the_order_that_people_count_in() -> None:
    names = ["n10", "n2", "head", "n1"]
    assert sorted(names, key=nodes._natural) == ["head", "n1", "n2", "n10"]


def test_a_cluster_over_tls_is_measured_and_opens_nothing_without(tmp_path: Path) -> None:
    until = datetime.datetime.fromtimestamp(time.time() + 3600, datetime.UTC)
    identities = certificates.issue("night", ("head", "worker"), until)
    options = []
    for what, text in asdict(identities["worker"]).items():
        (tmp_path / what).write_text(text)
        options += [{"ca": "--tls-ca-file"}.get(what, f"--tls-{what}"), str(tmp_path / what)]

    async def go() -> Fabric:
        dask_settings.apply()
        async with dask_scheduler.started(tmp_path, identity=identities["head"]) as address:
            fleet = LocalFleet(address, 1 << 30, tmp_path / "logs", options=options)
            fleet.start(2)
            try:
                security = identities["head"].security()
                async with Client(address, asynchronous=True, security=security, set_as_default=False) as client:
                    await client.wait_for_workers(2, 60)
                    return await measure_fabric(client, replace(PRESET, models=()), lambda _: None)
            finally:
                await fleet.close()

    measured = asyncio.run(go())
    assert measured.faults == []
    for over in ("dask tls", "pull", "push"):
        assert statistics.points_of_kind(measured, "one way", over)
    assert statistics.points_of_kind(measured, "one way", "dask") == []
    assert any("this cluster asks for TLS" in missing for missing in measured.missing)


def test_what_other_work_takes_of_the_processors_is_seen() -> None:
    endless = "print(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        share = tasks.others_share(0.2)
        other.kill()
    assert 0.3 / os.cpu_count() < share <= 1  # type: ignore[operator]
