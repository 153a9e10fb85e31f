"""Give the figures of workers on this machine without starting one: loopback's from a benchmark, steps timed here."""

from __future__ import annotations

import os

from idletrain.autotune import step_time
from idletrain.autotune.choose import Prepare, variants
from idletrain.autotune.forecast import FleetFigures
from idletrain.job import Job

# Over TLS (benchmarks/results/exchange.json), a round trip through the scheduler, and writing and reading an update.
PULL_BYTES_PER_SECOND, PUSH_BYTES_PER_SECOND = 1.2e9, 0.95e9
CALL_SECONDS = 0.005
COMMIT_BYTES_PER_SECOND = 0.5e9


def local_figures(job: Job, memory_bytes: int, prepare: Prepare) -> FleetFigures:
    """Return the speeds of the job's nodes if all of them are workers on this machine.

    Args:
        job: The job.
        memory_bytes: Memory of each worker.
        prepare: Builds the network and opens the data of a job with other settings.

    Raises:
        JobError: The job's settings contradict each other in every way that it leaves open.
    """
    nodes, rates = job.nodes.count, (PULL_BYTES_PER_SECOND, PUSH_BYTES_PER_SECOND)
    seconds = steps_here(job, memory_bytes, prepare)
    alone = FleetFigures(nodes, *rates, *rates, CALL_SECONDS, COMMIT_BYTES_PER_SECOND, memory_bytes, seconds)
    return alone.sharing_cores(max(1.0, nodes / len(os.sched_getaffinity(0))))


@step_time.one_thread()
def steps_here(job: Job, memory_bytes: int, prepare: Prepare) -> dict[str, float]:
    """Return the seconds of a step on this machine alone, by `option_key`, of all that fits a node's memory."""
    return {
        variant.key: step_time.step_seconds(variant.prepared, step_time.typical(variant.prepared.program), 0)
        for variant in variants(job, job.nodes.count, memory_bytes, prepare)
        if variant.fits
    }
