"""Nothing is left, and what is left over is found."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rehearsal import RECORD, Sandbox, eventually

from idletrain.cloud import leader_lease, machine_log, record, teardown
from idletrain.cloud.aws import requests, run_resources
from idletrain.cloud.aws.account import Account
from idletrain.cloud.aws.patience import Patience
from idletrain.cloud.machines import Instance, LaunchSite, LeftoverResource, NodeRequest, Pool, run_tags
from idletrain.cloud.teardown import Orphan
from idletrain.errors import RunError
from idletrain.observe.cost import accrued
from idletrain.rounds.durable import s3_mirror
from idletrain.storage import S3Prefix

NOW = 1e9


def tags(run: str, age: float = 3600.0, left: float = 3600.0) -> dict[str, str]:
    return run_tags(run, f"s3://b/{run}/", "arn:me", "0", NOW - age, NOW + left)


def machine(run: str, role: str, **times: float) -> Instance:
    marked = {**tags(run, **times), "idletrain:role": role}
    return Instance(f"i-{run}-{role}", "running", Pool("spot", "m5.large", "a"), NOW, "", marked, "")


def test_a_run_with_a_head_before_its_deadline_is_left_alone() -> None:
    assert teardown.orphans([machine("night", "head"), machine("night", "worker")], [], NOW, 600) == []


def test_a_run_without_a_head_is_over_once_a_head_could_have_come() -> None:
    group = LeftoverResource("group", "sg-1", tags("night"))
    expected = [Orphan("night", "s3://b/night/", "it has no head")]
    assert teardown.orphans([machine("night", "worker")], [], NOW, 600) == expected
    assert teardown.orphans([], [group], NOW, 600) == expected
    assert teardown.orphans([], [LeftoverResource("group", "sg-1", tags("night", age=60))], NOW, 600) == []


def test_behind_its_deadline_a_run_is_over_with_or_without_a_head() -> None:
    assert teardown.orphans([machine("night", "head", left=-1)], [], NOW, 600) == [
        Orphan("night", "s3://b/night/", "its deadline has passed")
    ]


def test_each_run_is_named_once_and_judged_by_itself() -> None:
    there = [machine("a", "head"), machine("a", "worker"), machine("b", "worker"), machine("b", "worker")]
    assert [orphan.run for orphan in teardown.orphans(there, [], NOW, 600)] == ["b"]


def test_a_run_whose_head_leads_no_more_is_over_although_its_machine_is_there() -> None:
    there = [machine("night", "head"), machine("night", "worker")]
    assert teardown.orphans(there, [], NOW, 600, {"night": "it has ended", "day": "it has ended"}) == [
        Orphan("night", "s3://b/night/", "it has ended")
    ]
    assert teardown.orphans([machine("night", "head", age=60)], [], NOW, 600, {"night": "it has ended"}) == []


def test_what_lies_below_its_prefix_tells_whether_a_head_leads(prefix: S3Prefix) -> None:
    account = SimpleNamespace(s3=prefix.client, explained=contextlib.nullcontext)

    def faults(now: float = NOW) -> dict[str, str]:
        head = machine("night", "head")
        here = replace(head, tags={**head.tags, "idletrain:prefix": prefix.url})
        return teardown.over(account, [here, machine("night", "worker")], now)  # type: ignore[arg-type]

    assert faults() == {"night": "its record is gone"}
    record.claim(prefix, RECORD)
    assert faults() == {}
    assert faults(NOW + teardown.HEAD_SILENCE_SECONDS + 1) == {"night": "its head has not renewed its lease for 30 min"}
    prefix.put(
        leader_lease.LEADER_LEASE_KEY,
        json.dumps({"holder": "i-1", "renewed": NOW + teardown.HEAD_SILENCE_SECONDS}).encode(),
    )
    assert faults(NOW + teardown.HEAD_SILENCE_SECONDS + 1) == {}
    record.update(prefix, state="ended")
    assert faults() == {"night": "it has ended"}
    prefix.put(record.RUN_RECORD_KEY, b'{"of": "another version"}')
    assert faults() == {}


def test_a_prefix_that_cannot_be_read_ends_no_run(account: Account) -> None:
    assert teardown.over(account, [machine("night", "head")], NOW) == {}  # nobody has this bucket


@pytest.mark.parametrize(
    ("heads", "age", "arguments"),
    [
        ([("running", NOW)], 3600.0, ""),
        ([("terminated", NOW - 60), ("pending", NOW)], 3600.0, ""),
        ([], 60.0, ""),
        ([], 3600.0, "it has no head; go on with --resume"),
        ([("terminated", NOW)], 60.0, "its head i-night-head is gone (Client.User); go on with --resume"),
    ],
)
def test_a_run_without_its_head_is_reported(heads: list[tuple[str, float]], age: float, arguments: str) -> None:
    of_all = [
        replace(machine("night", "head"), state=state, launched_at=at, reason="Client.User") for state, at in heads
    ]
    run = replace(RECORD, created=NOW - age, tags=tags("night"))
    assert teardown.lost_head([*of_all, machine("night", "worker")], run, NOW) == arguments


def test_a_head_of_a_sitting_before_is_not_this_one_s() -> None:
    run = replace(RECORD, created=NOW - 3600, tags=tags("night", age=3600.0))
    before = machine("night", "head", age=7200.0)
    assert teardown.lost_head([before], run, NOW) == "it has no head; go on with --resume"
    assert teardown.lost_head([before, machine("night", "head")], run, NOW) == ""


def marks(run: str) -> dict[str, str]:
    now = time.time()
    return run_tags(run, "s3://none/", "arn:me", "0", now, now + 60)


def make(cloud: Sandbox, account: Account, run: str, tags: dict[str, str] | None = None) -> list[str]:
    """A run's group, template and two machines."""
    marked = tags or marks(run)
    site = account.site(None, gpu=False)
    group = run_resources.make_group(account, run, site.vpc, marked, Patience())
    launch_site = LaunchSite(**{**vars(site), "group": group})
    body = requests.launch_template(run, launch_site, "idletrain-node", "#!/bin/bash\nsleep 60\n", marked)
    launch_site = LaunchSite(
        **{**vars(launch_site), "template": run_resources.make_template(account, body, Patience())}
    )
    pool = Pool("spot", "m5.large", "eu-west-1a")
    outcome = account.start_nodes(launch_site, NodeRequest(pools=(pool,), count=2, attempt="1", tags=marked))
    return sorted(launched.id for launched in outcome.machines)


