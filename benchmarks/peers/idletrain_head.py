"""idletrain as a user runs it: scheduler, store and round manager in one process tree on the head; no TLS, as no peer
has any. Prints the run's events.

Settings: `tree`, the job as plain values; `foreseen`, whether to look at the fleet first.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace

import torch
from distributed import Client
from distributed.security import Security

from benchmarks.peers.node import Spec, read_spec, say
from idletrain.fabric import outlook
from idletrain.fabric.survey import survey
from idletrain.fleet import scheduler, settings
from idletrain.job import Job, parse_job
from idletrain.launch import Options, launch
from idletrain.nn.prepare import from_settings
from idletrain.observe.expectation import Expectation
from idletrain.observe.records import Event


def _print(event: Event) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def foreseen(job: Job, address: str, nodes: int) -> Expectation:
    """What rounds should take, by a look at the fleet once all workers are there."""
    async with Client(address, asynchronous=True, set_as_default=False) as client:
        await client.wait_for_workers(nodes)
        fleet = await survey(client, job)
    _, choice = await asyncio.to_thread(outlook.chosen, job, fleet)
    return Expectation(choice.expected.as_record(), choice.why)


async def lead(spec: Spec) -> None:
    """Run the job on the workers that come."""
    settings.apply()
    job = parse_job(spec.settings["tree"])
    prepared = replace(from_settings(job.model, job.data, job.training), test=None)  # evaluated after the run
    job.run_dir.mkdir(parents=True)
    async with scheduler.started(job.run_dir, host=spec.address, port=spec.port) as address:
        say("serving", address=address)
        expectation = await foreseen(job, address, spec.nodes) if spec.settings["foreseen"] else Expectation()
        await launch(job, prepared, Options(cluster=(address, Security()), sinks=(_print,), expectation=expectation))


if __name__ == "__main__":
    spec = read_spec()
    torch.set_num_threads(1)
    asyncio.run(lead(spec))
