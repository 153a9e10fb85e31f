"""Processes of two nodes that measure together, without a cluster."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
import torch

from idletrain.fabric.measuring import models, tasks, training
from idletrain.fabric.measuring.presets import KB, OPERATIONS, QUICK, TimedModel
from idletrain.fabric.measuring.timed_group import TimedGroup
from tests.chaos.helpers import until

# Its times leave nothing out, however slow this machine is, and cost nothing: at most three repetitions are taken.
TINY = replace(
    QUICK,
    sizes=(KB, 8 * KB, 64 * KB),
    operation_seconds=30.0,
    repeats=(2, 3),
    step_seconds=30.0,
    models=(TimedModel("mlp", (8,)), TimedModel("transformer", (1,))),
    edge=8,
    thorough=True,
)


HOST = "127.0.0.1"


def orders(nodes: int, **changes: Any) -> dict[str, Any]:
    return {
        "backend": "gloo",
        "label": "gloo",
        "host": HOST,
        "port": tasks.unused_port(HOST),
        "nodes": nodes,
        "sharing": nodes,
        "local_rank": 0,
        "preset": asdict(TINY),
        "bytes_per_second": 1e9,
        "limit_seconds": 60.0,
    } | changes


def together(nodes: int, **changes: Any) -> list[dict[str, Any]]:
    common = orders(nodes, **changes)
    with ThreadPoolExecutor(nodes) as pool:
        parts = [pool.submit(tasks.take_part, {**common, "rank": rank}, "lo", {}) for rank in range(nodes)]
        return [part.result() for part in parts]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    first, second = together(2)
    assert second == {}
    assert "fault" not in first
    return first


def test_the_last_whole_results_count_beside_what_is_being_done() -> None:
    printed = (
        b'{"doing": "a"}\n{"training": [1]}\n{"doing": "b"}\n{"training": [1, 2]}\n{"doing": "c"}\n{"training": [1,'
    )
    assert tasks._read_results(io.BytesIO(printed)) == {"training": [1, 2]}
    assert tasks.doing() == "c"
    tasks._doing.clear()


def test_every_operation_of_every_size_is_sampled(results: dict[str, Any]) -> None:
    done = {(one["operation"], one["moved_bytes"]) for one in results["collectives"]}
    assert done == {(operation, size) for operation in OPERATIONS for size in TINY.sizes}
    assert all(min(one["seconds"]) > 0 and 2 <= len(one["seconds"]) <= 3 for one in results["collectives"])


def test_steps_are_sampled_alone_and_together(results: dict[str, Any]) -> None:
    done = {(one["model"], one["nodes"]): one for one in results["training"]}
    assert done.keys() == {(model, nodes) for model in ("mlp", "transformer") for nodes in (1, 2)}
    assert done["mlp", 1]["step"] == []
    both = done["mlp", 2]
    assert min(both["compute"] + both["communicate"] + both["step"]) > 0
    assert sum(both["buckets"]) == both["gradient_bytes"]


def test_the_stencil_is_sampled_both_ways(results: dict[str, Any]) -> None:
    done = {(one["scaling"], one["blocking"], one["nodes"]) for one in results["stencil"]}
    assert done == {
        (scaling, how, nodes) for scaling in ("strong", "weak") for how in (True, False) for nodes in (1, 2)
    }


def test_steps_whose_exchange_takes_too_long_are_computed_from_one_node_s_times() -> None:
    hasty = replace(TINY, step_seconds=1e-9, models=(TimedModel("mlp", (8,)),), operation_seconds=0.01)
    first, second = together(2, preset=asdict(hasty))
    assert "fault" not in first | second
    alone, both = (next(one for one in first["training"] if one["nodes"] == nodes) for nodes in (1, 2))
    assert both["compute"] == alone["compute"] != []
    assert both["step"] == both["communicate"] == []
    assert any(missing.startswith("steps of mlp on 2 nodes are computed") for missing in first["missing"])


def test_what_would_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = TimedGroup(None, 1, 0, torch.device("cpu"), replace(TINY, step_seconds=10.0))
    room = 4 * 4 * sum(p.numel() for p in models.on_meta("mlp").parameters()) + (50 << 20)
    monkeypatch.setattr(training, "available_bytes", lambda: room)
    results, missing = training.measure_training(alone, "gloo", TimedModel("mlp", (512, 1 << 16)), 1, lambda _: 0.0)
    assert [one.batch_size for one in results] == [512]
    assert missing[0].startswith("mlp, batch 65536 and more on one node: needs ")
    results, missing = training.measure_training(alone, "gloo", TimedModel("mlp", (8,)), 8, lambda _: 0.0)
    assert (results, len(missing)) == ([], 1)


def test_one_node_trains_alone() -> None:
    (only,) = together(1)
    assert only["collectives"] == []
    assert {one["nodes"] for one in only["training"]} == {1}


def listening(port: int) -> list[str]:
    """The addresses at which a port of this machine is listened on."""
    return [
        one.laddr.ip
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]


def test_the_first_node_listens_on_its_address_alone_and_ends_with_its_task() -> None:
    alone = orders(2, limit_seconds=600.0)
    with ThreadPoolExecutor(1) as pool:
        part = pool.submit(tasks.take_part, {**alone, "rank": 0}, "lo", {})
        try:
            assert until("the first node listens", lambda: listening(alone["port"])) == [HOST]
        finally:
            tasks.end_parts()
        assert part.result(30)["fault"] == "it ended with -9"
    assert listening(alone["port"]) == []


def test_a_process_that_fails_says_why() -> None:
    (only,) = together(1, backend="carrier pigeon")
    assert "carrier pigeon" in only["fault"].lower() or "backend" in only["fault"].lower()


def test_a_process_whose_peers_never_join_is_ended() -> None:
    results = tasks.take_part({**orders(2, limit_seconds=4.0), "rank": 0}, "lo", {})
    assert results == {"fault": "it took longer than 4 s"}
