"""A run's plan and its start, without machines that do anything; whole runs are in tests/chaos."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rehearsal import RECORD, Sandbox

from idletrain.cloud import follow, launcher, leader_lease, machine_log, record, teardown
from idletrain.cloud.aws.account import Account
from idletrain.cloud.machines import run_tags
from idletrain.cloud.record import SweepOrder
from idletrain.errors import JobError, RunError
from idletrain.job import Job
from idletrain.job_file import parse_job
from idletrain.observe.cost import EXTRAS_USD_PER_HOUR
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

RARE = "c8a.large"  # not in all zones


def job(**sections: Any) -> Job:
    tree: dict[str, Any] = {
        "name": "night",
        "model": {"factory": "idletrain.nn.models:mlp", "args": {"widths": [64, 16, 10]}},
        "data": {"name": "digits"},
    }
    return parse_job({**tree, **sections})


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("market")


def test_a_plan_names_pools_of_the_job_s_market(account: Account, cache: Path) -> None:
    for policy, markets in (("spot", {"spot"}), ("on-demand", {"on-demand"}), ("auto", {"spot", "on-demand"})):
        plan = launcher.make_spot_plan(job(nodes={"spot_policy": policy}), account, cache)
        assert {offer.market for offer in plan.offers} == markets
        assert len({offer.zone for offer in plan.offers}) == 3


@pytest.mark.parametrize(
    ("nodes", "arguments"),
    [
        ({"budget_usd": 0.01}, r"nodes\.budget_usd: \$0\.01 does not pay 15 min, the least"),
        ({"memory": "90000GiB"}, r"nodes\.memory: no machine has .*the nearest is"),
        ({"max_price": 0.0001}, r"nodes\.max_price: is below the price of every suitable machine"),
    ],
)
def test_what_no_machine_or_budget_can_do_is_refused_with_the_nearest(
    nodes: dict[str, Any], arguments: str, account: Account, cache: Path
) -> None:
    with pytest.raises(JobError, match=arguments):
        launcher.make_spot_plan(job(nodes=nodes), account, cache)


def test_a_head_that_is_no_type_is_refused(account: Account, cache: Path) -> None:
    with pytest.raises(JobError, match=r"cloud\.head: there is no machine type m9\.odd"):
        launcher.make_spot_plan(job(cloud={"head": "m9.odd"}), account, cache)


def test_the_head_stands_where_the_best_nodes_do_among_the_zones_that_offer_it(account: Account, cache: Path) -> None:
    plan = launcher.make_spot_plan(job(), account, cache)
    zones = [pool.zone for pool in plan.heads]
    assert zones == list(dict.fromkeys(offer.zone for offer in plan.offers))
    assert len(zones) == 3
    rare = launcher.make_spot_plan(job(cloud={"head": RARE}), account, cache)
    assert [pool.zone for pool in rare.heads] == [zone for zone in zones if zone in account.zones_of(RARE)]
    assert 0 < len(rare.heads) < 3


def test_data_that_machines_may_not_read_are_refused() -> None:
    def faults(**changes: Any) -> list[str]:
        return launcher.data_faults(job(**changes), ("s3://ours/data/", "s3://ours/runs/"))

    elsewhere = {"train": ["s3://ours/data/x.npy", "s3://theirs/y.npy"], "test": "s3://ours/other/test.npz"}
    assert [fault.split(";")[0] for fault in faults(data=elsewhere)] == [
        "data: machines may not read s3://theirs/y.npy",
        "data: machines may not read s3://ours/other/test.npz",
    ]
    assert faults(data=elsewhere, cloud={"profiles": ["mine", "yours"]}) == []
    assert faults(data={"train": "s3://ours/data/train.npz", "test": "here.npz"}) == []


def test_machines_may_live_as_long_as_the_budget_pays_for_them(account: Account, cache: Path) -> None:
    free = launcher.make_spot_plan(job(), account, cache).quote
    worst = free.worst_usd_per_hour
    bound = launcher.make_spot_plan(job(nodes={"budget_usd": 2 * worst}), account, cache).quote
    assert free.deadline_seconds == job().nodes.max_duration
    assert bound.deadline_seconds == pytest.approx(2 * 3600, abs=1)


def test_a_start_that_fails_half_way_takes_down_what_it_made(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    plan = launcher.make_spot_plan(job(), account, cache)
    cloud.ask("POST", "fault", action="RunInstances", code="UnauthorizedOperation", status=403, times=1)
    with pytest.raises(RunError, match="AWS refuses RunInstances: UnauthorizedOperation"):
        launcher.start(plan, account, prefix, image="idletrain", resume=False)
    assert not any(cloud.inventory().values())
    assert record.read(prefix).state == "ended"


def test_a_start_that_fails_and_cannot_take_down_what_it_made_tells_both(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "LISTED_SECONDS", 0.5)
    plan = launcher.make_spot_plan(job(), account, cache)
    for action, times in (("RunInstances", 1), ("DeleteLaunchTemplate", 1)):
        cloud.ask("POST", "fault", action=action, code="UnauthorizedOperation", status=403, times=times)
    with pytest.raises(RunError) as caught:
        launcher.start(plan, account, prefix, image="idletrain", resume=False)
    assert "AWS refuses RunInstances: UnauthorizedOperation" in str(caught.value)
    (template,) = cloud.inventory()["launch_templates"]
    assert f"run night still has {template} (AWS refuses DeleteLaunchTemplate" in str(caught.value)
    teardown.take_down(account, "night", prefix)


def test_a_run_that_is_ended_while_it_is_launched_leaves_nothing(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    def end(what: str) -> None:
        if what == "template":
            record.update(prefix, state="ended")

    plan = launcher.make_spot_plan(job(), account, cache)
    with pytest.raises(RunError, match="run night was ended while it was launched; start it again with --resume"):
        launcher.start(plan, account, prefix, image="idletrain", resume=False, reached=end)
    assert not any(cloud.inventory().values())


def test_a_run_whose_head_is_at_work_is_not_resumed(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    plan = launcher.make_spot_plan(job(), account, cache)
    started = launcher.start(plan, account, prefix, image="idletrain", resume=False)
    (head,) = [m.id for m in account.instances("night") if m.role == "head"]
    with pytest.raises(JobError, match=rf"name: run night is at work; follow it with `idletrain logs {prefix.url}"):
        launcher.start(plan, account, prefix, image="idletrain", resume=True)
    assert head in [m.id for m in account.instances("night")]
    assert record.read(prefix).head_session == started.head_session
    cloud.ec2.terminate_instances(InstanceIds=[head])
    resumed = launcher.start(plan, account, prefix, image="idletrain", resume=True)
    assert resumed.generation == 1
    assert resumed.events_after == follow.last_events(prefix) != ""  # its machines' ends are of the session before
    teardown.take_down(account, "night", prefix)


def test_a_head_that_renews_its_lease_is_at_work_whatever_its_clock_says(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BOOT_SECONDS", 0.0)
    monkeypatch.setattr(leader_lease, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(leader_lease, "LEASE_POLL_SECONDS", 0.05)
    plan = launcher.make_spot_plan(job(), account, cache)
    launcher.start(plan, account, prefix, image="idletrain", resume=False)
    renewed, hour = iter(range(1000)), 3600

    def renew(_seconds: float) -> None:
        content = {"holder": "i-1", "renewed": time.time() - hour + next(renewed)}
        prefix.put(leader_lease.LEADER_LEASE_KEY, json.dumps(content).encode())

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(leader_lease, "time", SimpleNamespace(sleep=renew, monotonic=time.monotonic))
        with pytest.raises(JobError, match="name: run night is at work"):
            launcher.start(plan, account, prefix, image="idletrain", resume=True, report=said.append)
    assert said == ["looking whether the run's head is at work"]
    assert launcher.start(plan, account, prefix, image="idletrain", resume=True).generation == 1
    teardown.take_down(account, "night", prefix)


def test_a_name_that_is_taken_makes_nothing(cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path) -> None:
    plan = launcher.make_spot_plan(job(), account, cache)
    prefix.put(record.RUN_RECORD_KEY, b"{}")
    with pytest.raises(JobError, match="name: run night exists"):
        launcher.start(plan, account, prefix, image="idletrain", resume=False)
    assert not any(cloud.inventory().values())


def test_a_run_of_the_same_name_elsewhere_is_left_alone(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    plan = launcher.make_spot_plan(job(), account, cache)
    started = launcher.start(plan, account, prefix, image="idletrain", resume=False)
    with pytest.raises(JobError, match=rf"name: a run night is there already, in {prefix.url}; choose another --name"):
        launcher.start(plan, account, prefix.below("mine"), image="idletrain", resume=False)
    (head,) = [m for m in account.instances("night") if m.role == "head"]  # which may have launched nodes by now
    assert (head.state in ("pending", "running"), head.head_session) == (True, started.head_session)
    teardown.take_down(account, "night", prefix)


def test_what_the_last_sitting_says_against_going_on_is_known_before_machines_are_made(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    began = job(training={"rounds": 5})
    record.claim(prefix, replace(RECORD, job=began.model_dump(mode="json")))
    ended = {
        "kind": "run_ended",
        "t": 9.0,
        "s": 9.0,
        "status": "completed",
        "rounds": 5,
        "params_sha256": "",
        "run_dir": "",
    }
    s3_mirror.append_events(prefix, [{**ended, "t": time.time()}])
    for changed, fault in (
        (began, r"training\.rounds: run night is complete after 5 rounds; ask for more to go on"),
        (job(training={"rounds": 6, "seed": 1}), r"training\.seed: 1 is not what the run began with, 0"),
        (
            job(training={"rounds": 6, "exchange": {"push": "int8"}}),
            r"training\.exchange\.push: int8 is not what the run began with, fp32",
        ),
    ):
        plan = launcher.make_spot_plan(changed, account, cache)
        with pytest.raises(JobError, match=fault):
            launcher.start(plan, account, prefix, image="idletrain", resume=True)
    assert not any(cloud.inventory().values())


def test_a_run_does_not_go_on_as_a_sweep_nor_a_sweep_as_a_run(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    order = SweepOrder(trials=[], watched="loss", better="lower", prune=False)
    plan = launcher.make_spot_plan(job(), account, cache)
    prefix = S3Prefix.at(f"{prefix.url}night", prefix.client)
    record.claim(prefix.beside("tuning"), replace(RECORD, run="tuning", sweep=order))
    for before, now, fault in (
        ({}, order, "name: night is a run; choose another --name"),
        ({"sweep": order}, None, "name: night is a sweep; choose another --name"),
        ({"of_sweep": "tuning"}, None, "name: night is a trial of the sweep tuning, which goes on; wait for its end"),
    ):
        previous = replace(RECORD, job=job().model_dump(mode="json"), **before)
        prefix.put(record.RUN_RECORD_KEY, previous.as_json())
        with pytest.raises(JobError, match=fault):
            launcher.start(replace(plan, sweep=now), account, prefix, image="idletrain", resume=True)
        assert record.read(prefix) == previous
    assert not any(cloud.inventory().values())


def test_machines_that_would_end_before_they_train_are_refused(account: Account, cache: Path) -> None:
    with pytest.raises(JobError, match=r"nodes\.max_duration: machines would live for 5 min, of which the last 7"):
        launcher.make_spot_plan(job(nodes={"max_duration": "5m"}), account, cache)


def test_what_was_never_started_cannot_be_resumed(account: Account, prefix: S3Prefix, cache: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        launcher.start(launcher.make_spot_plan(job(), account, cache), account, prefix, image="idletrain", resume=True)


def test_what_was_spent_before_shortens_the_budget_of_a_run_that_is_resumed(
    cloud: Sandbox, account: Account, prefix: S3Prefix, cache: Path
) -> None:
    worst = launcher.make_spot_plan(job(), account, cache).quote.worst_usd_per_hour
    tight = job(nodes={"budget_usd": 4.5 * worst})
    tags = run_tags("night", prefix.url, "arn:me", "0", time.time() - 7200, time.time())
    record.claim(
        prefix, replace(RECORD, job=tight.model_dump(mode="json"), generation=2, created=time.time(), tags=tags)
    )
    hour, now = 3600.0, time.time()
    fields = {"role": "worker", "type": "m5.large", "zone": "eu-west-1a", "market": "spot"}
    fields |= {"usd_per_hour": 3 * worst - EXTRAS_USD_PER_HOUR, "on_demand_usd_per_hour": None}
    launched = {"kind": "instance_launched", "t": now - 2 * hour, "s": 0.0, "instance": "i-1", **fields}
    last = {
        "kind": "waiting",
        "reason": "",
        "t": now - hour - machine_log.UNSEEN_CLOSES_SECONDS,
        "s": 1.0,
    }  # and then its head died
    s3_mirror.append_events(prefix, [launched, last])
    spent = launcher.spent_usd(account, prefix, "night")
    assert spent == pytest.approx(3 * worst)
    plan = launcher.make_spot_plan(tight, account, cache, spent)
    assert plan.quote.deadline_seconds == pytest.approx(1.5 * hour, abs=1)
    started = launcher.start(plan, account, prefix, image="idletrain", resume=True)
    assert started.generation == 3
    assert started.spent_usd == pytest.approx(3 * worst)
    assert started.deadline == pytest.approx(time.time() + 1.5 * hour, abs=30)
    assert float(started.tags["idletrain:deadline"]) == int(started.deadline)
    template = record.read(prefix).site.template
    version = account.ec2.describe_launch_template_versions(LaunchTemplateId=template)["LaunchTemplateVersions"][0]
    booted = base64.b64decode(version["LaunchTemplateData"]["UserData"]).decode()
    assert booted.splitlines()[2] == f"deadline={int(started.deadline)}"  # each machine's own, whoever is dead
    teardown.take_down(account, "night", prefix)
    with pytest.raises(JobError, match=r"nodes\.budget_usd: \$.* are spent, and the rest does not pay another 15 min"):
        launcher.make_spot_plan(tight, account, cache, 4.3 * worst)
