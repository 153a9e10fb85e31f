"""A run's record: the name's lock, and what everything else starts from."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from idletrain.errors import JobError, RunError
from idletrain.fleet import record
from idletrain.fleet.reconcile import Wanted
from idletrain.fleet.record import Record
from idletrain.fleet.requests import Pool, Site
from idletrain.storage import S3Prefix

SPOT, DEAR = Pool("spot", "m5.large", "eu-west-1a"), Pool("on-demand", "t3.medium", "eu-west-1a")
RECORD = Record(
    run="night",
    job={"name": "night", "nodes": {"budget_usd": None}},
    tags={"idletrain:run": "night"},
    created=1.0,
    deadline=2.0,
    site=Site("eu-west-1", "vpc-1", {"eu-west-1a": "subnet-a"}, "ami-1"),
    wanted=Wanted(2, "auto", (SPOT, DEAR)),
    head=DEAR,
    prices={SPOT: 0.1, DEAR: 0.2},
    on_demand={"m5.large": 0.3},
    need_bytes=1 << 30,
    most_slots=1,
)


def test_a_record_is_read_as_it_was_written(prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    assert record.read(prefix) == RECORD


def test_a_name_is_taken_once(prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    with pytest.raises(JobError, match=r"name: run night exists in s3://.*--resume"):
        record.claim(prefix, replace(RECORD, created=9.0))
    assert record.read(prefix).created == 1.0


def test_a_run_that_is_not_there_is_said_to_be_none(prefix: S3Prefix) -> None:
    with pytest.raises(RunError, match="holds no run"):
        record.read(prefix)
    with pytest.raises(RunError, match="holds no run"):
        record.update(prefix, state="ended")


def test_changes_made_at_the_same_time_are_all_kept(prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    changes = [{"state": "ended"}, {"failure": "why"}, {"generation": 7}]
    threads = [threading.Thread(target=record.update, args=(prefix,), kwargs=change) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = record.read(prefix)
    assert (now.state, now.failure, now.generation) == ("ended", "why", 7)
