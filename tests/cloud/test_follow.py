"""Following a run: every event arrives, and a head that is gone or silent is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from rehearsal import RECORD, Sandbox

from idletrain.cloud import follow, leader_lease, record
from idletrain.cloud.aws.account import Account
from idletrain.cloud.record import SweepOrder
from idletrain.errors import RunError, UnansweredError
from idletrain.storage import S3Prefix

ENDED = b'"s": 9.0, "status": "completed", "rounds": 5, "params_sha256": "", "run_dir": ""'
TRIAL = b'"s": 2.0, "t": 2.0, "text": "a begins"'


def test_following_hands_on_every_event_and_tells_why_a_head_gave_up(account: Account, prefix: S3Prefix) -> None:
    record.claim(prefix, replace(RECORD, failure="the data is gone; bring it back"))
    prefix.put("events.jsonl/000000000000000", b'{"kind": "waiting", "s": 0.0, "reason": "for workers"}\n')
    seen: list[Any] = []
    with pytest.raises(RunError, match="the data is gone; bring it back"):
        follow.follow(prefix, seen.append, account)
    assert seen == [{"kind": "waiting", "s": 0.0, "reason": "for workers"}]


def test_following_gives_up_on_a_head_that_is_not_heard_of(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, RECORD)
    monkeypatch.setattr(follow, "BOOT_SECONDS", 0.5)
    with pytest.raises(RunError, match="has said nothing for"):
        follow.follow(prefix, lambda _event: None, account)


def test_a_cloud_that_does_not_answer_for_a_while_ends_no_following(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record.claim(prefix, replace(RECORD, run="cut-off", created=time.time(), deadline=time.time() + 3600))
    prefix.put("events.jsonl/000000000000000", b'{"kind": "snapshot", "t": 1.0}\n')
    outage, clock = Outage(monkeypatch), Clock(lambda _now: None)
    monkeypatch.setattr(follow, "time", clock)
    seen: list[str] = []

    def sink(event: Any) -> None:
        seen.append(event["kind"])
        if event["kind"] == "snapshot":
            outage.left = 60  # of some seconds each: longer than a head may be silent
        else:
            record.update(prefix, state="ended")

    def end_the_run(_now: float) -> None:
        if not outage.left and "run_ended" not in seen:
            end = b'{"kind": "run_ended", "t": %d, %s}\n' % (time.time() + 1, ENDED)
            prefix.put("events.jsonl/000000000000001", end)

    clock.on_sleep = end_the_run
    assert follow.follow(prefix, sink, account).state == "ended"
    assert seen == ["snapshot", "run_ended"]
    assert clock.now > follow.RUN_SILENCE_SECONDS
    assert [message for message in caplog.messages if "cut-off goes on, and is looked at again" in message] != []
    assert len(caplog.messages) <= 2  # each reason once


def test_a_cloud_that_never_answers_again_is_left_once_all_machines_have_ended(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, replace(RECORD, run="cut-off-for-good", deadline=time.time() + 100))
    outage = Outage(monkeypatch)

    def cut_off(_prefix: S3Prefix) -> float:
        outage.left = 1 << 30
        return 0.0

    monkeypatch.setattr(follow.leader_lease, "renewed", cut_off)
    clock = Clock(lambda _now: None)
    monkeypatch.setattr(clock, "time", lambda: time.time() + clock.now)
    monkeypatch.setattr(follow, "time", clock)
    with pytest.raises(UnansweredError, match="AWS cannot be reached"):
        follow.follow(prefix, lambda _event: None, account)
    assert clock.now >= 100


class Outage:
    """An S3 that cannot be reached for so many requests."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left, get = 0, S3Prefix.get

        def flaky(prefix: S3Prefix, key: str) -> Any:
            if self.left:
                self.left -= 1
                raise EndpointConnectionError(endpoint_url=prefix.url)
            return get(prefix, key)

        patch.setattr(S3Prefix, "get", flaky)


class Clock:
    """Time that passes only where someone sleeps, so that no slow machine changes what a test sees."""

    def __init__(self, on_sleep: Callable[[float], None]) -> None:
        self.now, self.on_sleep = 0.0, on_sleep

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(self.now)


def test_a_head_that_only_renews_its_lease_is_alive(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, replace(RECORD, run="beating", created=time.time()))
    last_beat = 2 * follow.RUN_SILENCE_SECONDS

    def lead(now: float) -> None:
        if now <= last_beat:
            prefix.put(leader_lease.LEADER_LEASE_KEY, json.dumps({"holder": "i-1", "renewed": now}).encode())

    clock = Clock(lead)
    monkeypatch.setattr(follow, "time", clock)
    with pytest.raises(RunError, match="has said nothing for 120 s"):
        follow.follow(prefix, lambda _event: None, account)
    noticed = follow.RUN_SILENCE_SECONDS + 2 * follow.ALIVE_CHECK_SECONDS
    assert last_beat + follow.RUN_SILENCE_SECONDS <= clock.now <= last_beat + noticed


