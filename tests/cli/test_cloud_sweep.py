"""`idletrain sweep --cloud`: trials share the machines of one fleet, and go on where their head was lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
import yaml
from rehearsal import RECORD, Sandbox

from idletrain.cli.cloud_records import named_prefix, stored_results
from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix
from idletrain.sweeps.grid import SweepTrial, Varied, trials
from idletrain.sweeps.trial_results import ResultsFile, SweepResult

PATIENCE_SECONDS = 120.0
IDLETRAIN = (sys.executable, "-m", "idletrain")
RATES = "training.optimizer.lr"
VALUES = (0.05, 0.1, 0.2)
JOB: dict[str, Any] = {
    "name": "dusk",
    "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 256, 10]}},
    "data": {"name": "digits"},
    "training": {
        "method": "ist",
        "subnets": 2,
        "local_steps": 150,
        "rounds": 40,
        "optimizer": {"name": "sgd", "lr": 0.1},
    },
    "nodes": {"count": 2, "memory": "1GiB"},
}


def found(name: str = "dusk") -> list[SweepTrial]:
    return trials({**JOB, "name": name}, [Varied(RATES, VALUES)])


class SweepProcess:
    """`idletrain sweep --cloud sandbox` as a process, and what its head stores."""

    def __init__(
        self, cloud: Sandbox, account: Account, name: str, values: str, folder: Path, *, inside: bool = True
    ) -> None:
        (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "name": name}))
        self._folder, self._out = folder, folder / f"out-{time.monotonic_ns()}"
        own = cloud.environment  # without it the command starts a rehearsal cloud of its own
        others = {name: value for name, value in os.environ.items() if name not in own}
        self.environment = {**others, **(own if inside else {}), "XDG_STATE_HOME": str(folder / "state")}
        self.name, self.prefix = name, named_prefix(account, name)
        command = [*IDLETRAIN, "sweep", "job.yaml", "--set", f"{RATES}={values}", "--cloud", "sandbox"]
        self.process = warm.start(command, self.environment, self._out, folder)

    @property
    def output(self) -> str:
        return self._out.read_text()

    def results(self) -> list[SweepResult]:
        return list(stored_results(self.prefix, [trial.job.name for trial in found(self.name)]).values())

    def until(self, what: str, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"{what} did not come: {self.output}"
            time.sleep(0.1)

    def call(self, *arguments: str) -> tuple[int, str]:
        done = warm.run(
            [*IDLETRAIN, *arguments, "--cloud", "sandbox"], folder=self._folder, environment=self.environment
        )
        return done.returncode, done.stdout + done.stderr

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sweep(cloud: Sandbox, account: Account, tmp_path: Path) -> Iterator[Callable[..., SweepProcess]]:
    processes: list[SweepProcess] = []

    def start(name: str, values: str = ",".join(map(str, VALUES)), *, inside: bool = True) -> SweepProcess:
        processes.append(SweepProcess(cloud, account, name, values, tmp_path, inside=inside))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def test_trials_share_one_fleet_and_go_on_behind_a_lost_head(
    sweep: Callable[..., SweepProcess], cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    first, names = sweep("dusk"), [trial.job.name for trial in found()]
    second_prefix = named_prefix(account, names[1])
    first.until("the second trial's first round", lambda: _rounds(second_prefix))
    (head,) = (instance.id for instance in account.instances("dusk") if instance.role == "head")
    account.terminate([head])
    assert first.process.wait(PATIENCE_SECONDS) == 1, first.output
    assert f"its head {head} is gone" in first.output
    assert "the command that began the sweep dusk goes on with it" in first.output
    _, table = first.call("status", "dusk")
    assert f"dusk: interrupted: its head {head} is gone" in table
    assert [line.split()[1] for line in table.splitlines() if "dusk-" in line] == ["completed", "running", "waiting"]
    _, runs = first.call("runs")
    assert [line.split()[2] for line in runs.splitlines() if line.startswith("dusk ")] == ["1/3"]
    for command in ("down", "cost"):
        code, said = first.call(command, names[1])
        assert (code, f"{names[1]} is a trial of the sweep dusk" in said) == (2, True), said

    second = sweep("dusk")
    assert second.process.wait(PATIENCE_SECONDS) == 0, second.output
    assert "1 of 3 trials have ended before" in second.output
    assert [result.state for result in second.results()] == ["completed"] * 3
    assert [e["resumed_at"] > 0 for e in s3_mirror.events(second_prefix) if e["kind"] == "run_started"] == [False, True]
    launched = [e["role"] for e in s3_mirror.events(second.prefix) if e["kind"] == "instance_launched"]
    assert sorted(launched) == ["head", "head", *["worker"] * 4]  # each head's two nodes train all of its trials
    assert record.read(second_prefix).state == "ended"
    assert not cloud.inventory()["processes"]
    here = ResultsFile(tmp_path / "runs" / "dusk.sweep.json").read(names)
    assert [bool(result.values) for result in here.values()] == [True] * 3
    again = sweep("dusk")
    assert again.process.wait(PATIENCE_SECONDS) == 0, again.output
    assert "all trials of dusk have ended before; give the sweep another --name" in again.output
    assert "starting the head" not in again.output
    for name in names:  # a rehearsal's bucket ends with it
        assert (tmp_path / "runs" / name / "model.safetensors").stat().st_size > 0


def _rounds(prefix: S3Prefix) -> list[dict[str, Any]]:
    return [event for event in s3_mirror.events(prefix) if event["kind"] == "round_committed"]


def test_a_sweep_that_runs_is_followed_by_the_same_command_and_ended_by_down(
    sweep: Callable[..., SweepProcess], cloud: Sandbox, account: Account
) -> None:
    first = sweep("noon")
    first.until("a round", lambda: any(result.state == "running" for result in first.results()))
    first.end()  # its head goes on
    second = sweep("noon")
    second.until("its first line", lambda: "sweep noon runs already" in second.output)
    (head,) = (instance for instance in account.instances("noon") if instance.role == "head")
    other = sweep("noon", "0.3")
    assert other.process.wait(PATIENCE_SECONDS) == 2, other.output
    assert "sweep noon runs with other trials or settings" in other.output
    code, said = second.call("down", "noon")
    assert (code, "nothing of it is left" in said) == (0, True), said
    assert second.process.wait(PATIENCE_SECONDS) == 1
    assert "trials did not end: the same command goes on with them" in second.output
    assert head.id not in {instance.id for instance in account.instances("noon")}
    assert [result.state for result in second.results()][1:] == ["waiting", "waiting"]


def test_a_run_s_name_is_not_taken_for_a_sweep(
    sweep: Callable[..., SweepProcess], cloud: Sandbox, account: Account
) -> None:
    record.claim(named_prefix(account, "taken"), RECORD)
    refused = sweep("taken")
    assert refused.process.wait(PATIENCE_SECONDS) == 2
    assert "holds a run, which is no sweep; name the sweep with --name" in refused.output
    assert json.loads(named_prefix(account, "taken").get(record.RUN_RECORD_KEY).content)["created"] == 1.0
    assert not cloud.inventory()["processes"]


def test_ctrl_c_ends_a_rehearsal_of_its_own_and_its_trials_begin_again(
    sweep: Callable[..., SweepProcess], cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    first = sweep("alone", inside=False)
    first.until("the second trial", lambda: "-1b87dd begins" in first.output)
    began = psutil.Process(first.process.pid).children(recursive=True)
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(PATIENCE_SECONDS) == 130, first.output
    assert "stopped; the same command goes on with the trials that have not ended" in first.output
    assert not psutil.wait_procs(began, timeout=20)[1]
    kept = ResultsFile(tmp_path / "runs" / "alone.sweep.json").read([trial.job.name for trial in found("alone")])
    assert next((result.state, bool(result.values)) for result in kept.values()) == ("completed", True)
    assert not any(result.values or result.began for result in list(kept.values())[1:])
    assert len([path for path in (tmp_path / "runs").iterdir() if path.is_dir()]) == 1


def test_what_costs_money_is_asked_for_once_the_plan_is_shown(
    sweep: Callable[..., SweepProcess], cloud: Sandbox, account: Account, tmp_path: Path
) -> None:
    tree = {**JOB, "name": "dear", "cloud": {"region": cloud.region, "image": "idletrain"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    environment = {**os.environ, **cloud.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [*IDLETRAIN, "sweep", "job.yaml", "--set", "training.seed=1,2", "--cloud", "aws", "--budget", "5usd"]
    declined = warm.run(command, folder=tmp_path, given="n\n", environment=environment)
    assert "2 trials, for $5.00 at most. Start? [y/N]" in declined.stdout, declined.stderr
    assert "/h" in declined.stdout.partition("2 trials")[0]
    assert declined.returncode == 130
    assert not any(cloud.inventory().values())
    assert not named_prefix(account, "dear").names()