def test_down_leaves_nothing_and_can_be_repeated(cloud: Sandbox, account: Account) -> None:
    assert len(make(cloud, account, "night-down")) == 2
    teardown.take_down(account, "night-down", None)
    assert not any(cloud.inventory().values())
    teardown.take_down(account, "night-down", None)


def test_the_bill_of_a_run_that_is_taken_down_does_not_go_on(
    cloud: Sandbox, account: Account, prefix: S3Prefix
) -> None:
    marked = marks("night-bill")
    record.claim(prefix, replace(RECORD, run="night-bill", created=time.time(), tags=marked))
    s3_mirror.append_events(prefix, [{"kind": "snapshot", "t": time.time(), "s": 1.0}])
    machines = make(cloud, account, "night-bill", marked)
    teardown.take_down(account, "night-bill", prefix)
    teardown.take_down(account, "night-bill", prefix)
    faults = s3_mirror.events(prefix)
    assert Counter(event["kind"] for event in faults) == {"snapshot": 1, "instance_launched": 2, "instance_ended": 2}
    assert {event["instance"] for event in faults if event["kind"] == "instance_ended"} == set(machines)
    assert accrued(faults, time.time() + 3600).spent_usd == accrued(faults, time.time()).spent_usd > 0


def test_machines_that_ended_long_before_the_run_is_taken_down_cost_nothing_since(
    cloud: Sandbox, account: Account, prefix: S3Prefix
) -> None:
    marked, now = marks("night-lost"), time.time()
    record.claim(prefix, replace(RECORD, run="night-lost", created=now - 3000, tags=marked))
    (first, second) = make(cloud, account, "night-lost", marked)
    there = {"kind": "instance_launched", "t": now - 3000, "s": 0.0, "role": "worker", "type": "m5.large"}
    there |= {"zone": "eu-west-1a", "market": "spot", "usd_per_hour": 1.0, "on_demand_usd_per_hour": None}
    last = {"kind": "snapshot", "t": now - 2500, "s": 500.0}  # and then the head's machine was lost
    s3_mirror.append_events(prefix, [{**there, "instance": first}, {**there, "instance": second}, last])
    cloud.ec2.terminate_instances(InstanceIds=[first, second])
    eventually(lambda: not account.instances("night-lost"))
    teardown.take_down(account, "night-lost", prefix)
    ends = [event["t"] for event in s3_mirror.events(prefix) if event["kind"] == "instance_ended"]
    assert ends == [pytest.approx(now - 2500 + machine_log.UNSEEN_CLOSES_SECONDS)] * 2