def test_a_run_that_has_ended_is_not_lost_with_its_head(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, replace(RECORD, run="ended-alone"))
    monkeypatch.setattr(follow, "ALIVE_CHECK_SECONDS", 0.2)
    prefix.put("events.jsonl/000000000000000", b'{"kind": "snapshot"}\n{"kind": "run_ended", %s}\n' % ENDED)
    seen: list[Any] = []
    assert follow.follow(prefix, seen.append, account).state == "running"  # its head could not write more
    assert [event["kind"] for event in seen] == ["snapshot", "run_ended"]


def test_the_events_of_a_session_are_known_without_their_times(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the head is an hour behind this machine's, that of the head before was an hour ahead."""
    run = replace(RECORD, run="two-clocks", created=time.time(), events_after="events.jsonl/000000000000000")
    record.claim(prefix, run)
    monkeypatch.setattr(follow, "ALIVE_CHECK_SECONDS", 0.2)
    then, now = run.created + 3600, run.created - 3600
    prefix.put("events.jsonl/000000000000000", b'{"kind": "run_ended", "t": %d, %s}\n' % (then, ENDED))
    assert follow.last_events(prefix) == run.events_after
    prefix.put("events.jsonl/000000000000100", b'{"kind": "run_ended", "t": %d, %s}\n' % (now, ENDED))
    seen: list[Any] = []
    assert follow.follow(prefix, seen.append, account).state == "running"  # its head could not write more
    assert [event["t"] for event in seen] == [int(now)]
    assert [event["t"] for event in follow.earlier_events(prefix, run)] == [int(then)]


def test_an_end_before_this_session_does_not_end_it(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = "events.jsonl/000000000000000"
    record.claim(prefix, replace(RECORD, run="ended-before", events_after=last))
    monkeypatch.setattr(follow, "ALIVE_CHECK_SECONDS", 0.2)
    prefix.put(last, b'{"kind": "run_ended", "t": %d, %s}\n' % (time.time() + 3600, ENDED))
    with pytest.raises(RunError, match="ended-before: it has no head; go on with --resume"):
        follow.follow(prefix, lambda _event: None, account)


def test_a_sweep_that_goes_on_behind_its_end_is_lost_with_its_head(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = SweepOrder(trials=[], watched="loss", better="lower", prune=False)
    record.claim(prefix, replace(RECORD, run="tuning", sweep=order))
    monkeypatch.setattr(follow, "ALIVE_CHECK_SECONDS", 0.2)
    prefix.put("events.jsonl/000000000000000", b'{"kind": "run_ended", %s}\n{"kind": "trial", %s}\n' % (ENDED, TRIAL))
    with pytest.raises(RunError, match="it has no head; the command that began the sweep tuning goes on with it"):
        follow.follow(prefix, lambda _event: None, account)


def test_a_trial_s_head_is_its_sweep_s(account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = prefix.beside("tuning-1")
    record.claim(trial, replace(RECORD, run="tuning-1", of_sweep="tuning", created=time.time()))
    beats: list[float] = []

    def lead(now: float) -> None:
        if now <= 2 * follow.RUN_SILENCE_SECONDS:
            beats.append(now)
            lease = json.dumps({"holder": "i-1", "renewed": now}).encode()
            prefix.beside("tuning").put(leader_lease.LEADER_LEASE_KEY, lease)

    monkeypatch.setattr(follow, "time", clock := Clock(lead))
    with pytest.raises(RunError, match="has said nothing for 120 s"):
        follow.follow(trial, lambda _event: None, account)
    assert clock.now > beats[-1] + follow.RUN_SILENCE_SECONDS


def test_a_cloud_that_refuses_to_list_machines_loses_no_head(cloud: Sandbox, account: Account) -> None:
    cloud.ask("POST", "fault", action="DescribeInstances", code="UnauthorizedOperation", status=403)
    assert follow.head_is_lost(account, RECORD) == ""
    assert cloud.ask("GET", "faults") == []
    assert follow.head_is_lost(account, RECORD).endswith("; go on with --resume")


def test_what_is_left_of_an_ended_run_is_a_sentence(
    cloud: Sandbox, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = replace(RECORD, state="ended")
    assert follow.leftover_after(account, ended) == ""
    written = replace(ended, leftover="run night still has lt-1; repeat `idletrain down night`")
    assert follow.leftover_after(account, written) == written.leftover
    monkeypatch.setattr(follow, "HEAD_END_SECONDS", 0.5)
    tags = {"ResourceType": "instance", "Tags": [{"Key": "idletrain:run", "Value": "night"}]}
    (there,) = cloud.start("sleep 60", TagSpecifications=[tags])
    assert follow.leftover_after(account, ended) == (
        f"run night has ended, but not {there}; end it with `idletrain down night --region eu-west-1`"
    )


def test_following_tells_that_a_head_is_gone_which_said_nothing(
    account: Account, prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.claim(prefix, replace(RECORD, run="headless-from-the-start"))
    monkeypatch.setattr(follow, "ALIVE_CHECK_SECONDS", 0.5)
    with pytest.raises(RunError, match="headless-from-the-start: it has no head; go on with --resume"):
        follow.follow(prefix, lambda _event: None, account)
