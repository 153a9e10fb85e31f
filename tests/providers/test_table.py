"""Providers from outside the package: an installed distribution names one, and a launch trains on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from idletrain.errors import JobError
from idletrain.providers.protocol import CloudProvider, LaunchRequest, WorkerProvider
from idletrain.providers.table import BUILT_IN, cloud_named, provider_named

TINY = '''
import contextlib

from distributed.security import Security

from idletrain.cluster import dask_scheduler
from idletrain.cluster.local import LocalFleet


class Tiny:
    """Two worker processes on this machine."""

    scheduler = None
    measurable = False
    dashboard_port = None

    def __init__(self, request):
        self.churns = request.churn_seconds is not None

    def faults(self, job):
        return ["--churn: tiny takes no workers; leave it out"] if self.churns else []

    async def check(self):
        pass

    @contextlib.asynccontextmanager
    async def cluster(self, job, record):
        async with dask_scheduler.started(job.run_dir) as address:
            fleet = LocalFleet(address, 1 << 30, job.run_dir / "logs", "tiny")
            fleet.start(job.nodes.count)
            try:
                yield address, Security()
            finally:
                await fleet.close()
'''
JOB = """
name: t
model: {factory: "idletrain.nn.models:mlp", args: {widths: [64, 16, 10]}}
data: {name: digits}
training: {method: ist, subnets: 2, local_steps: 5, rounds: 2, batch_size: 32}
nodes: {count: 2}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for `sys.path` with a distribution that offers the provider `tiny`, and a job file."""
    (tmp_path / "tiny_provider.py").write_text(TINY)
    metadata = tmp_path / "tiny_provider-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-provider\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[idletrain.providers]\ntiny = tiny_provider:Tiny\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-m", "idletrain", "launch", "job.yaml", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_launch_trains_on_a_provider_that_another_package_installs(installed: Path) -> None:
    result = launch(installed, "--cloud", "tiny", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["status"] == "completed"
    logs = sorted(path.name for path in (installed / "runs" / "t" / "logs").iterdir())
    assert len(logs) == 2
    assert all(name.startswith("tiny-") for name in logs)


def test_a_provider_s_own_faults_refuse_a_launch(installed: Path) -> None:
    result = launch(installed, "--cloud", "tiny", "--churn", "5s")
    assert (result.returncode, result.stderr) == (2, "idletrain: --churn: tiny takes no workers; leave it out\n")
    assert not (installed / "runs").exists()


def test_every_built_in_provider_implements_one_of_the_protocols() -> None:
    for name in BUILT_IN:
        provider = provider_named(name, LaunchRequest())
        assert isinstance(provider, WorkerProvider) != isinstance(provider, CloudProvider)


def test_unknown_providers_are_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(JobError, match=r"there is no provider azure; there are: aws, local, sandbox, scheduler"):
        provider_named("azure", LaunchRequest())
    with pytest.raises(JobError, match=r"runs on local have their head on the machine that launched them"):
        cloud_named("local")