def test_a_session_that_ends_leaves_the_one_after_it_alone(cloud: Sandbox, account: Account, prefix: S3Prefix) -> None:
    old, new = marks("night-again"), run_tags("night-again", "s3://b/a/", "arn:me", "0", NOW + 60, NOW + 3600)
    resumed = replace(RECORD, run="night-again", tags=new)
    record.claim(prefix, resumed)
    machines = make(cloud, account, "night-again", new)
    teardown.take_down(account, "night-again", prefix, session=old["idletrain:created"])
    assert sorted(machine.id for machine in account.instances("night-again")) == machines
    assert len(cloud.inventory()["launch_templates"]) == 1
    assert record.read(prefix).state == "running"
    teardown.take_down(account, "night-again", prefix, session=new["idletrain:created"])
    assert not any(cloud.inventory().values())
    assert record.read(prefix).state == "ended"


def test_a_machine_that_takes_its_run_down_is_left_to_end_by_itself(cloud: Sandbox, account: Account) -> None:
    me, _ = make(cloud, account, "night-spare")
    teardown.take_down(account, "night-spare", None, spare=me)
    left = cloud.inventory()
    assert left["instances"] == [me]
    assert (left["security_groups"], left["launch_templates"]) == ([], [])


def test_what_may_not_be_ended_keeps_nothing_else_alive_and_is_named(
    cloud: Sandbox, account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, replace(RECORD, run="night-denied", tags=marks("night-denied")))
    machines = make(cloud, account, "night-denied")
    monkeypatch.setattr(teardown, "REFUSED_SECONDS", 0.5)
    cloud.ask("POST", "fault", action="TerminateInstances", code="UnauthorizedOperation", status=403, times=50)
    with pytest.raises(RunError, match=r"UnauthorizedOperation.*; repeat `idletrain down night-denied --re") as caught:
        teardown.take_down(account, "night-denied", prefix)
    assert all(machine in str(caught.value) for machine in machines)
    left = cloud.inventory()
    assert (sorted(left["instances"]), left["launch_templates"], len(left["security_groups"])) == (machines, [], 1)
    while cloud.ask("GET", "faults"):
        with pytest.raises(cloud.ec2.exceptions.ClientError):
            cloud.ec2.terminate_instances(InstanceIds=machines)
    teardown.take_down(account, "night-denied", prefix)
    assert not any(cloud.inventory().values())
    assert record.read(prefix).state == "ended"


def test_what_survives_is_named(cloud: Sandbox, account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = make(cloud, account, "night-survivor")
    monkeypatch.setattr(teardown, "GONE_SECONDS", 0.5)
    cloud.ask("POST", "fault", action="TerminateInstances", code="InvalidInstanceID.NotFound", times=50)
    end = "repeat `idletrain down night-survivor --region eu-west-1`"
    with pytest.raises(RunError, match=f"run night-survivor still has .*{machines[0][-6:]}.*{end}"):
        teardown.take_down(account, "night-survivor", None)
    while cloud.ask("GET", "faults"):
        with pytest.raises(cloud.ec2.exceptions.ClientError):
            cloud.ec2.terminate_instances(InstanceIds=machines)
