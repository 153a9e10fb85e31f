"""`idletrain simulate` as a person calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from idletrain.cli import simulate
from idletrain.errors import JobError

TRAINING = {"method": "ist", "subnets": 4, "local_steps": 50}
JOB = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
    "data": {"name": "digits"},
    "training": TRAINING,
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(simulate.app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_every_policy_has_a_row_and_so_has_data_parallel_training(job: Path) -> None:
    result = call(str(job), "--hours", "0.05", "--stay", "30s", "--back", "5s", "--step", "10ms")
    for name in ("reissue", "salvage", "rolling", "data parallel, checkpoints", "data parallel, steps"):
        assert name in result.stdout
    assert "a simulated fleet " in result.stdout


@pytest.mark.parametrize(
    ("settings", "refused", "why"),
    [
        ({"method": "local-sgd"}, {"rolling"}, "rolling is left out: training.method: "),
        ({"subnets": 60}, {"rolling"}, "need 90 neurons in each group"),
        ({"copies": 2}, {"rolling"}, "rolling is left out: training.copies: "),
        ({"exchange": {"push": "int8", "loss": 0.1}}, {"reissue", "rolling"}, "reissue is left out: training.exchange"),
    ],
)
def test_a_policy_that_the_job_does_not_go_with_is_left_out_and_the_others_are_shown(
    job: Path, settings: dict[str, Any], refused: set[str], why: str
) -> None:
    preemption = {"policy": "salvage"} if "exchange" in settings else {}
    job.write_text(yaml.safe_dump({**JOB, "training": {**TRAINING, **settings}, "preemption": preemption}))
    result = call(str(job), "--hours", "0.01", "--step", "10ms", "--json")
    assert why in result.stderr
    assert set(simulate.POLICIES) - json.loads(result.stdout).keys() == refused


def test_a_network_in_the_working_directory_is_imported(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "network_of_mine.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))\n"
    )
    job.write_text(yaml.safe_dump({**JOB, "model": {"factory": "network_of_mine:net"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert "reissue" in json.loads(call(str(job), "--hours", "0.01", "--step", "10ms", "--json").stdout)


def test_a_job_whose_network_is_not_there_is_refused(job: Path) -> None:
    job.write_text(yaml.safe_dump({**JOB, "model": {"factory": "no_such_module:net"}}))
    with pytest.raises(JobError, match="no_such_module"):
        call(str(job), "--step", "10ms")


def test_a_simulation_of_too_many_events_ends_early_and_says_so(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MOST_EVENTS", 500)
    result = call(str(job), "--hours", "10", "--step", "10ms")
    assert "of 10 hours, those that take 500 events" in " ".join(result.stdout.split())


def test_json_has_all_figures_and_a_trace_is_followed(job: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("1000,add,a\n1000,add,b\n61000,remove,b\n")
    result = call(str(job), "--hours", "0.05", "--trace", str(trace), "--step", "10ms", "--json")
    found = json.loads(result.stdout)
    assert found["rolling"]["alive_seconds"] == pytest.approx(180 + 60)
    assert found["rolling"]["lost"] == 1
    assert 0.5 < found["rolling"]["goodput"] <= 1


def test_without_a_step_s_time_it_is_measured_here(job: Path) -> None:
    found = json.loads(call(str(job), "--hours", "0.001", "--json").stdout)
    assert found["reissue"]["steps"] > 0


def test_bytes_and_cost_are_told_and_goodput_is_plotted(job: Path, tmp_path: Path) -> None:
    page = tmp_path / "rates.html"
    fleet = ("--hours", "0.05", "--stay", "60s", "--back", "5s", "--step", "10ms", "--price", "0.5")
    result = call(str(job), *fleet, "--plot", str(page))
    assert "USD" in result.stdout
    assert f"{page} shows goodput" in result.stdout.replace("\n", "")
    text = page.read_text()
    assert text.count("<polyline") == 5
    for name in ("reissue", "salvage", "rolling", "data parallel, checkpoints", "data parallel, steps"):
        assert f"<td>{name}</td>" in text
    found = json.loads(call(str(job), *fleet, "--json").stdout)
    assert found["rolling"]["moved_bytes"] > 1000 * found["rolling"]["transfers"]
    assert found["rolling"]["usd"] == pytest.approx(found["rolling"]["alive_seconds"] / 3600 * 0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plot", "none/page.html", "--hours", "1000000"), "--plot: none/page.html cannot be written (No such file"),
        (("--step", "0s"), "--step: a step takes some time; name it, such as 10ms"),
        (("--trace", "binary.csv"), "binary.csv: is no text; name a recorded trace"),
        (("--trace", "none.csv"), "none.csv: cannot be read (No such file or directory); name a recorded trace"),
        (("--nodes", "1", "--trace", "twice.csv"), "--trace: a comes twice without going at 5 ms"),
    ],
)
def test_what_cannot_be_simulated_is_told(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.csv").write_text("0,add,a\n5,add,a\n")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JobError) as refused:
        call(str(job), *arguments)
    assert words in str(refused.value)
