"""`idletrain sweep --cloud`: trials share the machines of one fleet, and go on where their head was lost."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from rehearsal import RECORD, Sandbox

from idletrain.cli.cloud_records import named_prefix, stored_results
from idletrain.cli.cloud_sweep import CloudSweep
from idletrain.cloud import record
from idletrain.cloud.aws.account import Account
from idletrain.job_file import parse_job
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix
from idletrain.sweeps.grid import SweepTrial, Varied, trials
from idletrain.sweeps.trial_results import SweepResult

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


def ordered(trials: list[SweepTrial], **changes: Any) -> CloudSweep:
    settings = {"name": "dusk", "budget_usd": None, "watched": "loss", "better": "lower", "prune": False, **changes}
    return CloudSweep(trials=trials, **settings)


class SweepProcess:
    """`idletrain sweep --cloud sandbox` as a process, and what its head stores."""

    def __init__(self, cloud: Sandbox, account: Account, name: str, folder: Path) -> None:
        (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "name": name}))
        self._folder, self._out = folder, folder / f"out-{time.monotonic_ns()}"
        self.environment = {**os.environ, **cloud.environment, "XDG_STATE_HOME": str(folder / "state")}
        self.name, self.prefix = name, named_prefix(account, name)
        values = ",".join(map(str, VALUES))
        command = [*IDLETRAIN, "sweep", "job.yaml", "--set", f"{RATES}={values}", "--cloud", "sandbox"]
        self.process = warm.start(command, self.environment, self._out, folder)

    @property
    def output(self) -> str:
        return self._out.read_text()

    def results(self) -> list[SweepResult]:
        return list(stored_results(self.prefix, found(self.name)).values())

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
def sweep(cloud: Sandbox, account: Account, tmp_path: Path) -> Iterator[Callable[[str], SweepProcess]]:
    processes: list[SweepProcess] = []

    def start(name: str) -> SweepProcess:
        processes.append(SweepProcess(cloud, account, name, tmp_path))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


def test_trials_share_one_fleet_and_go_on_behind_a_lost_head(
    sweep: Callable[[str], SweepProcess], cloud: Sandbox, account: Account, tmp_path: Path
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
    for name in names:  # a rehearsal's bucket ends with it
        assert (tmp_path / "runs" / name / "model.safetensors").stat().st_size > 0


def _rounds(prefix: S3Prefix) -> list[dict[str, Any]]:
    return [event for event in s3_mirror.events(prefix) if event["kind"] == "round_committed"]


def test_a_sweep_that_runs_is_followed_by_the_same_command_and_ended_by_down(
    sweep: Callable[[str], SweepProcess], cloud: Sandbox, account: Account
) -> None:
    first = sweep("noon")
    first.until("a round", lambda: any(result.state == "running" for result in first.results()))
    first.end()  # its head goes on
    second = sweep("noon")
    second.until("its first line", lambda: "sweep noon runs already" in second.output)
    (head,) = (instance for instance in account.instances("noon") if instance.role == "head")
    code, said = second.call("down", "noon")
    assert (code, "nothing of it is left" in said) == (0, True), said
    assert second.process.wait(PATIENCE_SECONDS) == 1
    assert "trials did not end: the same command goes on with them" in second.output
    assert head.id not in {instance.id for instance in account.instances("noon")}
    assert not any(result.state == "completed" for result in second.results()[1:])


def test_a_run_s_name_is_not_taken_for_a_sweep(
    sweep: Callable[[str], SweepProcess], cloud: Sandbox, account: Account
) -> None:
    record.claim(named_prefix(account, "taken"), RECORD)
    refused = sweep("taken")
    assert refused.process.wait(PATIENCE_SECONDS) == 2
    assert "name: a run night, which is no sweep, is in s3://" in refused.output
    assert json.loads(named_prefix(account, "taken").get(record.RUN_RECORD_KEY).content)["created"] == 1.0
    assert not cloud.inventory()["processes"]


def test_machines_are_for_the_largest_trial_and_live_for_all() -> None:
    tree = {**JOB, "nodes": {**JOB["nodes"], "max_duration": "1h"}}
    several = trials(tree, [Varied("training.subnets", (2, 6, 4))])
    job = ordered(several, budget_usd=3.0).job
    assert (job.name, job.training.subnets) == ("dusk", 6)
    assert (job.nodes.max_duration, job.nodes.budget_usd) == (3 * 3600.0, 3.0)
    assert ordered(found()).job.nodes.budget_usd is None


def test_what_trials_share_cannot_differ() -> None:
    varied = trials(JOB, [Varied("nodes.count", (1, 2))])
    assert ordered(varied).faults(parallel=1) == [
        "--set: nodes.count is of the machines, which all trials in a cloud share; set it in the job"
    ]
    assert ordered(found()).faults(parallel=2) == [
        "--parallel: trials in a cloud share its machines and train in turn; leave it out"
    ]
    assert ordered(found()).faults(parallel=1) == []


def test_an_order_is_read_back_as_it_was_written(prefix: S3Prefix) -> None:
    from dataclasses import replace

    from idletrain.sweeps.grid import from_plain

    run = replace(RECORD, sweep=ordered(found()).order)
    record.claim(prefix, run)
    again = record.read(prefix)
    assert again == run
    assert again.sweep
    jobs = [trial.job for trial in from_plain(again.sweep.trials)]
    assert [job.training.optimizer for job in jobs] == [trial.job.training.optimizer for trial in found()]
    assert jobs[0].training.model_fields_set == parse_job(found()[0].job.as_tree()).training.model_fields_set
