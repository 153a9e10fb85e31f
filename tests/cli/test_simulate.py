"""`idletrain simulate` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from idletrain.cli import simulate
from idletrain.errors import JobError

JOB = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 64, 64, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 4, "local_steps": 50},
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
        (("--plot", "none/page.html", "--hours", "0.001"), "--plot: none/page.html: cannot be written (No such file"),
        (("--trace", "none.csv"), "none.csv: cannot be read (No such file or directory); name a recorded trace"),
        (("--nodes", "1", "--trace", "twice.csv"), "--trace: a comes twice without going at 5 ms"),
    ],
)
def test_what_cannot_be_simulated_is_told(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.csv").write_text("0,add,a\n5,add,a\n")
    with pytest.raises(JobError) as refused:
        call(str(job), *arguments)
    assert words in str(refused.value)
