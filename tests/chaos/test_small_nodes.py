"""Machines with a true limit of 512 MiB train what needs three times that, to the bits of machines that hold it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from idletrain_testbed import Testbed, cgroups, missing

from benchmarks.machines import Cast, Shaped, free_port
from benchmarks.peers.node import Spec
from idletrain.job_file import parse_job
from idletrain.nn.memory import subnet_need
from idletrain.nn.prepare import from_settings

from .helpers import job_tree, train_alone

NODE_BYTES = 512 << 20
PATIENCE_SECONDS = 240.0
DEEP: dict[str, Any] = {
    "model": {"args": {"widths": [64, *[1536] * 30, 10]}},
    "training": {
        "method": "local-sgd",  # every node trains all of it
        "local_steps": 2,
        "rounds": 2,
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "state": "reset"},
    },
}


def unlimited(bed: Testbed, node: str) -> None:
    """Take a machine's memory limit away: a head holds the network."""
    hierarchies = cgroups.hierarchies(cgroups.MOUNTS.read_text())
    for entrance in cgroups.entrances(hierarchies, bed.instance.name, node):
        for file, text in (
            ("memory.memsw.limit_in_bytes", "-1"),
            ("memory.limit_in_bytes", "-1"),
            ("memory.max", "max"),
        ):
            if (entrance.parent / file).exists():
                (entrance.parent / file).write_text(text)


def measure(tree: dict[str, Any], folder: Path) -> Sequence[dict[str, Any]]:
    """What a run on two such machines tells."""
    with Testbed(2, memory="512MiB") as bed, Cast(Shaped(bed), folder) as cast:
        unlimited(bed, "head")
        spec = Spec(
            rank=0,
            nodes=2,
            address=bed.address("head"),
            root=bed.address("head"),
            port=free_port(),
            model=tree["model"],
            data=tree["data"],
            batch_size=tree["training"]["batch_size"],
            seed=0,
            steps=0,
            settings={"tree": tree},
        )
        cast.start("head", [sys.executable, "-m", "benchmarks.peers.idletrain_head", json.dumps(asdict(spec))])
        address = cast.output.wait("serving", 1, PATIENCE_SECONDS, cast.all_alive)[0]["address"]
        for node in ("n0", "n1"):
            cast.start(node, [sys.executable, "-m", "idletrain", "worker", address])
        cast.output.wait("run_ended", 1, PATIENCE_SECONDS, cast.all_alive)
        return list(cast.output.lines)


def test_what_needs_three_times_a_machine_s_memory_ends_in_the_bits_of_large_ones(tmp_path: Path) -> None:
    if reason := missing(memory=True):
        pytest.skip(" ".join(reason))
    if torch.version.cuda:
        pytest.skip("torch's CUDA build alone takes what such a machine has; its CPU build is not installed")
    tree = job_tree(tmp_path / "run", **DEEP)
    job = parse_job(tree)
    assert subnet_need(from_settings(job.model, job.data, job.training).program)(1.0) > 3 * NODE_BYTES
    try:
        lines = measure(tree, tmp_path)
    except RuntimeError as error:
        raise AssertionError((tmp_path / "stderr").read_text()[-3000:]) from error
    joined = [line for line in lines if line["kind"] == "worker_joined"]
    assert len(joined) == 2
    assert all(line["memory_bytes"] < NODE_BYTES for line in joined)
    done = [line for line in lines if line["kind"] == "attempt_ended" and line["ended"] == "done"]
    assert len(done) == 2 * job.training.rounds
    assert all(line["streamed"] for line in done)
    trained = lines[lines.index(joined[-1]) :]  # a busy machine takes its time to start two
    assert not [line for line in trained if line["kind"] in ("lost", "waiting")]
    ended = next(line for line in lines if line["kind"] == "run_ended")
    assert ended["params_sha256"] == train_alone(job)[job.training.rounds]
