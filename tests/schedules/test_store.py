"""The files that schedules are kept in, and their locks."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from nightly import a_schedule

from idletrain.errors import DamageError, JobError
from idletrain.schedules.cron import Execution, Schedule
from idletrain.schedules.store import HISTORY_LENGTH, ScheduleStore

START = datetime(2026, 3, 1, 2, tzinfo=UTC)


def schedule(name: str = "nightly") -> Schedule:
    return a_schedule(name=name, cloud="local", on="loop", created=START)


@pytest.fixture
def book(tmp_path: Path) -> ScheduleStore:
    return ScheduleStore(tmp_path / "schedules")


def test_a_schedule_is_read_as_it_was_added(book: ScheduleStore) -> None:
    assert book.names() == []
    book.add(schedule("b"))
    book.add(schedule("a"))
    assert book.names() == ["a", "b"]
    assert book.get("a") == schedule("a")
    sweep = replace(schedule("c"), varied=("training.subnets=2,4", "training.seed=1,2"), budget="5usd")
    book.add(sweep)
    assert book.get("c") == sweep


def test_the_job_of_a_cloud_is_kept_beside_it(book: ScheduleStore) -> None:
    book.add(schedule(), "{}")
    assert book.path("nightly", "job").read_text() == "{}"
    assert book.names() == ["nightly"]
    book.remove("nightly")
    assert list(book.directory.iterdir()) == []


def test_an_unknown_schedule_is_a_sentence(book: ScheduleStore) -> None:
    with pytest.raises(JobError, match="there is no schedule nightly; there are: none"):
        book.get("nightly")
    book.add(schedule("other"))
    with pytest.raises(JobError, match="there is no schedule nightly; there are: other"):
        book.get("nightly")


def test_the_last_executions_are_kept_and_read_as_they_were(book: ScheduleStore) -> None:
    book.add(schedule())
    done = [
        Execution(due=START + timedelta(days=n), run=f"r{n}", started=START, exit_code=0)
        for n in range(HISTORY_LENGTH + 3)
    ]
    assert book.history("nightly") == ()
    with book.writing("nightly") as write:
        write(done)
    assert book.history("nightly") == tuple(done[3:])
    lines = book.path("nightly", "history.jsonl").read_text().splitlines()
    assert len(lines) == HISTORY_LENGTH


def test_removing_takes_all_files_of_one_schedule_and_no_others(book: ScheduleStore) -> None:
    for name in ("nightly", "nightly-too"):
        book.add(schedule(name))
        with book.writing(name) as write:
            write([Execution(due=START, run="r")])
        with book.locked(name, "lease"):
            pass
    book.remove("nightly")
    assert sorted(path.name for path in book.directory.iterdir()) == [
        "nightly-too.history.jsonl",
        "nightly-too.json",
        "nightly-too.lease",
    ]
    with pytest.raises(JobError, match="no schedule nightly any more"), book.writing("nightly"):
        pass


def test_a_lease_is_held_once(book: ScheduleStore) -> None:
    book.add(schedule())
    with book.locked("nightly", "lease") as first:
        assert first is not None
        with book.locked("nightly", "lease") as second, book.locked("nightly", "waiting") as other:
            assert second is None
            assert other is not None
    with book.locked("nightly", "lease") as again:
        assert again is not None


@pytest.mark.parametrize(
    "changes", [{"cron": 5}, {"cron": "at noon"}, {"tz": "Nowhere"}, {"created": "2026-03-01T02:00"}]
)
def test_a_file_whose_fields_say_no_time_is_not_a_schedule(book: ScheduleStore, changes: dict[str, Any]) -> None:
    book.add(schedule())
    path = book.path("nightly", "json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DamageError, match="is not a schedule"):
        book.get("nightly")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"name": "nightly"}'])
def test_damaged_files_are_sentences(book: ScheduleStore, text: str) -> None:
    book.add(schedule())
    book.path("nightly", "history.jsonl").write_text(text)
    with pytest.raises(DamageError, match=r"is not a history .* remove it to start an empty one"):
        book.history("nightly")
    book.path("nightly", "json").write_text(text)
    with pytest.raises(DamageError, match=r"is not a schedule .*`idletrain schedule remove nightly`, and add it again"):
        book.get("nightly")
