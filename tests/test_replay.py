"""A run's log trained again: the same bits, or the first update that has others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from idletrain.errors import RunError
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.prepare import prepare_job
from idletrain.replay import train_again
from idletrain.rounds.durable.run_directory import RunDirectory
from idletrain.run import RunOptions, launch


def job_of(to: Path, **training: Any) -> Job:
    settings = {"method": "ist", "subnets": 3, "local_steps": 4, "rounds": 3, "batch_size": 16, "evaluate_every": 1}
    settings |= {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
    return parse_job(
        {
            "name": "rolls",
            "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 32, 10], "norm": "batch"}},
            "data": {"name": "digits"},
            "training": settings | training,
            "nodes": {"count": 2, "memory": "1GiB"},
            "preemption": {"policy": "rolling"},
            "checkpoint": {"to": str(to)},
        }
    )


@pytest.mark.parametrize(
    "training",
    [
        {"exchange": {"pull": "bf16", "push": "int8"}, "optimizer": {"name": "adamw", "lr": 1e-3, "state": "travel"}},
        {"ema": 0.9, "outer_optimizer": {"name": "nesterov", "lr": 0.7}},
    ],
    ids=["coded", "averaged"],
)
def test_a_run_s_log_gives_its_bits_and_other_settings_give_others(tmp_path: Path, training: dict[str, Any]) -> None:
    job = job_of(tmp_path, **training)
    outcome = asyncio.run(launch(job, prepare_job(job), RunOptions()))
    assert (outcome.status, outcome.rounds) == ("completed", 3)
    assert outcome.accuracy
    counted: list[tuple[int, int]] = []
    again = train_again(job.run_dir, lambda *done: counted.append(done))
    assert again.same
    assert again.differs is None
    assert again.params_sha256 == outcome.params_sha256
    assert counted == [(n, again.updates) for n in range(1, again.updates + 1)]

    command = [sys.executable, "-m", "idletrain", "replay", "rolls", "--trust"]
    said = subprocess.run(command, cwd=tmp_path, env=_runs_in(tmp_path), capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    assert f"{again.updates} updates have the same bits" in said.stdout.replace("\n", " ")

    changed = job.model_dump(mode="json")
    changed["training"]["seed"] = 1
    (job.run_dir / "job.json").write_text(json.dumps(changed))
    other = train_again(job.run_dir)
    assert not other.same
    assert other.differs == 0
    assert other.recorded_sha256 == outcome.params_sha256


def _runs_in(folder: Path) -> dict[str, str]:
    """Return an environment whose runs are in a folder."""
    import os

    (folder / "runs").symlink_to(folder)
    return {**os.environ}


def test_a_run_in_rounds_is_told_apart(tmp_path: Path) -> None:
    job = job_of(tmp_path).model_copy(
        update={"preemption": job_of(tmp_path).preemption.model_copy(update={"policy": "reissue"})}
    )
    RunDirectory(job.run_dir, prepare_job(job), lambda *_, **__: None, lambda _: None, 1).close()
    with pytest.raises(RunError, match="was trained in rounds; launch its job under another name"):
        train_again(job.run_dir)
