"""Give the figures of workers on this machine without starting one: loopback's from a benchmark, steps timed here."""

from __future__ import annotations

import os

import torch

from idletrain.autotune import step_time
from idletrain.autotune.choose import Prepare, variants
from idletrain.autotune.forecast import FleetFigures
from idletrain.job import Job
from idletrain.nn.memory import WORKER_BYTES
from idletrain.nn.threads import one_thread

# Over TLS (benchmarks/results/exchange.json), a round trip through the scheduler, and writing and reading an update.
PULL_BYTES_PER_SECOND, PUSH_BYTES_PER_SECOND = 1.6e9, 0.8e9
CALL_SECONDS = 0.005
COMMIT_BYTES_PER_SECOND = 0.5e9


def local_figures(job: Job, memory_bytes: int, prepare: Prepare) -> FleetFigures:
    """Return the speeds of the job's nodes if all of them are workers on this machine.

    Args:
        job: The job.
        memory_bytes: Memory of each worker, of which its own process takes a part (on a GPU none).
        prepare: Builds the network and opens the data of a job with other settings.

    Raises:
        JobError: The job's settings contradict each other in every way that it leaves open.
    """
    nodes, rates = job.nodes.count, (PULL_BYTES_PER_SECOND, PUSH_BYTES_PER_SECOND)
    free = memory_bytes if torch.cuda.is_available() else max(1, memory_bytes - WORKER_BYTES)
    seconds = steps_here(job, free, prepare)
    alone = FleetFigures(nodes, *rates, *rates, CALL_SECONDS, COMMIT_BYTES_PER_SECOND, free, seconds)
    return alone.sharing_cores(max(1.0, nodes / _processors()))


def _processors() -> int:
    """Return how many workers compute at once: a GPU is shared by all, cores by as many as exceed their number."""
    return 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))


@one_thread()
def steps_here(job: Job, memory_bytes: int, prepare: Prepare) -> dict[str, float]:
    """Return the seconds of a step on this machine alone, by `option_key`, of all that fits a node's memory."""
    return {
        variant.key: step_time.step_seconds(variant.prepared, step_time.typical(variant.prepared.program), 0)
        for variant in variants(job, job.nodes.count, memory_bytes, prepare)
        if variant.fits
    }
