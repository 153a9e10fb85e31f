"""idletrain as a user runs it: scheduler, store and round manager in one process tree on the head; no TLS, as no peer
has any. Prints the run's events.

Settings: `tree`, the job as plain values.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace

import torch
from distributed.security import Security

from benchmarks.peers.node import Spec, read_spec, say
from idletrain.cluster import dask_scheduler, dask_settings
from idletrain.job_file import parse_job
from idletrain.nn.prepare import from_settings
from idletrain.observe.records import Record
from idletrain.providers.scheduler import RunningCluster
from idletrain.run import RunOptions, launch


def _print(event: Record) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def lead(spec: Spec) -> None:
    """Run the job on the workers that come."""
    dask_settings.apply()
    job = parse_job(spec.settings["tree"])
    prepared = replace(from_settings(job.model, job.data, job.training), test=None)  # evaluated after the run
    job.run_dir.mkdir(parents=True)
    async with dask_scheduler.started(job.run_dir, host=spec.address, port=spec.port) as address:
        say("serving", address=address)
        await launch(job, prepared, RunOptions(provider=RunningCluster(address, Security()), sinks=(_print,)))


if __name__ == "__main__":
    spec = read_spec()
    torch.set_num_threads(1)
    asyncio.run(lead(spec))
