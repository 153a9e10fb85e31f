"""Each machine of a run is logged once, and none is billed for ever because nobody saw its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rehearsal import RECORD, SPOT

from idletrain.cloud import machine_log
from idletrain.cloud.machines import Instance
from idletrain.observe.cost import accrued
from idletrain.observe.records import SCHEMA

NOW = 10_000.0
RUN = replace(RECORD, created=1000.5)


def instance(id_: str, state: str = "running", at: float = 2000.0, reason: str = "") -> Instance:
    return Instance(id_, state, SPOT, at, "", {"idletrain:role": "worker"}, reason)


def launched(id_: str, at: float = 2000.0) -> dict[str, Any]:
    (event,) = machine_log.new_records([], [instance(id_, at=at)], RUN, RUN.prices, NOW)
    return event


def ended(id_: str, at: float) -> dict[str, Any]:
    return {"kind": "instance_ended", "t": at, "instance": id_, "reason": ""}


def test_a_machine_is_logged_with_its_prices_and_once() -> None:
    (event,) = machine_log.new_records([], [instance("i-1")], RUN, RUN.prices, NOW)
    assert (event["kind"], event["t"], event["instance"], event["role"]) == (
        "instance_launched",
        2000.0,
        "i-1",
        "worker",
    )
    assert (event["usd_per_hour"], event["on_demand_usd_per_hour"]) == (0.1, 0.3)
    assert machine_log.new_records([event], [instance("i-1")], RUN, RUN.prices, NOW) == []


def test_an_end_is_logged_with_its_reason_and_once() -> None:
    terminated = instance("i-1", "terminated", reason="Server.SpotInstanceTermination")
    (event,) = machine_log.new_records([launched("i-1")], [terminated], RUN, RUN.prices, NOW)
    assert (event["kind"], event["t"], event["reason"]) == ("instance_ended", NOW, "Server.SpotInstanceTermination")
    assert machine_log.new_records([launched("i-1"), event], [terminated], RUN, RUN.prices, NOW) == []


def test_machines_of_the_sitting_before_are_not_this_one_s() -> None:
    def sitting(began: str) -> dict[str, str]:
        return {"idletrain:role": "worker", "idletrain:created": began}

    run = replace(RUN, tags=sitting("2026-11-22T06:00:00+00:00"))
    old, new = (
        replace(instance(id_, at=999.0), tags=sitting(f"2026-11-22T{hour}:00:00+00:00"))  # by EC2's clock, not ours
        for id_, hour in (("i-old", "05"), ("i-new", "06"))
    )
    assert [event["instance"] for event in machine_log.new_records([], [old, new], run, run.prices, NOW)] == ["i-new"]


def test_what_was_there_ends_now_and_what_was_not_soon_behind_the_last_word() -> None:
    reported = [
        launched("i-1"),
        launched("i-2"),
        launched("i-3"),
        ended("i-3", 2500.0),
        {"kind": "staged", "t": 3000.0},
    ]
    ends = {event["instance"]: event["t"] for event in machine_log.closing_records(reported, {"i-1"}, NOW)}
    assert ends == {"i-1": NOW, "i-2": 3000.0 + machine_log.UNSEEN_CLOSES_SECONDS}
    assert (
        machine_log.closing_records([*reported, *machine_log.closing_records(reported, {"i-1"}, NOW)], {"i-1"}, NOW)
        == []
    )


def test_a_run_that_logged_its_own_end_needs_no_other() -> None:
    assert machine_log.closing_records([launched("i-1"), {"kind": "run_ended", "t": 3000.0}], (), NOW) == []


def test_a_bill_stops_at_the_end_that_was_added() -> None:
    reported = [launched("i-1"), {"kind": "staged", "t": 3000.0}]
    closed = [*reported, *machine_log.closing_records(reported, (), NOW)]
    assert accrued(closed, NOW).items[0].seconds == pytest.approx(1000 + machine_log.UNSEEN_CLOSES_SECONDS)
    assert accrued(closed, 10 * NOW) == accrued(closed, NOW)


def test_added_events_go_on_with_the_head_s_clock() -> None:
    reported = [{"kind": "staged", "t": 3000.0, "s": 50.0}]
    added = machine_log.as_recorded(reported, [launched("i-1", at=2990.0), ended("i-1", 3060.0)])
    assert [event["s"] for event in added] == [50.0, 110.0]
    assert machine_log.as_recorded([], [ended("i-1", 3060.0)])[0]["s"] == 0.0


def test_added_events_have_the_schema_of_all_others() -> None:
    assert machine_log.MACHINE_LOG_SCHEMA == SCHEMA


def test_news_found_at_the_end_are_no_sign_that_the_head_lived_so_long() -> None:
    launched = {"kind": "instance_launched", "t": 100.0, "instance": "i-1"}
    word = {"kind": "staged", "t": 200.0}
    news = [{"kind": "instance_ended", "t": 9000.0, "instance": "i-2", "reason": ""}]
    (closing,) = machine_log.closing_records([launched, word], (), 9000.0, news)
    assert (closing["instance"], closing["t"]) == ("i-1", 200.0 + machine_log.UNSEEN_CLOSES_SECONDS)


def test_a_machine_that_nobody_saw_end_ends_soon_behind_the_last_word_and_not_before_it_began() -> None:
    reported = [launched("i-1"), {"kind": "staged", "t": 3000.0}]
    late = launched("i-3", at=3500.0)
    new = [ended("i-1", NOW), ended("i-2", NOW), late, ended("i-3", NOW)]
    found = machine_log.ended_unseen(new, reported, {"i-2"}, NOW)
    assert [event["t"] for event in found] == [3000.0 + machine_log.UNSEEN_CLOSES_SECONDS, NOW, 3500.0, 3500.0]
