"""What chaos tests start, and its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from idletrain.job_file import parse_job

from .helpers import Cluster, Control, Process, Run, destroy_all, job_tree, python_path, train_alone

os.environ["PYTHONPATH"] = python_path()  # of all that tests start, before the first warm parent
LONGEST = 12  # rounds; a shorter run's digest is on the way


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Every process that a test starts; none outlives it."""
    processes: list[Process] = []
    yield processes
    destroy_all(processes)


@pytest.fixture
def control(tmp_path: Path, started: list[Process]) -> Iterator[Control]:
    control = Control(tmp_path / "control")
    yield control
    control.release()


@pytest.fixture
def make_run(tmp_path: Path, control: Control, started: list[Process]) -> Callable[..., Run]:
    """Makes a run of a job: `make_run(rounds=4, preemption={...})`."""

    def make(*, to: Path | None = None, **changes: Any) -> Run:
        return Run(job_tree(to or tmp_path / "runs", **changes), control, tmp_path, started)

    return make


@pytest.fixture
def cluster(tmp_path: Path, control: Control, started: list[Process]) -> Cluster:
    """A stock Dask scheduler without workers."""
    return Cluster(control, tmp_path, started)


@pytest.fixture(scope="session")
def undisturbed() -> Callable[..., list[str]]:
    """The digests that a job's parameters have after every round when nothing goes wrong."""

    @cache
    def of(subnets: int = 2, local_steps: int = 20) -> list[str]:
        return train_alone(parse_job(job_tree(Path(), rounds=LONGEST, subnets=subnets, local_steps=local_steps)))

    return of
