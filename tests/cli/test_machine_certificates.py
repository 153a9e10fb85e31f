"""Machines of one's own talk by the certificates that `idletrain infra tls` writes, and by no others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import warm
import yaml
from rehearsal import eventually

from idletrain.cli.machine_certificates import write_certificates
from idletrain.cluster.identity import OPTIONS
from idletrain.errors import JobError

JOB = {
    "name": "tls",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 32, 10]}},
    "data": {"name": "digits"},
    "nodes": {"count": 1},
    "training": {"method": "ist", "subnets": 2, "local_steps": 5, "rounds": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
}


@contextmanager
def running(folder: Path, name: str, *command: str, **environment: str) -> Iterator[Path]:
    """Run a command in the background; yield the file of its output."""
    output = folder / name
    output.touch()
    process = warm.start([sys.executable, "-m", *command], {**os.environ, **environment}, output, folder)
    try:
        yield output
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_scheduler_a_worker_and_a_launch_of_them_train(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tls://127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "checkpoint": {"to": str(tmp_path / "runs")}}))
    of_head = {"DASK_CONFIG": str(tmp_path / "head")}
    of_worker = [part for name in OPTIONS for part in (f"--tls-{name}", str(tmp_path / "worker" / name))]
    scheduler = ("dask", "scheduler", "--host", address, "--dashboard-address", "127.0.0.1:0")
    launch = ["idletrain", "launch", str(tmp_path / "job.yaml"), "--scheduler", address, "--json"]
    with ExitStack() as stack:
        log = stack.enter_context(running(tmp_path, "scheduler.log", *scheduler, **of_head))
        eventually(lambda: f"Scheduler at: {address}" in " ".join(log.read_text().split()), 60)
        stack.enter_context(running(tmp_path, "worker.log", "idletrain", "worker", address, *of_worker))
        refused = warm.run([sys.executable, "-m", *launch])
        assert refused.returncode == 2, refused.stderr
        assert "asks for TLS" in refused.stderr
        done = warm.run([sys.executable, "-m", *launch], environment={**os.environ, **of_head})
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["rounds"]) == ("completed", 2)


def test_only_their_user_reads_them_and_none_are_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    assert write_certificates(folder) == ["head", "worker"]
    for role in ("head", "worker"):
        assert (folder / role).stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in (folder / role).iterdir()} == {0o600}
    keys = {(folder / role / "key").read_text() for role in ("head", "worker")}
    assert len(keys) == 2
    with pytest.raises(JobError, match="has head, worker already; name an empty folder"):
        write_certificates(folder)
    assert {(folder / role / "key").read_text() for role in ("head", "worker")} == keys


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot be written .*; name another folder"):
        write_certificates(tmp_path / "file")
