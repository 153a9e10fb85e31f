"""A run that another process of this machine trains is stopped and followed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from idletrain.cli import local_runs
from idletrain.cli.main import app
from idletrain.errors import RunError
from idletrain.observe.summary import summarise
from idletrain.storage import head_of, only_head

TREE = {
    "name": "slow",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 2, "local_steps": 5, "rounds": 100_000},
    "nodes": {"count": 1, "memory": "1GiB"},
}
PATIENCE_SECONDS = 90.0


def until_it_trains(run_dir: Path) -> int:
    """Wait for a round; return the head's process."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert time.monotonic() < deadline
        if (run_dir / "events.jsonl").exists() and summarise(run_dir / "events.jsonl").rounds:
            process = head_of(run_dir)
            assert process
            return process
        time.sleep(0.1)


def test_down_stops_a_run_of_this_machine_which_keeps_its_rounds_and_logs_follow_it_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(TREE))
    run_dir = Path("runs", "slow")
    with Path("out").open("w") as out:
        launch = subprocess.Popen([sys.executable, "-m", "idletrain", "launch", "job.yaml"], stdout=out, stderr=out)
    followed = None
    try:
        assert until_it_trains(run_dir) == launch.pid
        command = [sys.executable, "-m", "idletrain", "logs", "slow", "-f"]
        followed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        result = CliRunner().invoke(app, ["down", "slow"])
        assert result.output.startswith("slow: stopped; what it has trained is in runs/slow"), result.output
        assert launch.wait(PATIENCE_SECONDS) == 130
        assert head_of(run_dir) is None
        assert "stopped: " in followed.communicate(timeout=PATIENCE_SECONDS)[0]
    finally:
        for process in filter(None, (launch, followed)):
            process.kill()
            process.wait()
    assert summarise(run_dir / "events.jsonl").status == "stopped"
    assert list((run_dir / "snapshots").iterdir())


def test_a_process_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    sleeper = f"{ignored}; print('x', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE)
    monkeypatch.setattr(local_runs, "END_SECONDS", 0.3)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        with only_head(tmp_path):
            (tmp_path / "lock").write_text(str(process.pid))
            with pytest.raises(RunError, match=f"process {process.pid} still trains .*; kill {process.pid} ends it"):
                local_runs.stop_here(tmp_path, process.pid)
    finally:
        process.kill()
        process.communicate()
