"""Networks whose labels are sharded over workers that are killed and warned, and heads that die."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idletrain.export import load_run

from . import steered
from .helpers import Control, Run, train_alone, until
from .test_workers import kill, marked

SIMHASH = {"name": "simhash", "k": 3, "tables": 6, "negatives": 8}


@pytest.fixture
def wide_job(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The sections of a job with 60 labels, each with words of its own."""
    random_ = np.random.default_rng(0)
    for name, rows in (("train", 600), ("test", 100)):
        lines = [""]
        for label in random_.integers(0, 60, rows):
            features = sorted({int(label), 60 + int(label) % 30, *random_.integers(0, 90, 2).tolist()})
            lines.append(f"{label} {' '.join(f'{word}:1' for word in features)}\n")
        lines[0] = f"{rows + 1} 90 60\n"
        lines.append(" 1:1\n")  # without a label
        (tmp_path / f"{name}.txt").write_text("".join(lines))

    def sections(sampler: Any = SIMHASH, rounds: int = 3, **model: Any) -> dict[str, Any]:
        args = {"features": 90, "hidden": 16, "labels": 60, "sampler": sampler}
        return {
            "model": {"factory": "idletrain.nn.wide.models:wide", "args": args, **model},
            "data": {"name": None, "train": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt")},
            "training": {
                "subnets": 3,
                "local_steps": 20,
                "rounds": rounds,
                "batch_size": 16,
                "loss": f"{steered.__name__}:sampled_softmax",
                "optimizer": {"name": "row-adagrad", "lr": 0.05, "start": {"output.weight": 1e-4}},
            },
            "nodes": 3,
        }

    return sections


@pytest.mark.parametrize("model", [{"exclude": ["hidden"]}, {"fixed": ["labels"]}], ids=["labels", "labels and hidden"])
def test_kills_and_notices_change_no_bit(
    make_run: Callable[..., Run], control: Control, wide_job: Callable[..., dict[str, Any]], model: dict[str, Any]
) -> None:
    """Retrieval included: who goes on in the middle of a round has the tables of its start."""
    run = make_run(**wide_job(**model))
    control.pace(0.1)
    head = run.launch()
    dice = random.Random(0)
    steps: list[int] = []
    while len(steps) < 4:

        def targets() -> list[Any]:
            assert head.running, head.text
            held = marked(run)
            return [p for at, p in run.workers().items() if at in held and p.pid not in steps]

        victim = dice.choice(until("a worker with a checkpoint", targets))
        if len(steps) % 2:
            victim.send_signal(signal.SIGTERM)
        else:
            kill(victim)
        steps.append(victim.pid)
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(run.job))
    causes = {event["cause"] for event in run.events("lost")}
    assert causes >= {"kill", "notice"}
    assert [event for event in run.events("leased") if event["step"]], "no subnet went on from a checkpoint"
    (started,) = run.events("run_started")
    assert (started["data"]["rows"], started["data"]["without_labels"]) == (600, 1)


def test_salvage_keeps_the_steps_of_shards_that_a_killed_worker_marked(
    make_run: Callable[..., Run], control: Control, wide_job: Callable[..., dict[str, Any]]
) -> None:
    run = make_run(**wide_job(exclude=["hidden"]), preemption={"policy": "salvage"})
    control.pace(0.1)
    head = run.launch()

    def targets() -> list[Any]:
        assert head.running, head.text
        held = marked(run)
        return [process for at, process in run.workers().items() if at in held]

    kill(until("a worker with a checkpoint", targets)[0])
    lost = run.wait("the loss", "lost", lambda e: e["cause"] == "kill")
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(None)
    same = [
        e
        for e in run.events("progress_saved", "leased")
        if (e["round"], e["subnet"]) == (lost["round"], lost["subnet"])
    ]
    saved_steps = max(e["steps"] for e in same if e["kind"] == "progress_saved" and e["attempt"] == lost["attempt"])
    commit = next(commit for commit in run.records("commit") if commit["round"] == lost["round"])
    assert dict(commit["staged"])[lost["subnet"]] >= saved_steps > 0
    assert all(e["step"] >= saved_steps for e in same if e["kind"] == "leased" and e["attempt"] > lost["attempt"])
    assert [event["accuracy"] for event in run.events("evaluated")][-1] > 0.3


def test_another_head_goes_on_with_sums_and_shards(
    make_run: Callable[..., Run], wide_job: Callable[..., dict[str, Any]]
) -> None:
    run = make_run(**wide_job(rounds=2, exclude=["hidden"]))
    head = run.launch_until("commit-recorded", nth=1)
    assert head.exit_code() == -signal.SIGKILL, head.text
    run.resume()
    run.check(train_alone(run.job))
    assert len(run.records("epoch")) == 2
    scores = [event["accuracy"] for event in run.events("evaluated")]
    assert scores[-1] > 0.5
    ranking = load_run(run.dir).ranking()
    assert ranking["P@1"] == scores[-1]
    assert set(ranking) == {f"{kind}@{k}" for kind in ("P", "nDCG", "PSP") for k in (1, 3, 5)}
    sparse = load_run(run.dir).retrieval()
    assert 0.6 < sparse["recall"] < 1  # of what is in a row's buckets, six tables of eight each
    assert sparse["sparse P@1"] > 0.5
    assert 1 / 5 >= ranking["P@5"] > ranking["P@1"] / 5
    evaluate = [sys.executable, "-m", "idletrain", "evaluate", str(run.dir)]
    completed = subprocess.run(
        evaluate, capture_output=True, text=True, check=True, timeout=120, env=run.control.environment
    ).stdout
    assert f"P@1 {ranking['P@1']:.4f}  P@3 {ranking['P@3']:.4f}" in completed
    assert "PSP@1" in completed
    assert f"the tables: {sparse['recall']:.1%} of the exact five best, P@1 {sparse['sparse P@1']:.4f}" in completed
