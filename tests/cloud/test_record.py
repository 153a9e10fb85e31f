"""A run's record: the name's lock, and what everything else starts from."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from rehearsal import RECORD

from idletrain.cloud import record
from idletrain.errors import DamageError, JobError, RunError
from idletrain.storage import S3Prefix


def test_a_record_is_read_as_it_was_written(prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    assert record.read(prefix) == RECORD


def test_a_name_is_taken_once(prefix: S3Prefix) -> None:
    record.claim(prefix, RECORD)
    with pytest.raises(JobError, match=r"name: run night exists in s3://.*--resume"):
        record.claim(prefix, replace(RECORD, created=9.0))
    assert record.read(prefix).created == 1.0
    record.claim(prefix, RECORD)  # as if the reply to the first write had been lost


def test_a_run_that_is_not_there_is_said_to_be_none(prefix: S3Prefix) -> None:
    with pytest.raises(RunError, match="holds no run"):
        record.read(prefix)
    with pytest.raises(RunError, match="holds no run"):
        record.update(prefix, state="ended")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}", b"\xff", b"[1]", b"null", b"[" * 9999, RECORD.as_json().replace(b"1073741824", b'"x"')],
)
def test_a_damaged_record_is_said_to_be_damaged(prefix: S3Prefix, content: bytes) -> None:
    prefix.put(record.RUN_RECORD_KEY, content)
    for use in (record.read, lambda prefix: record.update(prefix, state="ended")):
        with pytest.raises(DamageError, match=r"record\.json of the run does not hold .*idletrain down"):
            use(prefix)


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
