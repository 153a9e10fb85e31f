"""A real run in a temporary directory: scheduler, workers and round manager as `idletrain launch` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.nn.prepare import Prepared, from_settings
from idletrain.observe.records import Record, Sink
from idletrain.providers.local import LocalProcesses
from idletrain.providers.protocol import LaunchRequest
from idletrain.run import RunOptions, launch

Arrays = tuple[NDArray[Any], NDArray[Any]]


def noise(samples: int, inputs: int, classes: int) -> tuple[Arrays, Arrays]:
    """Return random inputs and labels, `(train, test)`: for what does not depend on the data."""
    random = np.random.Generator(np.random.Philox(0))
    x, y = random.random((samples, inputs), dtype=np.float32), random.integers(classes, size=samples)
    return (x, y), (x, y)


def noise_data(samples: int, inputs: int, classes: int = 10) -> dict[str, Any]:
    """Return the `data` section of a job on `noise`."""
    return {
        "factory": "benchmarks.runs:noise",
        "args": {"samples": samples, "inputs": inputs, "classes": classes},
    }


def single_steps(subnets: int, rounds: int) -> dict[str, Any]:
    """Return the `training` section of a job whose rounds have one local step on one sample."""
    return {
        "subnets": subnets,
        "local_steps": 1,
        "rounds": rounds,
        "batch_size": 1,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "evaluate_every": rounds,
    }


@contextlib.contextmanager
def temporary_job(tree: dict[str, Any]) -> Iterator[Job]:
    """Yield a job whose run directory is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="idletrain-bench-") as folder:
        checkpoint = {"every": "1h", **tree.get("checkpoint", {}), "to": folder}
        yield parse_job({"name": "bench", **tree, "checkpoint": checkpoint})


def prepared_of(job: Job) -> Prepared:
    """Prepare what the head holds, without evaluation: no test data, no time."""
    return replace(from_settings(job.model, job.data, job.training, job.memory), test=None)


async def run(job: Job, sinks: Iterable[Sink] = (), churn_seconds: float | None = None) -> list[Record]:
    """Run a job on local workers; returns its events."""
    events: list[Record] = []
    options = RunOptions(
        provider=LocalProcesses(LaunchRequest(churn_seconds=churn_seconds)), sinks=(events.append, *sinks)
    )
    await launch(job, prepared_of(job), options)
    return events


def events_of(tree: dict[str, Any]) -> list[Record]:
    """Run a job given as plain values to its end; returns its events."""
    with temporary_job(tree) as job:
        return asyncio.run(run(job))


def of_kind(events: Sequence[Record], kind: str) -> list[Record]:
    """Return the events of one kind, in order."""
    return [event for event in events if event["kind"] == kind]


def scheduler_pid(job: Job) -> int:
    """Return the process of a running job's scheduler."""
    pid: int = json.loads((job.run_dir / "cluster.json").read_text())["pid"]
    return pid
