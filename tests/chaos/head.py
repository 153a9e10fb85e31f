"""Launches a job in this process and dies by SIGKILL at a named point around a durable write.

python head.py JOB.yaml OPTIONS (JSON: resume, scheduler, point, nth)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path

from idletrain.job_file import load_job
from idletrain.nn.prepare import from_settings
from idletrain.providers.local import LocalProcesses
from idletrain.providers.protocol import LaunchRequest
from idletrain.providers.scheduler import ExistingScheduler
from idletrain.run import RunOptions, launch


def main() -> None:
    request = json.loads(sys.argv[2])
    numbers = itertools.count(1)

    def reached(name: str) -> None:
        if name == request["point"] and next(numbers) == request["nth"]:
            os.kill(os.getpid(), signal.SIGKILL)

    job = load_job(Path(sys.argv[1]))
    prepared = from_settings(job.model, job.data, job.training)
    scheduler = request.get("scheduler")
    provider = ExistingScheduler(LaunchRequest(scheduler=scheduler)) if scheduler else LocalProcesses()
    options = RunOptions(provider=provider, resume=request.get("resume", False), reached=reached)
    ending = asyncio.run(launch(job, prepared, options))
    print(json.dumps({"status": ending.status, "params_sha256": ending.params_sha256}))


if __name__ == "__main__":
    main()
