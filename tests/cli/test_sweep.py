"""`idletrain sweep` as a person calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from chaos.helpers import until
from typer.testing import CliRunner, Result

from idletrain.cli.main import app
from idletrain.cli.runs import local_summary
from idletrain.cli.sweep import cost_of, parse_usd
from idletrain.errors import JobError

JOB: dict[str, Any] = {
    "name": "digits",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
    "data": {"name": "digits"},
    "training": {"method": "ist", "subnets": 2, "local_steps": 5, "rounds": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
    "nodes": {"count": 1, "memory": "1GiB"},
    "cloud": {"image": "idletrain:1", "region": "eu-west-1"},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(yaml.safe_dump(JOB))


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["sweep", "job.yaml", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_sweep_is_a_table_the_best_first_and_the_same_command_prints_it_again() -> None:
    rates = ("--set", "training.optimizer.lr=0.000001,0.1")
    table = call(*rates).stdout.splitlines()
    first, second = (line.split() for line in table if "digits-" in line)
    assert (first[0], second[0]) == ("0.1", "1e-06")
    assert first[1:3] == ["completed", "2"]
    (heading,) = (line.split() for line in table if line.split()[:1] == ["lr"])
    assert heading == ["lr", "state", "rounds", "loss", "accuracy", "time", "run"]
    again = call(*rates, "--json")
    found = {entry["set"]["training.optimizer.lr"]: entry for entry in json.loads(again.stdout)}
    assert found[0.1]["state"] == "completed"
    assert found[0.1]["name"] == first[-1]
    assert "2 of 2 trials have ended before" in again.stderr
    side_by_side = CliRunner().invoke(app, ["compare", "digits"])
    assert all(entry["name"] in side_by_side.stdout for entry in found.values()), side_by_side.output


def test_no_trial_is_started_before_the_networks_of_all_are_known_to_be_good() -> None:
    with pytest.raises(JobError, match=r"^digits-\w+: model: does not take inputs of shape \[64\]: ") as caught:
        call("--set", "model.args.widths=[64,16,10],[63,16,10]")
    assert len(caught.value.faults) == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_trial_that_trains_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "idletrain", "sweep", "job.yaml", "--set", "training.rounds=100000,100001"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) as sweep:
        try:
            until("a round of the first trial", lambda: [*Path("runs").glob("*/updates/*")])
            below = psutil.Process(sweep.pid).children(recursive=True)
            sweep.send_signal(number)
            _, errors = sweep.communicate(timeout=90)
        finally:
            sweep.kill()
    assert sweep.returncode == 130, errors
    assert "idletrain: stopped; the same command goes on where it was" in errors
    assert not psutil.wait_procs(below, timeout=20)[1]
    assert not [*scratch.glob("idletrain-sweep-*")]
    (run,) = Path("runs").glob("*/events.jsonl")
    assert local_summary(run.parent).status == "stopped"


@pytest.mark.parametrize(("text", "amount"), [("5usd", 5.0), ("$2.50", 2.5), ("1", 1.0), ("3 USD", 3.0)])
def test_amounts(text: str, amount: float) -> None:
    assert parse_usd(text) == amount


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "training.subnets"), "should be a setting and its values"),
        (("--set", "training.subnets=0"), "training.subnets: 0 should be"),
        (("--set", "training.seed=1", "--budget", "much"), "--budget: 'much' should be an amount such as 5usd"),
        (("--set", "training.seed=1", "--budget", "-1"), "--budget: '-1' should be an amount such as 5usd"),
        (("--set", "training.seed=1", "--cloud", "aws"), "--budget: is missing; say what all trials together may cost"),
        (("--set", "training.seed=1", "--cloud", "nowhere"), "there is no provider nowhere"),
    ],
)
def test_wrong_input_is_a_sentence_and_nothing_is_made(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(JobError) as raised:
        call(*arguments)
    assert sentence in str(raised.value)
    assert not Path("runs").exists()


def test_a_run_s_cost_is_that_of_its_machines() -> None:
    launched = {
        "v": 2, "t": 0.0, "s": 0.0, "kind": "instance_launched", "instance": "i", "role": "worker", "type": "m",
        "zone": "z", "market": "spot", "usd_per_hour": 1.0, "on_demand_usd_per_hour": 2.0,
    }  # fmt: skip
    ended = {"v": 2, "t": 1800.0, "s": 1800.0, "kind": "instance_ended", "instance": "i", "reason": ""}
    Path("runs/night").mkdir(parents=True)
    Path("runs/night/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (launched, ended)))
    assert cost_of({"run_dir": "runs/night/"}) == pytest.approx(0.5, abs=0.01)
