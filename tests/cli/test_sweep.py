"""`idletrain sweep` as a person calls it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from chaos.helpers import until
from typer.testing import CliRunner, Result

from idletrain.cli.main import app
from idletrain.cli.runs import local_summary
from idletrain.cli.sweep import cost_of, parse_usd
from idletrain.cli.sweep_table import print_columns, print_results
from idletrain.errors import JobError
from idletrain.job_file import parse_job
from idletrain.sweeps.grid import SweepTrial, as_written
from idletrain.sweeps.trial_results import SweepResult

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
    changed = {**JOB, "model": {**JOB["model"], "args": {"widths": [64, 32, 10]}}}
    Path("job.yaml").write_text(yaml.safe_dump(changed))
    sentence = (
        r"^name: trial digits-\w{6} ended with other settings \(model.args.widths\); give the sweep another --name$"
    )
    for place in ((), ("--cloud", "sandbox")):
        with pytest.raises(JobError, match=sentence):
            call(*rates, *place)


OF_MAE: dict[str, Any] = {
    "name": "line",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [8, 16, 1]}},
    "data": {"train": "r.npz", "test": "r.npz"},
    "training": {
        **JOB["training"], "rounds": 4, "loss": "mse", "optimizer": {"name": "adamw", "lr": 0.01},
        "metrics": {"mae": {"metric": "torchmetrics:MeanAbsoluteError"}},
    },
    "stop": {"metric": "mae"},
    "nodes": {"count": 1, "memory": "1GiB"},
    "checkpoint": {"to": "elsewhere/"},
}  # fmt: skip


def test_the_least_error_is_first_where_the_metric_says_so_and_trials_are_found_where_they_are() -> None:
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    np.savez("r.npz", x=x, y=(3 + x[:, :1]).astype(np.float32))
    Path("job.yaml").write_text(yaml.safe_dump(OF_MAE))
    rates = ("--set", "training.optimizer.lr=0.00001,0.02")
    lines = [line.split() for line in call(*rates).stdout.splitlines() if "line-" in line]
    assert [line[0] for line in lines] == ["0.02", "1e-05"]
    assert float(lines[0][3]) < float(lines[1][3])
    found = CliRunner().invoke(app, ["compare", "line"])
    assert all(line[-1] in found.stdout for line in lines), found.output


WIDE = [{"data.name": "[/x]", "model.args.widths": [[64, 1024, 1024, 1024, 1024, 10]] * count} for count in (1, 2)]


def results_of(values: list[dict[str, Any]]) -> tuple[list[SweepTrial], dict[str, SweepResult]]:
    found = [
        SweepTrial(chosen, parse_job({**JOB, "name": f"{'long-' * 9}{number}"})) for number, chosen in enumerate(values)
    ]
    done = SweepResult("completed", "", True, [(2, 0.123456)], {"seconds": 71.0, "accuracy": 0.5}, 1.5)
    return found, {trial.job.name: done for trial in found}


class Screen(io.StringIO):
    """A terminal of 80 letters."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What is printed, without styles."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.getvalue()).splitlines()


def on_a_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


def test_a_table_is_as_wide_as_it_needs_to_be_and_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    found, results = results_of(WIDE)
    print_results(found, results, "loss", "lower", as_json=False)
    table = capsys.readouterr().out
    for trial in found:
        (line,) = (line for line in table.splitlines() if trial.job.name in line)
        parts = line.replace(", ", ",").split()  # a value is one word
        assert parts[0] == "[/x]"
        assert parts[1] == as_written(trial.values["model.args.widths"]).replace(", ", ",")
        assert parts[2:] == ["completed", "2", "0.1235", "0.5000", "71", "s", "$1.50", trial.job.name]


def test_a_terminal_gets_long_values_in_several_lines_and_no_number_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_a_screen(monkeypatch)
    found, results = results_of(WIDE)
    print_results(found, results, "loss", "lower", as_json=False)
    printed = "\n".join(screen.lines)
    assert max(map(len, screen.lines)) < 120  # names and values have 24 letters each
    assert "…" not in printed
    for text in ("completed", "0.1235", "0.5000", "$1.50", "[/x]"):
        assert text in printed


def test_runs_that_a_terminal_has_no_room_for_are_compared_in_several_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_a_screen(monkeypatch)
    names = [f"digits-{number:06}" for number in range(9)]
    print_columns(["", *names], [["loss of a constant prediction", *["0.123456"] * 9]], left=names, in_parts=True)
    lines = screen.lines
    assert max(map(len, lines)) <= 80
    assert [name for line in lines for name in line.split() if name in names] == names
    assert sum(line.count("0.123456") for line in lines) == 9


def test_runs_are_compared_in_a_pipe_with_whole_names() -> None:
    began = {
        "v": 2, "t": 1.0, "s": 0.0, "kind": "run_started", "subnets": 2, "rounds": 2, "target": None, "parameters": 9,
        "resumed_at": 0, "run_dir": "x", "dashboard": "",
    }  # fmt: skip
    names = [f"trial-of-a-long-sweep-{number}" for number in range(6)]
    for name in names:
        Path("runs", name).mkdir(parents=True)
        event = {**began, "run": name, "job": {"name": name, "data": {"name": f"[/{name}]"}}}
        Path("runs", name, "events.jsonl").write_text(json.dumps(event) + "\n")
    compared = CliRunner().invoke(app, ["compare", *names])
    assert compared.exit_code == 0, compared.exception
    lines = [line.split() for line in compared.stdout.splitlines()]
    assert names in lines
    assert ["data.name", *(f"[/{name}]" for name in names)] in lines


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
