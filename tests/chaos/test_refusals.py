"""A cloud that refuses, for a moment or for good, while a run trains in it: the run goes on and says why it waits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from rehearsal import Sandbox

from idletrain.cloud.aws.account import Account
from idletrain.cloud.machines import RUNNING_STATES
from idletrain.job import Job
from idletrain.job_file import parse_job

from .helpers import PATIENCE_SECONDS, train_alone, until
from .spot_run import Launcher, job_tree

DENIED = {"code": "UnauthorizedOperation", "status": 403, "message": "You are not authorized to perform this."}
# What replacements are answered, each list for one node that is taken, in the order of the calls.
REPLACEMENTS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"mode": "empty", "status": 503}, {"mode": "html", "status": 500}, {"mode": "drop-reply"}),
    ({"code": "RequestLimitExceeded", "status": 503}, {"code": "RequestExpired"}, {"code": "ExpiredToken"}),
    (DENIED,),  # the spot pools are skipped for a while: an on-demand node comes
    ({"code": "InsufficientInstanceCapacity", "status": 500},),  # so are the others: the first are asked again
)
DENIED_AT_THE_END, DENIALS = ("DeleteLaunchTemplate", "TerminateInstances"), 99
REFUSALS = ("503: Service Unavailable", "not what answers", "RequestLimitExceeded", "RequestExpired", "ExpiredToken")


@dataclass
class Refused:
    """A run whose replacements were refused, as it was found."""

    code: int
    last: dict[str, Any]
    output: str
    events: list[dict[str, Any]]
    unmet_faults: list[Any]
    denied: dict[str, int]
    markets: list[str]
    left: dict[str, list[Any]]
    job: Job

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.events if event["kind"] == "waiting"]


@pytest.fixture(scope="module")
def refused(running: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refused]:
    """A run of two nodes, of which one is taken again and again, and whose end the cloud refuses in part."""
    tree = job_tree("refused", rounds=60)
    tree["training"] |= {"subnets": 2, "local_steps": 15}
    tree["nodes"] = {"count": 2, "memory": "1GiB", "spot_policy": "auto"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        run = Launcher(running, Account(), tree, tmp_path_factory.mktemp("refused"))
        try:
            run.until("two workers", lambda: len(run.workers()) == 2)
            for faults in REPLACEMENTS:
                take_one(run, faults)
            unmet = running.ask("GET", "faults")
            markets = [i.pool.market for i in run.account.instances("refused", RUNNING_STATES) if i.role == "worker"]
            for action in DENIED_AT_THE_END:
                running.ask("POST", "fault", action=action, times=DENIALS, **DENIED)
            code = run.process.wait(2 * PATIENCE_SECONDS)
            until("the head's end", lambda: not running.inventory()["processes"])
            left = running.inventory()
            denied = {fault["action"]: DENIALS - fault["times"] for fault in running.ask("GET", "faults")}
            output = run.output()
            yield Refused(code, run.last(), output, run.events(), unmet, denied, markets, left, parse_job(tree))
        finally:
            run.end()
            drain_faults(running)
    running.clean()


def take_one(run: Launcher, faults: tuple[dict[str, Any], ...]) -> None:
    """Take a spot node while another trains; wait until each fault was met and whatever replaces it has joined."""
    spot = {i.id for i in run.account.instances(run.name, RUNNING_STATES) if i.pool.market == "spot"}
    joined = len(run.events("worker_joined"))
    for fault in faults:
        run.cloud.ask("POST", "fault", action="CreateFleet", **fault)
    run.cloud.ask("POST", "take", instance=min(spot & run.workers().keys()))
    run.until("the faults", lambda: run.cloud.ask("GET", "faults") == [])
    run.until("a replacement", lambda: len(run.events("worker_joined")) > joined and len(run.workers()) == 2)


def drain_faults(cloud: Sandbox) -> None:
    calls: dict[str, Any] = {
        "CreateFleet": lambda: cloud.ec2.create_fleet(
            LaunchTemplateConfigs=[], TargetCapacitySpecification={"TotalTargetCapacity": 1}
        ),
        "DeleteLaunchTemplate": lambda: cloud.ec2.delete_launch_template(LaunchTemplateId="lt-00000000000000000"),
        "TerminateInstances": lambda: cloud.ec2.terminate_instances(InstanceIds=["i-00000000000000000"]),
    }
    while faults := cloud.ask("GET", "faults"):
        with contextlib.suppress(Exception):
            calls[faults[0]["action"]]()


def test_the_run_completes_with_the_bits_of_an_undisturbed_one(refused: Refused) -> None:
    assert refused.code == 0, refused.output
    assert refused.last["status"] == "completed"
    assert refused.last["params_sha256"] == train_alone(refused.job)[-1]


def test_every_refusal_happened_and_what_passes_was_made_good(refused: Refused) -> None:
    assert refused.unmet_faults == []
    left = [event for event in refused.events if event["kind"] == "worker_left" and event["cause"] != "end"]
    assert len(left) == len(REPLACEMENTS)
    assert sorted(refused.markets) == ["on-demand", "spot"]  # one replaced a spot node while spot pools were skipped


def test_the_run_says_what_it_waits_for_in_the_cloud_s_own_words(refused: Refused) -> None:
    reasons = refused.reasons()
    denied = "AWS refuses CreateFleet: UnauthorizedOperation: You are not authorized to perform this."
    for text in (*REFUSALS, denied, "no capacity for a node"):
        assert any(text in reason for reason in reasons), (text, reasons)
    assert denied in refused.output  # the command that follows the run shows it


def test_a_completed_run_names_what_could_not_be_ended_and_how_to_end_it(refused: Refused) -> None:
    assert all(refused.denied[action] for action in DENIED_AT_THE_END), refused.denied
    assert (refused.last["status"], refused.code) == ("completed", 0)
    (template,) = refused.left["launch_templates"]
    assert f"run refused still has {template}" in refused.output
    assert "AWS refuses DeleteLaunchTemplate: UnauthorizedOperation" in refused.output
    assert "repeat `idletrain down refused --region eu-west-1`" in refused.output
    assert "--resume" not in refused.output
    assert json.dumps(refused.left["instances"]) == "[]"  # machines end by themselves once their run is over
