"""Runs whose subnets do not fit their workers: trained by a plan they end in the same bits; a full disk is no end."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idletrain.job_file import parse_job
from idletrain.nn.outofcore.executing.disk import in_memory
from idletrain.nn.outofcore.executing.requirements import OutOfCoreForecast
from idletrain.nn.outofcore.planning.plan import least_bytes
from idletrain.nn.prepare import from_settings

from .helpers import Control, Run, job_tree, train_alone, until

ROUNDS = 2
WIDE: dict[str, Any] = {
    "model": {"args": {"widths": [64, 1024, 1024, 1024, 1024, 10]}},
    "training": {"batch_size": 1500, "local_steps": 3, "rounds": ROUNDS},
}
DEEP: dict[str, Any] = {
    "model": {"args": {"widths": [64, *[1024] * 12, 10]}},
    "training": {"local_steps": 4, "rounds": ROUNDS},
}


def streaming_budget(tmp_path: Path) -> int:
    """What is too little for the parameters and optimizer state of half of a deep network."""
    job = parse_job(job_tree(tmp_path, **DEEP))
    forecast = OutOfCoreForecast(from_settings(job.model, job.data, job.training).program)
    budget = int(1.03 * forecast.least_bytes(0.5))
    assert budget < least_bytes(forecast.profile(0.5), stream=False)
    return budget


def tight_budget(tmp_path: Path) -> int:
    """What is too little in core and enough by a plan, for half of the network."""
    job = parse_job(job_tree(tmp_path, **WIDE))
    forecast = OutOfCoreForecast(from_settings(job.model, job.data, job.training).program)
    budget = int(1.03 * forecast.least_bytes(0.5))
    assert set(forecast.plan(0.5, budget).unit_modes) != {"K"}
    return budget


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with one MiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    image = tmp_path / "disk"
    image.write_bytes(bytes(2 << 20))
    make = ["mkfs.ext4", "-q", "-O", "^has_journal", image]
    mount = ["mount", "-o", "loop", image, folder]
    if os.geteuid() or any(subprocess.run(command, check=False).returncode for command in (make, mount)):
        pytest.skip("this machine may not mount a file as a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory on a disk, which a temporary one of the tests need not be."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if in_memory(Path(folder)):
            pytest.skip("this machine's /var/tmp is in memory")
        yield Path(folder)


def test_a_run_out_of_core_ends_in_the_bits_of_one_in_core(
    make_run: Callable[..., Run], scratch: Path, tmp_path: Path
) -> None:
    memory = {"budget": tight_budget(tmp_path), "out_of_core": "always", "scratch": str(scratch)}
    run = make_run(**WIDE, memory=memory)
    head = run.launch()
    assert head.exit_code() == 0, head.text
    run.check(train_alone(parse_job(job_tree(tmp_path, **WIDE))))
    assert len(run.events("staged")) == 2 * ROUNDS
    ended = [event for event in run.events("attempt_ended") if event["ended"] == "done"]  # a slow one may have a backup
    assert all(set(event["plan"]) & set("SRQ") for event in ended)
    assert sum(event["swapped_bytes"] for event in ended) > 0 or all("R" in event["plan"] for event in ended)
    assert list(scratch.iterdir()) == []
    assert not head.survivors()


def test_parameters_that_do_not_fit_are_streamed_and_end_in_the_same_bits_whoever_is_killed(
    make_run: Callable[..., Run], control: Control, scratch: Path, tmp_path: Path
) -> None:
    memory = {"budget": streaming_budget(tmp_path), "out_of_core": "always", "scratch": str(scratch)}
    run = make_run(**DEEP, memory=memory)
    control.pace(0.3)
    head = run.launch()
    marked = run.wait("a checkpoint, sent in parts", "progress_saved")
    victim = next(event["worker"] for event in run.events("leased") if event["attempt"] == marked["attempt"])
    process = run.workers()[victim]
    process.kill()
    lost = run.wait("its loss", "lost", lambda event: event["subnet"] == marked["subnet"])
    assert lost["kept_steps"] >= marked["steps"]
    run.wait("its replacement to go on from the checkpoint", "leased", lambda event: event["step"] >= marked["steps"])
    control.pace(0)
    assert head.exit_code() == 0, head.text
    run.check(train_alone(parse_job(job_tree(tmp_path, **DEEP))))
    done = [event for event in run.events("attempt_ended") if event["ended"] == "done"]
    assert len(done) == 2 * ROUNDS
    assert all(event["streamed"] for event in done)
    assert all(event["push_bytes"] > 0 and event["pull_bytes"] > 0 for event in done)
    assert list(scratch.iterdir()) == []
    assert not head.survivors()


def test_a_worker_whose_scratch_is_full_gets_no_more_such_work(
    make_run: Callable[..., Run], full_disk: Path, tmp_path: Path
) -> None:
    memory = {"budget": tight_budget(tmp_path), "out_of_core": "always", "scratch": str(full_disk)}
    run = make_run(**WIDE, memory=memory)
    run.launch()
    until("both workers to say so", lambda: len(run.events("attempt_ended")) >= 2)
    until(
        "the run to say what it waits for",
        lambda: [e for e in run.events("waiting") if "the largest worker has" in e["reason"]],
    )
    ended = run.events("attempt_ended")
    assert [event["ended"] for event in ended] == ["out_of_memory"] * 2
    assert len({event["worker"] for event in ended}) == 2
    assert all("MiB free and" in event["reason"] for event in ended)
